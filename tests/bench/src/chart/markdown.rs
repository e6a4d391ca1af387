//! Step times and memory of `zs-bench torch` as a table for the documents.

use super::{
    rows::Rows,
    text,
    torch::{Comparison, Subject, comparisons},
};

/// The marks around the table, so that a newer one can replace it.
const MARKS: [&str; 2] =
    ["<!-- zs-bench chart --table -->", "<!-- zs-bench chart --table: end -->"];

/// A column: its title, and the text of a subject. A column without any text is omitted.
type Column = (&'static str, fn(&Subject) -> Option<String>);

const COLUMNS: [Column; 9] = [
    ("system", |of| Some(of.system.clone())),
    ("level", |of| of.level.as_ref().map(|level| format!("`{level}`"))),
    ("transport", |of| (!of.detail.is_empty()).then(|| of.detail.clone())),
    ("seconds", |of| Some(format!("{:.3}", of.seconds))),
    ("x DDP", |of| of.x_ddp.map(ratio)),
    ("x floor", |of| of.x_floor.map(ratio)),
    ("rank, MiB", |of| of.peak_mib.map(mib)),
    ("GPU, MiB", |of| of.gpu_peak_mib.map(mib)),
    ("servers, MiB", |of| of.servers_peak_mib.map(mib)),
];

fn ratio(number: f64) -> String {
    format!("{number:.2}")
}

fn mib(number: f64) -> String {
    text::thousands(number as u64)
}

/// Returns a table for each workload, with the machine, date and version above it; `None` if there
/// are no rows of `zs-bench torch`.
pub(super) fn table(rows: &Rows) -> Option<String> {
    let tables: Vec<_> = comparisons(&rows.torch).iter().map(|of| comparison(of, rows)).collect();
    let [begin, end] = MARKS;
    (!tables.is_empty()).then(|| format!("{begin}\n{}\n{end}", tables.join("\n")))
}

fn comparison(of: &Comparison, rows: &Rows) -> String {
    let (machine, date, version) = (rows.machine(), rows.date(), rows.version());
    let has_text = |(_, cell): &&Column| of.subjects.iter().any(|subject| cell(subject).is_some());
    let columns: Vec<_> = COLUMNS.iter().filter(has_text).collect();
    let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
    let cell = |text: Option<String>| {
        text.map_or_else(|| "-".to_owned(), |text| text.replace(['|', '\n', '\r'], " "))
    };
    let mut lines = vec![
        format!("{}.", of.description()),
        format!("Measured with ZeroShard {version} on {date}: {machine}."),
        String::new(),
        line(columns.iter().map(|(title, _)| (*title).to_owned()).collect()),
        format!("|{}", "---|".repeat(columns.len())),
    ];
    lines.extend(
        of.subjects
            .iter()
            .map(|subject| line(columns.iter().map(|(_, text)| cell(text(subject))).collect())),
    );
    lines.push(String::new());
    lines.join("\n")
}

//! Plain tables, and sizes that people can read.

use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};

/// An empty table.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    // Long reasons wrap at the width of the terminal. Output to a file has no width.
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table
}

/// Bytes with a binary unit.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (0..UNITS.len() - 1)
        .find(|&unit| bytes >> (10 * (unit + 1)) == 0)
        .unwrap_or(UNITS.len() - 1);
    match unit {
        0 => format!("{bytes} B"),
        unit => format!("{:.1} {}", bytes as f64 / (1u64 << (10 * unit)) as f64, UNITS[unit]),
    }
}

/// A duration with a unit, such as `1.5 s` or `12 min`.
pub(crate) fn ago(duration: Duration) -> String {
    match duration.as_secs() {
        0 => format!("{} ms", duration.as_millis()),
        1..10 => format!("{:.1} s", duration.as_secs_f64()),
        seconds @ 10..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

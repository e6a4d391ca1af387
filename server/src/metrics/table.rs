//! Compares `docs/reference/metrics.md` with the families that are registered. With the environment
//! variable `ZEROSHARD_WRITE_TABLE` the test writes the table.

use std::{fmt::Write as _, path::Path};

use super::{
    Metrics,
    families::{Families, Family},
};

const BEGIN: &str = "<!-- The table is written by a test: see server/src/metrics/table.rs. -->\n\n";

/// The beginning of the next section.
const END: &str = "\n## ";

/// The unit of a family, from the end of its name.
fn unit(name: &str) -> &'static str {
    let base = name.trim_end_matches("_total");
    [("_seconds", "seconds"), ("_bytes", "bytes")]
        .into_iter()
        .find_map(|(end, unit)| base.ends_with(end).then_some(unit))
        .unwrap_or("")
}

fn table(mut families: Vec<Family>) -> String {
    families.sort_by(|a, b| a.name.cmp(&b.name));
    let mut table = "| name | type | labels | unit | meaning |\n|---|---|---|---|---|\n".to_owned();
    for Family { name, kind, labels, help } in families {
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        let (labels, unit) = (labels.join(", "), unit(&name));
        writeln!(table, "| `{name}` | {kind} | {labels} | {unit} | {help} |").unwrap();
    }
    table
}

#[test]
fn the_table_of_the_documentation_lists_all_metrics() {
    let mut families = Families::default();
    Metrics::describe(&mut families);
    let expected = table(families.all);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/metrics.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, found) = text.split_once(BEGIN).expect("the file has the line before the table");
    let (found, after) = found.split_at(found.find(END).expect("the file has a next section"));
    if std::env::var_os("ZEROSHARD_WRITE_TABLE").is_some() {
        std::fs::write(&path, [before, BEGIN, &expected, after].concat()).unwrap();
    } else {
        assert_eq!(found, expected, "set ZEROSHARD_WRITE_TABLE=1 to write the table");
    }
}

#[test]
fn names_end_with_units_and_counters_with_total() {
    let mut families = Families::default();
    Metrics::describe(&mut families);
    for Family { name, kind, help, .. } in families.all {
        assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
        assert!(kind != "histogram" || name.ends_with("_seconds"), "{name}");
        let help = help.to_lowercase();
        let counted =
            ["number", "1 ", "1,", "version", "epoch"].iter().any(|word| help.contains(word));
        assert!(
            help.contains(unit(&name)) && (!unit(&name).is_empty() || counted),
            "{name}: {help}"
        );
    }
}

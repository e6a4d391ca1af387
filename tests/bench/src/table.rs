//! Results: a table for readers, or one JSON object per line.

use serde_json::{Value, json};

use crate::machine::Machine;

/// Rows with the same fields.
pub(crate) struct Table {
    json: bool,
    fields: Vec<&'static str>,
    rows: comfy_table::Table,
}

impl Table {
    pub(crate) fn new(json: bool, fields: &[&'static str]) -> Self {
        let mut rows = comfy_table::Table::new();
        rows.load_style(comfy_table::presets::NOTHING).set_header(fields);
        Self { json, fields: fields.to_vec(), rows }
    }

    /// Adds a row. In JSON it is printed at once, with all of its fields.
    pub(crate) fn row(&mut self, row: Value) {
        if self.json {
            print_json(row);
        } else {
            self.rows.add_row(self.fields.iter().map(|field| cell(&row[field])));
            eprintln!("{row}");
        }
    }

    #[expect(clippy::print_stdout, reason = "the program's output")]
    pub(crate) fn finish(self) {
        if !self.json {
            println!("{}", self.rows);
        }
    }
}

/// Prints a row of JSON, with the machine that it was measured on.
#[expect(clippy::print_stdout, reason = "the program's output")]
pub(crate) fn print_json(mut row: Value) {
    row["machine"] = json!(Machine::this());
    println!("{row}");
}

fn cell(value: &Value) -> String {
    match value {
        Value::Number(number) if number.is_f64() => {
            format!("{:.3}", number.as_f64().unwrap_or(f64::NAN))
        }
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

/// Reports the address of this process to the parent process.
#[expect(clippy::print_stdout, reason = "the parent reads it")]
pub(crate) fn print_listening(address: &str) {
    println!("{}", json!({"event": "listening", "address": address}));
}

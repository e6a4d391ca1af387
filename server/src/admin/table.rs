//! Tables, which a narrow window shows as lists: each row as a card, with a label at each value.

use std::fmt::{Display, Write as _};

/// A column: its heading, and the classes of its cells.
pub(super) type Column = (&'static str, &'static str);

/// A table with a fixed set of columns.
pub(super) struct Table {
    /// The name of its heading. The table keeps its scroll position by this name.
    pub(super) name: &'static str,
    pub(super) columns: &'static [Column],
}

impl Table {
    /// Begins the table.
    pub(super) fn begin(&self, html: &mut String) {
        let Self { name, columns } = self;
        let _ = write!(
            html,
            "<div class=scroll id=scroll-{name} tabindex=0 role=region aria-labelledby={name}>\
             <table><thead><tr>"
        );
        for (heading, class) in *columns {
            let _ = write!(html, "<th class='{class}'>{heading}");
        }
        html.push_str("</thead><tbody>");
    }

    /// Adds a row with one cell for each column, in HTML. An empty cell is a dash.
    pub(super) fn row(&self, html: &mut String, cells: &[&dyn Display]) {
        html.push_str("<tr>");
        for ((heading, class), cell) in self.columns.iter().zip(cells) {
            let _ = write!(html, "<td class='{class}' data-label='{heading}'>");
            let content = html.len();
            let _ = write!(html, "{cell}");
            if html.len() == content {
                html.push('–');
            }
        }
    }

    /// Ends the table.
    pub(super) fn end(&self, html: &mut String) {
        html.push_str("</tbody></table></div>");
    }
}

//! Draws curves, bars and maps as SVG inside HTML. The security policy of the page forbids inline
//! styles, so colours are classes and sizes are attributes.

use std::fmt::Write as _;

use super::html::{bytes, count, number, optional};

/// The coordinate system of a curve. The browser scales it to the size of the figure.
const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 100.0;
/// The ratio of the largest to the smallest value above which a curve has a logarithmic axis.
const LOGARITHMIC: f64 = 50.0;
/// The minimum width of a part of a bar in percent, so that small parts remain visible.
const VISIBLE: f64 = 0.3;
/// The maximum number of columns of a map of slices.
const COLUMNS: usize = 128;

/// A curve of values over versions.
pub(super) struct Curve<'a> {
    pub(super) title: &'a str,
    /// The current value, beside the title.
    pub(super) now: Option<f64>,
    /// The version and the value of each point, by ascending version.
    pub(super) points: Vec<(u64, Option<f64>)>,
    /// `true` if the axis begins at 0.
    pub(super) from_zero: bool,
    /// The text that replaces a curve without values.
    pub(super) empty: &'a str,
}

impl Curve<'_> {
    /// Draws a figure with the title, the current value, and the curve with its axes.
    pub(super) fn figure(&self) -> String {
        let Self { title, now, ref points, from_zero, empty } = *self;
        let values: Vec<f64> = points.iter().filter_map(|(_, value)| *value).collect();
        let head = format!(
            "<figcaption><span>{title}</span> <strong>{}</strong></figcaption>",
            optional(now)
        );
        let (Some((first, _)), Some((last, _)), false) =
            (points.first(), points.last(), values.is_empty())
        else {
            return format!("<figure class=curve>{head}<p class=empty>{empty}</p></figure>");
        };
        let axis = Axis::of(&values, from_zero);
        let path = path(points, &axis);
        let (low, high) = (number(axis.low), number(axis.high));
        let scale = if axis.is_logarithmic { " <small>log</small>" } else { "" };
        let head = head.replace("</span>", &format!("{scale}</span>"));
        format!(
            "<figure class=curve>{head}<div class=plot>\
             <svg viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio=none role=img \
             aria-label='{title} from {low} to {high}'>\
             <path class=grid d='M0 .5H{WIDTH}M0 50H{WIDTH}M0 99.5H{WIDTH}'/>\
             <path class=line d='{path}'/></svg>\
             <span class=high>{high}</span><span class=low>{low}</span></div>\
             <div class=axis><span>step {}</span><span>{}</span></div></figure>",
            count(*first),
            count(*last),
        )
    }
}

/// The vertical axis of a curve.
struct Axis {
    low: f64,
    high: f64,
    is_logarithmic: bool,
}

impl Axis {
    fn of(values: &[f64], from_zero: bool) -> Self {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let is_logarithmic = !from_zero && low > 0.0 && high / low > LOGARITHMIC;
        Self { low: if from_zero { low.min(0.0) } else { low }, high, is_logarithmic }
    }

    /// The distance of a value from the top, between 0 and [`HEIGHT`].
    fn place(&self, value: f64) -> f64 {
        let map = |value: f64| if self.is_logarithmic { value.ln() } else { value };
        let (low, high) = (map(self.low), map(self.high));
        let part = if high > low { (map(value) - low) / (high - low) } else { 0.5 };
        // The margin keeps the line from being cut off at the edges.
        1.0 + (HEIGHT - 2.0) * (1.0 - part)
    }
}

/// The path of a curve, with a gap where a value is missing.
fn path(points: &[(u64, Option<f64>)], axis: &Axis) -> String {
    let (first, last) = (points[0].0, points[points.len() - 1].0);
    let span = (last - first).max(1) as f64;
    let (mut path, mut is_drawing) = (String::new(), false);
    for (at, (version, value)) in points.iter().enumerate() {
        let Some(value) = value else {
            is_drawing = false;
            continue;
        };
        let (x, y) = (WIDTH * (version - first) as f64 / span, axis.place(*value));
        let is_alone = !is_drawing && points.get(at + 1).is_none_or(|(_, next)| next.is_none());
        // Writing to a String cannot fail.
        let _ = write!(path, "{}{x:.1} {y:.1}", if is_drawing { 'L' } else { 'M' });
        if is_alone {
            // A line of this length appears as a dot, because its ends are round.
            path.push_str("h.01");
        }
        is_drawing = true;
    }
    path
}

/// Draws a bar of parts. Each part has the number of a colour, a label and a size; `whole` is the
/// size that fills the full width.
pub(super) fn bar(parts: &[(u8, String, f64)], whole: f64) -> String {
    let whole = whole.max(parts.iter().map(|(_, _, size)| size).sum()).max(f64::MIN_POSITIVE);
    let mut svg = String::from("<svg class=bar role=presentation>");
    let mut x = 0.0;
    for (colour, label, size) in parts.iter().filter(|(_, _, size)| *size > 0.0) {
        let width = (100.0 * size / whole).max(VISIBLE);
        let _ = write!(
            svg,
            "<rect class=c{colour} x='{x:.2}%' width='{width:.2}%' height='100%'><title>{label}\
             </title></rect>"
        );
        x += width;
    }
    svg.push_str("</svg>");
    svg
}

/// Draws the legend of a bar. Each label has the number of a colour and a text.
pub(super) fn legend<'a>(labels: impl IntoIterator<Item = (u8, &'a str)>) -> String {
    let mut list = String::from("<ul class=legend>");
    for (colour, label) in labels {
        let _ = write!(
            list,
            "<li><svg class=key role=presentation><rect class=c{colour} width='100%' \
             height='100%'/></svg>{label}</li>"
        );
    }
    list.push_str("</ul>");
    list
}

/// One row of a map of slices: the bytes that a server holds as the primary of a slice or as its
/// backup. If a job has more slices than the map has columns, each column stands for several
/// slices, and is filled in proportion to the bytes that the server holds.
pub(super) struct Row<'a> {
    /// The sizes of all slices in bytes.
    sizes: &'a [u64],
    /// The bytes of slices with the server as the primary and as a backup, by column.
    cells: Vec<[u64; 2]>,
}

impl<'a> Row<'a> {
    pub(super) fn new(sizes: &'a [u64]) -> Self {
        Self { sizes, cells: vec![[0; 2]; sizes.len().min(COLUMNS)] }
    }

    /// Adds a slice that the server holds.
    pub(super) fn add(&mut self, slice: usize, is_primary: bool) {
        let column = slice * self.cells.len() / self.sizes.len().max(1);
        if let (Some(cell), Some(size)) = (self.cells.get_mut(column), self.sizes.get(slice)) {
            cell[usize::from(!is_primary)] += size;
        }
    }

    /// The bytes of slices with the server as the primary and as a backup.
    pub(super) fn totals(&self) -> [u64; 2] {
        self.cells
            .iter()
            .fold([0; 2], |[primary, backup], cell| [primary + cell[0], backup + cell[1]])
    }

    /// The totals as text, such as `1.25 GiB + 1.25 GiB`.
    pub(super) fn text(&self) -> String {
        let [primary, backup] = self.totals().map(bytes);
        format!("{primary} <small>+ {backup}</small>")
    }

    /// Draws the row. Primaries fill a column from the bottom, and backups fill it from the top.
    pub(super) fn svg(&self) -> String {
        let columns = self.cells.len();
        let mut svg = format!(
            "<svg class=map viewBox='0 0 {columns} 10' preserveAspectRatio=none \
             role=presentation><rect class=room width={columns} height=10 />"
        );
        for (column, [primary, backup]) in self.cells.iter().enumerate() {
            // The slices that the column stands for.
            let [first, end] =
                [column, column + 1].map(|of| (of * self.sizes.len()).div_ceil(columns));
            let all = self.sizes[first..end].iter().sum::<u64>().max(1);
            let height = |of: u64| 10.0 * of as f64 / all as f64;
            let (held, copied) = (height(*primary), height(*backup));
            for (class, y, height) in [("own", 10.0 - held, held), ("copy", 0.0, copied)] {
                if height > 0.0 {
                    let _ = write!(
                        svg,
                        "<rect class={class} x={column} y={y:.1} width=.86 height={height:.1} />"
                    );
                }
            }
        }
        svg.push_str("</svg>");
        svg
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: Vec<(u64, Option<f64>)>) -> String {
        Curve { title: "Loss", now: Some(2.0), points, from_zero: false, empty: "No steps" }
            .figure()
    }

    #[test]
    fn a_curve_has_a_gap_for_a_missing_value_and_a_dot_for_a_single_value() {
        let of = |points: &[(u64, Option<f64>)]| {
            path(points, &Axis { low: 0.0, high: 1.0, is_logarithmic: false })
        };
        let gap = [(0, Some(0.0)), (1, Some(1.0)), (2, None), (3, Some(1.0))];
        assert_eq!(of(&gap), "M0.0 99.0L200.0 1.0M600.0 1.0h.01");
        assert_eq!(of(&[(7, Some(0.5))]), "M0.0 50.0h.01");
    }

    #[test]
    fn a_curve_without_values_is_replaced_by_a_text() {
        assert!(curve(vec![]).contains("No steps") && curve(vec![(1, None)]).contains("No steps"));
        assert!(!curve(vec![(1, Some(3.0))]).contains("No steps"));
    }

    #[test]
    fn a_wide_range_of_values_has_a_logarithmic_axis() {
        assert!(curve(vec![(1, Some(1.0)), (2, Some(1e4))]).contains("log"));
        assert!(!curve(vec![(1, Some(1.0)), (2, Some(2.0))]).contains("log"));
        assert!(!curve(vec![(1, Some(-1.0)), (2, Some(1e4))]).contains("log"));
    }

    #[test]
    fn a_map_has_a_bounded_number_of_columns_and_the_bytes_of_every_slice() {
        let sizes = vec![2; 100_000];
        let mut row = Row::new(&sizes);
        (0..100_000).step_by(2).for_each(|slice| row.add(slice, true));
        (1..100_000).step_by(4).for_each(|slice| row.add(slice, false));
        assert_eq!(row.totals(), [100_000, 50_000]);
        assert_eq!(row.text(), "97.7 KiB <small>+ 48.8 KiB</small>");
        let svg = row.svg();
        assert_eq!(svg.matches("class=own").count(), COLUMNS);
        assert_eq!(svg.matches("class=copy").count(), COLUMNS);
        let mut few = Row::new(&[1, 2, 3]);
        few.add(2, true);
        assert_eq!(few.totals(), [3, 0]);
        assert!(few.svg().contains("x=2 y=0.0 width=.86 height=10.0"), "{}", few.svg());
        assert!(!Row::new(&[]).svg().contains("own"));
    }

    #[test]
    fn the_parts_of_a_bar_are_no_wider_than_the_bar() {
        let svg = bar(&[(1, "a".to_owned(), 3.0), (2, "b".to_owned(), 1.0)], 2.0);
        assert!(svg.contains("width='75.00%'") && svg.contains("x='75.00%' width='25.00%'"));
        assert!(!bar(&[(1, "a".to_owned(), 0.0)], 0.0).contains("rect"));
    }
}

//! Draws panels as SVG.
//!
//! The panels are below each other, and their bars begin at the same place. The background is
//! white, because a page with a dark background would otherwise hide the text.

use std::io;

use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::panels::{Bar, Column, Panel, Row};

/// The width of the chart in pixels.
const WIDTH: i32 = 900;
const MARGIN: i32 = 28;
/// The height of a row and of its bar, and the space above a row that has another name than the row
/// before it.
const ROW: i32 = 19;
const BAR: i32 = 13;
const GROUP_SPACE: i32 = 4;
/// The space between names, details and columns.
const SPACE: i32 = 18;
/// The height above the first panel, of a line of text, and of the space below a panel.
const HEADER: i32 = 84;
const LINE: i32 = 19;
const PANEL_SPACE: i32 = 30;
/// The most characters of a name or a detail, and of any text.
const CHARACTERS: usize = 28;
const LONGEST: usize = 115;

const FONT: &str = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif";
const DARK: RGBColor = RGBColor(31, 35, 40);
const GREY: RGBColor = RGBColor(101, 109, 118);
const LIGHT: RGBColor = RGBColor(216, 222, 228);
const MARK: RGBColor = RGBColor(207, 34, 46);

/// The look of a text.
struct Font {
    size: i32,
    weight: FontStyle,
    colour: RGBColor,
    anchor: HPos,
}

/// The size of all text but titles.
const SMALL: i32 = 13;
const PLAIN: Font =
    Font { size: SMALL, weight: FontStyle::Normal, colour: DARK, anchor: HPos::Left };
const STRONG: Font = Font { weight: FontStyle::Bold, ..PLAIN };
const MUTED: Font = Font { colour: GREY, ..PLAIN };
const CENTRED: Font = Font { anchor: HPos::Center, ..MUTED };
const TITLE: Font = Font { size: 22, ..STRONG };
const HEADING: Font = Font { size: 16, ..STRONG };

/// The texts above the panels, and the panels.
#[derive(Debug, Default)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) subtitle: String,
    pub(super) panels: Vec<Panel>,
}

type Result<T = ()> = std::result::Result<T, DrawingAreaErrorKind<io::Error>>;

impl Chart {
    /// Draws the chart.
    pub(super) fn svg(&self) -> String {
        let mut svg = String::new();
        self.draw(&mut svg).expect("writing to a string cannot fail");
        svg
    }

    fn draw(&self, svg: &mut String) -> Result {
        let heights = self.panels.iter().map(|panel| height(panel) + PANEL_SPACE);
        let height = HEADER + heights.sum::<i32>();
        let root = SVGBackend::with_string(svg, (WIDTH as u32, height as u32)).into_drawing_area();
        root.fill(&WHITE)?;
        let widest = |text: fn(&Row) -> &str| {
            let rows = self.panels.iter().flat_map(|panel| &panel.rows);
            rows.map(|row| width(&shortened(text(row), CHARACTERS))).max().unwrap_or(0)
        };
        let (name, detail) = (widest(|row| &row.name), widest(|row| &row.detail));
        let details = MARGIN + name + SPACE;
        let bars = details + detail + if detail > 0 { SPACE } else { 0 };
        let pen = Pen { root, details, bars };
        pen.text((MARGIN, 34), &TITLE, &self.title)?;
        pen.text((MARGIN, 60), &MUTED, &self.subtitle)?;
        let mut top = HEADER;
        for panel in &self.panels {
            pen.panel(panel, top)?;
            top += self::height(panel) + PANEL_SPACE;
        }
        pen.root.present()
    }
}

/// The height of a panel.
fn height(panel: &Panel) -> i32 {
    head(panel) + panel.rows.len() as i32 * ROW + (groups(&panel.rows) - 1).max(0) * GROUP_SPACE
}

/// The height of what is above the rows of a panel: its texts, a line, and the titles of columns.
fn head(panel: &Panel) -> i32 {
    let has_reference = panel.columns.iter().any(|column| column.reference.is_some());
    (3 + i32::from(panel.mark.is_some()) + i32::from(has_reference)) * LINE + 21
}

/// The number of names.
fn groups(rows: &[Row]) -> i32 {
    rows.chunk_by(|a, b| a.name == b.name).count() as i32
}

/// The approximate width of a small text. The font depends on the reader's system.
fn width(text: &str) -> i32 {
    text.chars().count() as i32 * SMALL * 56 / 100
}

/// The first characters of a text that has more.
fn shortened(text: &str, characters: usize) -> String {
    let text = text.replace(char::is_control, " ");
    match text.char_indices().nth(characters) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Where the parts of a panel are drawn.
struct Pen<'a> {
    root: DrawingArea<SVGBackend<'a>, Shift>,
    /// Where details and bars begin.
    details: i32,
    bars: i32,
}

/// The horizontal extent of a column of bars, and its scale.
struct Scale {
    left: i32,
    width: i32,
    /// The width of the text at the end of a bar.
    text: i32,
    longest: f64,
    /// Where the line at 1 is, if there is one.
    reference: Option<i32>,
}

impl Scale {
    /// The width of a bar of this length.
    fn width(&self, length: f64) -> i32 {
        (length / self.longest * f64::from(self.width)).round() as i32
    }
}

/// The longest bar, mark or reference of a column.
fn longest(panel: &Panel, column: usize) -> f64 {
    let bars = panel.rows.iter().filter_map(|row| row.bars[column].as_ref());
    let lengths = bars.flat_map(|bar| [bar.length, bar.mark.unwrap_or(0.0)]);
    let reference = panel.columns[column].reference.map_or(f64::MIN_POSITIVE, |_| 1.0);
    lengths.fold(reference, f64::max)
}

/// The width of the text at the ends of the bars of a column, and of the note after it.
fn texts(panel: &Panel, column: usize) -> (i32, i32) {
    let bars = panel.rows.iter().filter_map(|row| row.bars[column].as_ref());
    bars.fold((0, 0), |(text, note), bar| (text.max(width(&bar.text)), note.max(width(&bar.note))))
}

impl Pen<'_> {
    fn panel(&self, panel: &Panel, top: i32) -> Result {
        self.rectangle((MARGIN, top), (WIDTH - MARGIN, top + 1), LIGHT)?;
        let mut y = top + LINE + 4;
        self.text((MARGIN, y), &HEADING, &panel.title)?;
        y += LINE;
        self.text((MARGIN, y), &MUTED, &panel.subtitle)?;
        if let Some(mark) = panel.mark {
            y += LINE;
            self.rectangle((MARGIN, y - 7), (MARGIN + 2, y + 7), MARK)?;
            self.text((MARGIN + 8, y), &MUTED, mark)?;
        }
        let scales = self.scales(panel);
        for (column, scale) in panel.columns.iter().zip(&scales) {
            self.column(column, scale, y + LINE + 6, top + height(panel))?;
        }
        let mut y = top + head(panel);
        for (i, row) in panel.rows.iter().enumerate() {
            let is_first = i == 0 || panel.rows[i - 1].name != row.name;
            y += if is_first && i > 0 { GROUP_SPACE } else { 0 };
            self.row(row, is_first, y + ROW / 2)?;
            for (bar, scale) in row.bars.iter().zip(&scales) {
                if let Some(bar) = bar {
                    self.bar(bar, row.tint.rgb(), scale, y + ROW / 2)?;
                }
            }
            y += ROW;
        }
        Ok(())
    }

    /// Divides the width among the columns.
    fn scales(&self, panel: &Panel) -> Vec<Scale> {
        let shares: i32 = panel.columns.iter().map(|column| column.width).sum();
        let spaces = (panel.columns.len() as i32 - 1).max(0) * 2 * SPACE;
        let available = WIDTH - MARGIN - self.bars - spaces;
        let all = (0..panel.columns.len()).map(|column| longest(panel, column));
        let overall = all.clone().fold(0.0, f64::max);
        let mut left = self.bars;
        let scale = |(i, longest): (usize, f64)| {
            let column = available * panel.columns[i].width / shares;
            let (text, note) = texts(panel, i);
            let longest = if panel.has_common_scale { overall } else { longest };
            let mut scale = Scale {
                left,
                width: (column - text - note - 20).max(20),
                text,
                longest,
                reference: None,
            };
            scale.reference = panel.columns[i].reference.map(|_| left + scale.width(1.0));
            left += column + 2 * SPACE;
            scale
        };
        all.enumerate().map(scale).collect()
    }

    /// The title of a column, and its line, which is behind the bars.
    fn column(&self, column: &Column, scale: &Scale, y: i32, bottom: i32) -> Result {
        self.text((scale.left, y), &STRONG, column.title)?;
        let (Some(name), Some(line)) = (column.reference, scale.reference) else { return Ok(()) };
        self.rectangle((line, y + LINE + 6), (line + 1, bottom), GREY)?;
        let half = width(name) / 2;
        let at = (line.clamp(scale.left + half, WIDTH - MARGIN - half), y + LINE - 3);
        self.text(at, &CENTRED, name)
    }

    /// The name and the detail of a row.
    fn row(&self, row: &Row, is_first: bool, y: i32) -> Result {
        if is_first {
            self.text((MARGIN, y), &PLAIN, &shortened(&row.name, CHARACTERS))?;
        }
        self.text((self.details, y), &MUTED, &shortened(&row.detail, CHARACTERS))
    }

    /// A bar with its mark and texts.
    fn bar(&self, bar: &Bar, colour: RGBColor, scale: &Scale, y: i32) -> Result {
        let (top, bottom) = (y - BAR / 2, y - BAR / 2 + BAR);
        let end = scale.left + scale.width(bar.length).max(1);
        self.rectangle((scale.left, top), (end, bottom), colour)?;
        let reference = scale.reference.filter(|line| (scale.left..end).contains(line));
        if let Some(line) = reference {
            self.rectangle((line, top), (line + 1, bottom), WHITE)?;
        }
        let note = if bar.note.is_empty() { 0 } else { 8 + width(&bar.note) };
        let texts = width(&bar.text).max(scale.text) + note;
        let mark = bar.mark.map(|mark| scale.left + scale.width(mark));
        // A mark that the texts would cover is left of them.
        let start = match mark.filter(|mark| (end - 4..end + texts + 10).contains(mark)) {
            Some(mark) => mark.max(end) + 7,
            None => end + 6,
        };
        if scale.reference.is_some_and(|line| (start - 3..start + texts).contains(&line)) {
            self.rectangle((start - 3, y - ROW / 2 + 1), (start + texts, y + ROW / 2 - 1), WHITE)?;
        }
        if let Some(mark) = mark {
            self.rectangle((mark - 1, top - 2), (mark + 1, bottom + 2), MARK)?;
        }
        self.text((start, y), &STRONG, &bar.text)?;
        let note = start + texts - note + 8;
        self.text((note, y), &MUTED, &bar.note)
    }

    /// A text, whose middle is at this height.
    fn text(&self, at: (i32, i32), font: &Font, text: &str) -> Result {
        if text.is_empty() {
            return Ok(());
        }
        // plotters divides the size by this number.
        let size = f64::from(font.size) * 1.24;
        let style = FontDesc::new(FontFamily::Name(FONT), size, font.weight).color(&font.colour);
        let style = style.pos(Pos::new(font.anchor, VPos::Center));
        // Capital letters are then in the middle of a bar.
        self.root.draw_text(&shortened(text, LONGEST), &style, (at.0, at.1 + 1))
    }

    fn rectangle(&self, from: (i32, i32), to: (i32, i32), colour: RGBColor) -> Result {
        self.root.draw(&Rectangle::new([from, to], colour.filled()))
    }
}

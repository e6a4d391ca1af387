//! The loss curve as a standalone SVG file.

use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
/// Left, right, top, bottom.
const MARGIN: (f64, f64, f64, f64) = (64.0, 24.0, 56.0, 56.0);
/// Ticks that an axis has, about.
const TICKS: f64 = 6.0;

/// What is drawn.
#[derive(Debug, Clone, Default)]
pub struct Chart {
    /// Above the picture.
    pub title: String,
    /// (step, loss): every step.
    pub train: Vec<(f64, f64)>,
    /// (step, loss): every evaluation.
    pub held_out: Vec<(f64, f64)>,
    /// The loss of knowing only how common each character is.
    pub unigram_entropy: f64,
}

impl Chart {
    /// Writes the picture. Points that are not finite are left out.
    pub fn svg(&self) -> String {
        let finite = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
            points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
        };
        let (train, held_out) = (finite(&self.train), finite(&self.held_out));
        let points = || train.iter().chain(&held_out);
        let last = points().map(|p| p.0).fold(1.0, f64::max);
        let highest = points().map(|p| p.1).fold(self.unigram_entropy, f64::max);
        let axes = Axes { x: Axis::up_to(last), y: Axis::up_to(highest * 1.02) };

        let mut svg = String::new();
        // Writing to a String cannot fail.
        let _ = write!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             height=\"{HEIGHT}\" font-family=\"system-ui, sans-serif\" font-size=\"13\" fill=\"#333\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text x=\"{}\" y=\"28\" font-size=\"17\" font-weight=\"600\">{}</text>\n",
            MARGIN.0,
            escaped(&self.title)
        );
        axes.draw(&mut svg);
        self.draw_unigram(&mut svg, &axes);
        draw_line(&mut svg, &axes, &train, "#9ecae1", 1.2);
        draw_line(&mut svg, &axes, &smoothed(&train), "#2171b5", 2.0);
        draw_line(&mut svg, &axes, &held_out, "#d94801", 2.0);
        for &point in &held_out {
            let (x, y) = axes.at(point);
            let _ =
                writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"#d94801\"/>");
        }
        legend(
            &mut svg,
            &[
                ("training loss", "#2171b5"),
                ("held-out loss", "#d94801"),
                ("unigram entropy", "#888"),
            ],
        );
        svg.push_str("</svg>\n");
        svg
    }

    fn draw_unigram(&self, svg: &mut String, axes: &Axes) {
        let (left, y) = axes.at((0.0, self.unigram_entropy));
        let _ = writeln!(
            svg,
            "<line x1=\"{left:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"#888\" stroke-width=\"1.5\" \
             stroke-dasharray=\"6 4\"/>",
            WIDTH - MARGIN.1
        );
    }
}

/// From 0 to a round number.
struct Axis {
    tick: f64,
    end: f64,
}

impl Axis {
    fn up_to(highest: f64) -> Self {
        let rough = highest.max(f64::MIN_POSITIVE) / TICKS;
        let power = 10f64.powf(rough.log10().floor());
        let tick = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&tick| tick >= rough);
        let tick = tick.unwrap_or(rough);
        Self { tick, end: (highest / tick).ceil().max(1.0) * tick }
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let tick = self.tick;
        (0..=(self.end / tick).round() as usize).map(move |i| i as f64 * tick)
    }
}

struct Axes {
    x: Axis,
    y: Axis,
}

impl Axes {
    /// Where a point is in the picture.
    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (left, right, top, bottom) = MARGIN;
        (
            left + x / self.x.end * (WIDTH - left - right),
            HEIGHT - bottom - y / self.y.end * (HEIGHT - top - bottom),
        )
    }

    fn draw(&self, svg: &mut String) {
        for tick in self.x.ticks() {
            let (x, y) = self.at((tick, 0.0));
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#eee\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                MARGIN.2,
                y + 20.0,
                label(tick, self.x.tick)
            );
        }
        for tick in self.y.ticks() {
            let (x, y) = self.at((0.0, tick));
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"#eee\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                WIDTH - MARGIN.1,
                x - 8.0,
                y + 4.5,
                label(tick, self.y.tick)
            );
        }
        let (x, y) = self.at((0.0, 0.0));
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {:.1}V{y:.1}H{:.1}\" fill=\"none\" stroke=\"#333\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">step</text>\
             <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">loss, nats per character</text>",
            MARGIN.2,
            WIDTH - MARGIN.1,
            (MARGIN.0 + WIDTH - MARGIN.1) / 2.0,
            HEIGHT - 12.0,
            (MARGIN.2 + HEIGHT - MARGIN.3) / 2.0
        );
    }
}

fn label(value: f64, tick: f64) -> String {
    let decimals = (-tick.log10().floor()).max(0.0) as usize;
    format!("{value:.decimals$}")
}

fn draw_line(svg: &mut String, axes: &Axes, points: &[(f64, f64)], colour: &str, width: f64) {
    if points.len() < 2 {
        return;
    }
    svg.push_str("<polyline fill=\"none\" points=\"");
    for &point in points {
        let (x, y) = axes.at(point);
        let _ = write!(svg, "{x:.1},{y:.1} ");
    }
    let _ = writeln!(
        svg,
        "\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"/>"
    );
}

/// Means over a fortieth of the run on both sides.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = points.len() / 40;
    if reach == 0 {
        return points.to_vec();
    }
    let mean = |i: usize| {
        let near = &points[i.saturating_sub(reach)..(i + reach + 1).min(points.len())];
        near.iter().map(|p| p.1).sum::<f64>() / near.len() as f64
    };
    (0..points.len()).map(|i| (points[i].0, mean(i))).collect()
}

fn legend(svg: &mut String, entries: &[(&str, &str)]) {
    let mut x = WIDTH - MARGIN.1 - 140.0 * entries.len() as f64;
    for (name, colour) in entries {
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"44\" x2=\"{}\" y2=\"44\" stroke=\"{colour}\" stroke-width=\"2.5\"/>\
             <text x=\"{}\" y=\"48.5\">{name}</text>",
            x + 22.0,
            x + 28.0
        );
        x += 140.0;
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart {
        Chart {
            title: "a < b & c".to_owned(),
            train: (0..100).map(|i| (f64::from(i), 4.0 / (1.0 + f64::from(i)))).collect(),
            held_out: vec![(50.0, 1.5), (100.0, 1.0)],
            unigram_entropy: 3.2,
        }
    }

    #[test]
    fn the_picture_has_axes_curves_and_legend() {
        let svg = chart().svg();
        for part in [
            "training loss",
            "held-out loss",
            "unigram entropy",
            ">step<",
            "loss, nats per character",
        ] {
            assert!(svg.contains(part), "{part}");
        }
        assert!(svg.contains("a &lt; b &amp; c"));
        assert_eq!(svg.matches("<polyline").count(), 3);
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains(">100</text>") && svg.contains(">4</text>"), "round ticks");
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
    }

    #[test]
    fn points_that_are_not_finite_are_left_out() {
        let mut chart = chart();
        chart.train.push((100.0, f64::NAN));
        chart.train.push((101.0, f64::INFINITY));
        let svg = chart.svg();
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn an_empty_run_is_still_a_picture() {
        let svg = Chart { unigram_entropy: 3.0, ..Chart::default() }.svg();
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    }

    #[test]
    fn axes_end_at_round_numbers() {
        let ticks = |highest: f64| Axis::up_to(highest).ticks().collect::<Vec<_>>();
        assert_eq!(ticks(4.6), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(ticks(300.0).last(), Some(&300.0));
        assert_eq!(Axis::up_to(0.0).ticks().count(), 2);
    }
}

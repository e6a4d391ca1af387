//! The loss curve as an SVG file.

use std::io;

use plotters::prelude::*;

/// The width and height of the chart in pixels.
const SIZE: (u32, u32) = (860, 460);

const TRAIN: RGBColor = RGBColor(33, 113, 181);
/// The colour of the losses of single steps, which are drawn behind their moving average.
const TRAIN_STEPS: RGBColor = RGBColor(158, 202, 225);
const HELD_OUT: RGBColor = RGBColor(217, 72, 1);
const UNIGRAM: RGBColor = RGBColor(136, 136, 136);
const GRID: RGBColor = RGBColor(238, 238, 238);

/// The data of the chart.
#[derive(Debug, Clone, Default)]
pub struct Chart {
    /// The title.
    pub title: String,
    /// The points (step, loss) of all steps.
    pub train: Vec<(f64, f64)>,
    /// The points (step, loss) of all evaluations.
    pub held_out: Vec<(f64, f64)>,
    /// The loss of a model that knows only the frequency of each character.
    pub unigram_entropy: f64,
}

impl Chart {
    /// Draws the chart. Points that are not finite are omitted.
    pub fn svg(&self) -> String {
        let mut svg = String::new();
        self.draw(&mut svg).expect("writing to a string cannot fail");
        svg
    }

    fn draw(&self, svg: &mut String) -> Result<(), DrawingAreaErrorKind<io::Error>> {
        let finite = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
            points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
        };
        let (train, held_out) = (finite(&self.train), finite(&self.held_out));
        let points = || train.iter().chain(&held_out);
        let last = points().map(|point| point.0).fold(1.0, f64::max);
        let highest = points().map(|point| point.1).fold(self.unigram_entropy, f64::max).max(0.1);

        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, ("sans-serif", 17))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(52)
            .build_cartesian_2d(0.0..last, 0.0..highest * 1.05)?;
        chart
            .configure_mesh()
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|step| format!("{step:.0}"))
            .x_desc("step")
            .y_desc("loss, nats per character")
            .draw()?;

        let key = |colour: RGBColor| {
            move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2))
        };
        let mean = smoothed(&train);
        chart.draw_series(LineSeries::new(train, TRAIN_STEPS))?;
        chart
            .draw_series(LineSeries::new(mean, TRAIN.stroke_width(2)))?
            .label("training loss")
            .legend(key(TRAIN));
        let line = LineSeries::new(held_out, HELD_OUT.stroke_width(2).filled()).point_size(3);
        chart.draw_series(line)?.label("held-out loss").legend(key(HELD_OUT));
        let level = [(0.0, self.unigram_entropy), (last, self.unigram_entropy)];
        let line = DashedLineSeries::new(level, 6, 4, UNIGRAM.stroke_width(2));
        chart.draw_series(line)?.label("unigram entropy").legend(key(UNIGRAM));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .draw()?;
        root.present()
    }
}

/// The moving average of the points. The window reaches a fortieth of the run to both sides.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = points.len() / 40;
    let mean = |i: usize| {
        let near = &points[i.saturating_sub(reach)..(i + reach + 1).min(points.len())];
        near.iter().map(|point| point.1).sum::<f64>() / near.len() as f64
    };
    (0..points.len()).map(|i| (points[i].0, mean(i))).collect()
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
    fn the_chart_has_axes_curves_and_a_legend() {
        let svg = chart().svg();
        for part in [
            "training loss",
            "held-out loss",
            "unigram entropy",
            "step",
            "loss, nats per character",
            "a &lt; b &amp; c",
        ] {
            assert!(svg.contains(part), "{part}");
        }
        assert_eq!(svg.matches("<circle").count(), 2, "one for each evaluation");
        for colour in ["#9ECAE1", "#2171B5", "#D94801", "#888888"] {
            assert!(svg.contains(colour), "{colour}");
        }
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
    }

    #[test]
    fn points_that_are_not_finite_are_omitted() {
        let mut chart = chart();
        chart.train.push((100.0, f64::NAN));
        chart.train.push((101.0, f64::INFINITY));
        assert_eq!(chart.svg(), self::chart().svg());
    }

    #[test]
    fn an_empty_run_gives_a_valid_chart() {
        let svg = Chart { unigram_entropy: 3.0, ..Chart::default() }.svg();
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
    }
}

//! The picture: tokens/s/GPU over attention ranks per FFN rank, one line per context length, the best colocated layout of
//! each as a dashed line to beat.
//!
//! Written by hand: a few hundred elements need no library. Text and grid follow the reader's light or dark scheme; line
//! colours are readable on both.
use std::fmt::Write as _;

use crate::plan::sweep::RatioCurve;
use crate::plan::units::{Tokens, significant};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 172.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 72.0;

/// Distinguishable with the common colour-vision deficiencies, on white and on near-black.
const COLOURS: [&str; 7] = ["#3b82c4", "#d9822b", "#2f9e77", "#c2528b", "#8a6fd1", "#b59a1f", "#6b7a89"];

/// A logarithmic axis: ratios and throughputs both span more than a decade, and equal factors deserve equal lengths.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn at(&self, value: f64) -> f64 {
        let part = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + part * (self.to - self.from)
    }

    /// 1, 2 and 5 times powers of ten within the axis; when they are few, every power of the square root of two of them.
    fn ticks(&self) -> Vec<f64> {
        let decade = |exponent: i32| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(exponent));
        let within = |value: &f64| (self.low..=self.high).contains(value);
        let coarse: Vec<_> = (-3..9).flat_map(decade).filter(within).collect();
        if coarse.len() >= 4 {
            return coarse;
        }
        let fine =
            |exponent: i32| [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0].map(|step| step * 10f64.powi(exponent));
        (-3..9).flat_map(fine).filter(within).collect()
    }
}

/// Draws curves. `title` and `subtitle` are plain text.
pub fn picture(title: &str, subtitle: &str, curves: &[RatioCurve]) -> String {
    let axes = axes(curves);
    let mut svg = head(title, subtitle);
    draw_grid(&mut svg, &axes);
    let mut labels = Vec::new();
    for (index, curve) in curves.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        draw_curve(&mut svg, curve, colour, &axes);
        if let Some(label) = label(curve, colour, &axes.1) {
            labels.push(label);
        }
    }
    draw_labels(&mut svg, labels);
    svg += "</svg>\n";
    svg
}

fn axes(curves: &[RatioCurve]) -> (Axis, Axis) {
    let span = |values: Vec<f64>| {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(0.0, f64::max);
        if low.is_finite() && high > 0.0 { (low, high) } else { (1.0, 10.0) }
    };
    let (x_low, x_high) =
        span(curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.0)).collect());
    let rates =
        curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.1).chain(curve.colocated));
    let (y_low, y_high) = span(rates.collect());
    (
        Axis { low: x_low / 1.06, high: x_high * 1.06, from: LEFT, to: WIDTH - RIGHT },
        Axis { low: y_low / 1.12, high: y_high * 1.12, from: HEIGHT - BOTTOM, to: TOP },
    )
}

fn head(title: &str, subtitle: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         role=\"img\" font-family=\"Inter, 'Helvetica Neue', Arial, sans-serif\" font-size=\"13\">\n<title>{}</title>\n",
        escape(title)
    );
    svg += "<style>\n.paper{fill:#fbfbfa}.ring{stroke:#fbfbfa}.ink{fill:#24292f}.soft{fill:#656d76}.grid{stroke:#d9dde2}.axis{stroke:#8c959f}\n\
            @media (prefers-color-scheme: dark){.paper{fill:#16191d}.ring{stroke:#16191d}.ink{fill:#e6e9ec}.soft{fill:#9aa4ae}.grid{stroke:#2f353c}\
            .axis{stroke:#6e7781}}\n</style>\n";
    let _ = writeln!(svg, "<rect class=\"paper\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"6\"/>");
    let _ = writeln!(
        svg,
        "<text class=\"ink\" x=\"{LEFT}\" y=\"34\" font-size=\"18\" font-weight=\"600\">{}</text>",
        escape(title)
    );
    let _ = writeln!(svg, "<text class=\"soft\" x=\"{LEFT}\" y=\"56\">{}</text>", escape(subtitle));
    svg
}

fn draw_grid(svg: &mut String, (x, y): &(Axis, Axis)) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for tick in y.ticks() {
        let at = y.at(tick);
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>"
        );
        let (label_x, label_y) = (LEFT - 10.0, at + 4.5);
        let _ = writeln!(
            svg,
            "<text class=\"soft\" x=\"{label_x}\" y=\"{label_y:.1}\" text-anchor=\"end\">{}</text>",
            plain(tick)
        );
    }
    for tick in x.ticks() {
        let at = x.at(tick);
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\"/>"
        );
        let label_y = bottom + 20.0;
        let _ = writeln!(
            svg,
            "<text class=\"soft\" x=\"{at:.1}\" y=\"{label_y}\" text-anchor=\"middle\">{}</text>",
            plain(tick)
        );
    }
    let _ =
        writeln!(svg, "<line class=\"axis\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{right}\" y2=\"{bottom}\"/>");
    let (middle_x, middle_y) = ((LEFT + right) / 2.0, (TOP + bottom) / 2.0);
    let title_y = HEIGHT - 26.0;
    let _ = writeln!(
        svg,
        "<text class=\"ink\" x=\"{middle_x}\" y=\"{title_y}\" text-anchor=\"middle\">attention ranks per FFN rank</text>"
    );
    let _ = writeln!(
        svg,
        "<text class=\"ink\" transform=\"translate(24 {middle_y}) rotate(-90)\" text-anchor=\"middle\">tokens/s/GPU</text>"
    );
}

fn draw_curve(svg: &mut String, curve: &RatioCurve, colour: &str, (x, y): &(Axis, Axis)) {
    if let Some(rate) = curve.colocated {
        let at = y.at(rate);
        let right = WIDTH - RIGHT;
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"{colour}\" stroke-width=\"1.5\" \
             stroke-dasharray=\"2 5\" stroke-linecap=\"round\"/>"
        );
    }
    let points: Vec<_> =
        curve.points.iter().map(|(ratio, rate)| format!("{:.1},{:.1}", x.at(*ratio), y.at(*rate))).collect();
    if points.is_empty() {
        return;
    }
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\" stroke-linejoin=\"round\"/>",
        points.join(" ")
    );
    let best = curve.points.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((ratio, rate)) = best {
        let (at_x, at_y) = (x.at(*ratio), y.at(*rate));
        let _ = writeln!(
            svg,
            "<circle cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"5\" fill=\"{colour}\" stroke-width=\"1.5\" class=\"ring\">\
             <title>{}: best at {} attention ranks per FFN rank, {} tokens/s/GPU</title></circle>",
            Tokens(curve.context),
            significant(*ratio),
            significant(*rate)
        );
    }
}

/// A label right of the curve it names.
struct Label {
    y: f64,
    colour: &'static str,
    name: String,
    detail: String,
}

fn label(curve: &RatioCurve, colour: &'static str, y: &Axis) -> Option<Label> {
    let best = curve.points.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let end = curve.points.last()?;
    let gain = curve.colocated.map(|rate| format!(", {:+.0} %", 100.0 * (best.1 / rate - 1.0)));
    let ratio = plain((best.0 * 10.0).round() / 10.0);
    let detail = format!("{} at {ratio}:1{}", significant(best.1), gain.unwrap_or_default());
    Some(Label { y: y.at(end.1), colour, name: Tokens(curve.context).to_string(), detail })
}

/// Names beside the lines' ends, moved apart where they would overlap, and what the strokes mean.
fn draw_labels(svg: &mut String, mut labels: Vec<Label>) {
    const APART: f64 = 34.0;
    labels.sort_by(|a, b| a.y.total_cmp(&b.y));
    let lowest = HEIGHT - BOTTOM - APART * labels.len().saturating_sub(1) as f64;
    let mut free = TOP;
    for (index, label) in labels.iter().enumerate() {
        let at = label.y.max(free).min(lowest + APART * index as f64);
        free = at + APART;
        let x = WIDTH - RIGHT + 14.0;
        let _ = writeln!(
            svg,
            "<text x=\"{x}\" y=\"{at:.1}\" fill=\"{}\" font-weight=\"600\">{}</text>",
            label.colour,
            escape(&label.name)
        );
        let below = at + 15.0;
        let _ = writeln!(
            svg,
            "<text class=\"soft\" x=\"{x}\" y=\"{below:.1}\" font-size=\"11\">{}</text>",
            escape(&label.detail)
        );
    }
    let (y, right) = (HEIGHT - 26.0, WIDTH - RIGHT + 14.0);
    let _ = writeln!(
        svg,
        "<line class=\"axis\" x1=\"{right}\" y1=\"{0}\" x2=\"{1}\" y2=\"{0}\" stroke-width=\"1.5\" stroke-dasharray=\"2 5\" \
         stroke-linecap=\"round\"/>\n<text class=\"soft\" x=\"{2}\" y=\"{y}\" font-size=\"11\">best colocated,</text>\n\
         <text class=\"soft\" x=\"{2}\" y=\"{3}\" font-size=\"11\">the % are against it</text>",
        y - 4.0,
        right + 22.0,
        right + 28.0,
        y + 14.0
    );
}

/// A tick without trailing zeros.
fn plain(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    text.into()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_the_document() {
        let svg = picture("a < b & \"c\"", "</svg>", &[]);
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;") && svg.matches("</svg>").count() == 1);
    }

    #[test]
    fn every_context_has_a_line_a_best_point_and_a_name() {
        let curve = |context, rate| RatioCurve {
            context,
            points: vec![(1.0, rate), (2.0, rate * 1.2), (4.0, rate)],
            colocated: Some(rate),
        };
        let svg = picture("t", "s", &[curve(16384, 1600.0), curve(131072, 250.0)]);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains(">16k<") && svg.contains(">128k<") && svg.contains("tokens/s/GPU"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}

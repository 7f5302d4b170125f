//! Reads as much of Prometheus' text format as our own services write. Pure.

/// Samples of one look at `/metrics`.
#[derive(Clone, Debug, Default)]
pub(super) struct Samples(Vec<Sample>);

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Samples {
    /// Lines that are no samples are left out.
    pub(super) fn parse(text: &str) -> Self {
        Self(text.lines().filter(|line| !line.starts_with('#')).filter_map(Sample::parse).collect())
    }

    /// All samples of a name, or those with a label of this value, added up; `None` when there is none.
    pub(super) fn sum(&self, name: &str, label: Option<(&str, &str)>) -> Option<f64> {
        let has = |sample: &&Sample| {
            sample.name == name && label.is_none_or(|(label, value)| sample.label(label) == Some(value))
        };
        let mut found = self.0.iter().filter(has).map(|sample| sample.value).peekable();
        found.peek()?;
        Some(found.sum())
    }

    /// Values of a label among the samples of a name.
    pub(super) fn labels(&self, name: &str, label: &str) -> Vec<String> {
        let of_name = self.0.iter().filter(|sample| sample.name == name);
        of_name.filter_map(|sample| sample.label(label)).map(str::to_owned).collect()
    }
}

impl Sample {
    fn parse(line: &str) -> Option<Self> {
        let (series, value) = line.rsplit_once(' ')?;
        let value = value.parse().ok()?;
        let (name, labels) = match series.split_once('{') {
            None => (series, Vec::new()),
            Some((name, rest)) => (name, labels(rest.strip_suffix('}')?)),
        };
        Some(Self { name: name.to_owned(), labels, value })
    }

    fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// `a="x",b="y"`. What our services write as values holds no quotes.
fn labels(text: &str) -> Vec<(String, String)> {
    let pair = |text: &str| {
        let (name, value) = text.split_once("=\"")?;
        Some((name.trim_start_matches(',').to_owned(), value.to_owned()))
    };
    text.split_inclusive('"')
        .collect::<Vec<_>>()
        .chunks(2)
        .filter_map(|parts| pair(parts.concat().strip_suffix('"')?))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_found_by_name_and_label() {
        let text = "# HELP a_total Some.\n# TYPE a_total counter\na_total{x=\"1\",y=\"b,c\"} 2\na_total{x=\"2\",y=\"d\"} 3\nb 1.5\n";
        let samples = Samples::parse(text);
        assert_eq!(samples.sum("a_total", None), Some(5.0));
        assert_eq!(samples.sum("a_total", Some(("x", "2"))), Some(3.0));
        assert_eq!(samples.sum("a_total", Some(("x", "3"))), None);
        assert_eq!(samples.sum("b", None), Some(1.5));
        assert_eq!(samples.labels("a_total", "y"), ["b,c", "d"]);
    }
}

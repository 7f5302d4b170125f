//! Metrics in Prometheus' text format. The registry is a value: whoever owns a component makes its metrics when it is
//! built and counts without locks from then on.
use std::collections::HashMap;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge as GaugeValue, LabelPair, Metric, MetricFamily, MetricType};
pub use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use prometheus::{HistogramOpts, Opts, Registry, TextEncoder};

use crate::net::json_error;

/// Upper bounds of histograms of seconds, 50 µs to 40 s: hops, steps and requests alike.
pub const SECONDS: [f64; 19] = [
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 20.0, 40.0,
];

/// Why a metric cannot be made: a mistake of the component that asks for it.
#[derive(Debug, thiserror::Error)]
#[error("metric {name:?}: {source}")]
pub struct MetricError {
    /// Its name.
    pub name: String,
    /// What is wrong with it.
    pub source: prometheus::Error,
}

/// All metrics of a process. Clones share them.
#[derive(Clone, Default)]
pub struct Metrics {
    registry: Registry,
}

/// Whether what is [read when asked](Metrics::read_when_asked) only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadKind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
}

/// One value among those of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// One value per label.
    pub labels: Vec<String>,
    /// What is true now.
    pub value: f64,
}

impl Sample {
    /// With the value of a single label.
    pub fn of(label: impl ToString, value: f64) -> Self {
        Self { labels: vec![label.to_string()], value }
    }
}

impl Metrics {
    /// A registry with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Something that only grows; its name ends in `_total`.
    ///
    /// # Errors
    /// [`MetricError`], here and below: a bad name, or one that is taken.
    pub fn counter(&self, name: &str, help: &str) -> Result<IntCounter, MetricError> {
        self.register(name, IntCounter::new(name, help))
    }

    /// A counter for each combination of label values that occurs. Values must come from a small set.
    pub fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, MetricError> {
        self.register(name, IntCounterVec::new(Opts::new(name, help), labels))
    }

    /// Something that goes up and down.
    pub fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, MetricError> {
        self.register(name, IntGauge::new(name, help))
    }

    /// A gauge for each combination of label values that occurs.
    pub fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, MetricError> {
        self.register(name, IntGaugeVec::new(Opts::new(name, help), labels))
    }

    /// A distribution, counted below each of `bounds` (see [`SECONDS`]).
    pub fn histogram(&self, name: &str, help: &str, bounds: &[f64]) -> Result<Histogram, MetricError> {
        self.register(name, Histogram::with_opts(HistogramOpts::new(name, help).buckets(bounds.to_vec())))
    }

    /// A distribution for each combination of label values that occurs.
    pub fn histograms(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        bounds: &[f64],
    ) -> Result<HistogramVec, MetricError> {
        self.register(
            name,
            HistogramVec::new(HistogramOpts::new(name, help).buckets(bounds.to_vec()), labels),
        )
    }

    /// What a component counts on its own (a link's or a port's counters): `read` is called whenever metrics are asked
    /// for, on the thread that answers.
    pub fn read_when_asked(
        &self,
        kind: ReadKind,
        name: &str,
        help: &str,
        labels: &[&str],
        read: impl Fn() -> Vec<Sample> + Send + Sync + 'static,
    ) -> Result<(), MetricError> {
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        let desc = Desc::new(name.into(), help.into(), labels, HashMap::new());
        let collector = desc.map(|desc| ReadWhenAsked { desc, kind, read: Box::new(read) });
        let failed = |source| MetricError { name: name.into(), source };
        self.registry.register(Box::new(collector.map_err(failed)?)).map_err(failed)
    }

    /// The same of a single number, which has no labels.
    pub fn read_one_when_asked(
        &self,
        kind: ReadKind,
        name: &str,
        help: &str,
        read: impl Fn() -> f64 + Send + Sync + 'static,
    ) -> Result<(), MetricError> {
        let read = move || vec![Sample { labels: Vec::new(), value: read() }];
        self.read_when_asked(kind, name, help, &[], read)
    }

    /// Everything, as Prometheus reads it.
    ///
    /// # Errors
    /// A value that [`read_when_asked`](Self::read_when_asked) made cannot be expressed.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    /// `GET /metrics`.
    pub fn router(&self) -> Router {
        let metrics = self.clone();
        let answer = move || async move {
            match metrics.render() {
                Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
                Err(error) => {
                    json_error(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", &error.to_string())
                }
            }
        };
        Router::new().route("/metrics", get(answer))
    }

    fn register<M>(&self, name: &str, metric: prometheus::Result<M>) -> Result<M, MetricError>
    where
        M: Collector + Clone + 'static,
    {
        let failed = |source| MetricError { name: name.into(), source };
        let metric = metric.map_err(failed)?;
        self.registry.register(Box::new(metric.clone())).map_err(failed)?;
        Ok(metric)
    }
}

struct ReadWhenAsked {
    desc: Desc,
    kind: ReadKind,
    read: Box<dyn Fn() -> Vec<Sample> + Send + Sync>,
}

impl ReadWhenAsked {
    fn metric(&self, sample: Sample) -> Metric {
        let pairs = self.desc.variable_labels.iter().zip(sample.labels).map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.clone());
            pair.set_value(value);
            pair
        });
        let mut metric = Metric::from_label(pairs.collect());
        match self.kind {
            ReadKind::Counter => {
                let mut counter = Counter::default();
                counter.set_value(sample.value);
                metric.set_counter(counter);
            }
            ReadKind::Gauge => {
                let mut gauge = GaugeValue::default();
                gauge.set_value(sample.value);
                metric.set_gauge(gauge);
            }
        }
        metric
    }
}

impl Collector for ReadWhenAsked {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let metrics: Vec<_> = (self.read)().into_iter().map(|sample| self.metric(sample)).collect();
        if metrics.is_empty() {
            return Vec::new();
        }
        let mut family = MetricFamily::default();
        family.set_name(self.desc.fq_name.clone());
        family.set_help(self.desc.help.clone());
        family.set_field_type(match self.kind {
            ReadKind::Counter => MetricType::COUNTER,
            ReadKind::Gauge => MetricType::GAUGE,
        });
        family.set_metric(metrics);
        vec![family]
    }
}

#[cfg(test)]
mod tests {
    use tower::ServiceExt;

    use super::*;

    #[test]
    fn what_was_counted_is_rendered_with_its_help() {
        let metrics = Metrics::new();
        metrics.counter("afd_steps_total", "Steps begun.").unwrap().inc_by(3);
        let rejected = metrics.counters("afd_rejected_total", "Frames rejected.", &["reason"]).unwrap();
        rejected.with_label_values(&["epoch"]).inc();
        metrics.histogram("afd_hop_seconds", "Time of a hop.", &SECONDS).unwrap().observe(0.002);
        let read = || vec![Sample { labels: vec!["F0".into()], value: 7.0 }];
        metrics
            .read_when_asked(ReadKind::Counter, "afd_bytes_total", "Bytes sent.", &["peer"], read)
            .unwrap();
        let text = metrics.render().unwrap();
        for line in [
            "# HELP afd_steps_total Steps begun.",
            "# TYPE afd_steps_total counter",
            "afd_steps_total 3",
            "afd_rejected_total{reason=\"epoch\"} 1",
            "afd_hop_seconds_bucket{le=\"0.0025\"} 1",
            "afd_hop_seconds_bucket{le=\"0.001\"} 0",
            "afd_bytes_total{peer=\"F0\"} 7",
        ] {
            assert!(text.lines().any(|found| found == line), "{line:?} is missing in\n{text}");
        }
    }

    #[test]
    fn a_name_that_is_taken_or_bad_is_named() {
        let metrics = Metrics::new();
        metrics.gauge("afd_open", "x").unwrap();
        assert!(metrics.clone().gauge("afd_open", "x").unwrap_err().to_string().contains("afd_open"));
        assert!(metrics.gauge("no spaces", "x").is_err());
        assert!(Metrics::new().gauge("afd_open", "x").is_ok(), "registries share nothing");
    }

    #[tokio::test]
    async fn the_route_answers() {
        let metrics = Metrics::new();
        metrics.gauge("afd_open", "x").unwrap().set(2);
        let request = http::Request::get("/metrics").body(axum::body::Body::empty()).unwrap();
        let response = metrics.router().oneshot(request).await.unwrap();
        assert_eq!(response.headers()[header::CONTENT_TYPE], prometheus::TEXT_FORMAT);
        let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        assert!(String::from_utf8_lossy(&body).contains("afd_open 2"));
    }
}

//! Measured points, as `plan calibrate` reads them.
use serde::{Deserialize, Serialize};

use super::CalibrateError;
use crate::plan::layout::Layout;

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Measured {
    /// Transfers of known size.
    pub links: Vec<LinkPoint>,
    /// Edges as probed.
    pub probes: Vec<ProbePoint>,
    /// Attention stages.
    pub attention: Vec<AttentionPoint>,
    /// FFN stages.
    pub ffn: Vec<FfnPoint>,
    /// Decode steps of whole deployments.
    pub steps: Vec<StepPoint>,
}

/// Which link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkName {
    /// Within the fast domain.
    ScaleUp,
    /// Between domains.
    ScaleOut,
}

/// One transfer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkPoint {
    /// Over which.
    pub link: LinkName,
    /// Payload.
    pub bytes: f64,
    /// From the first byte sent to the last received.
    pub one_way_us: f64,
}

/// One edge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbePoint {
    /// Over which.
    pub link: LinkName,
    /// Of an empty frame.
    pub latency_us: f64,
    /// With its unit, one direction.
    pub bandwidth: String,
}

/// One attention stage of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionPoint {
    /// `x`.
    pub rows: f64,
    /// `S`.
    pub context: u64,
    /// `T_A`.
    pub layer_us: f64,
}

/// One FFN stage of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FfnPoint {
    /// `X`.
    pub pool_rows: f64,
    /// `n_F`.
    pub ranks: u32,
    /// `T_F`.
    pub layer_us: f64,
}

/// One decode step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepPoint {
    /// Which time it is solved for.
    pub fits: Fits,
    /// Of what.
    pub layout: Layout,
    /// `b`.
    pub batch_per_rank: f64,
    /// `S`.
    pub context: u64,
    /// `T_iter`.
    pub step_ms: f64,
}

/// A time to solve for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fits {
    /// `T_A`.
    Attention,
    /// `T_F`.
    Ffn,
    /// `T_C`, the same in both directions.
    Exchange,
}

impl Measured {
    /// With the points of another file behind these.
    pub fn and(mut self, other: Self) -> Self {
        self.links.extend(other.links);
        self.probes.extend(other.probes);
        self.attention.extend(other.attention);
        self.ffn.extend(other.ffn);
        self.steps.extend(other.steps);
        self
    }

    /// Whether there is no point at all.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A report of a measuring command; whatever else it holds is for others.
#[derive(Deserialize)]
struct Report {
    points: Option<Measured>,
}

/// Reads measured points: bare, or under `points` in the report of a measuring command.
///
/// # Errors
/// [`CalibrateError::Malformed`] names line and field.
pub fn parse(json: &str) -> Result<Measured, CalibrateError> {
    let malformed = |error: serde_json::Error| CalibrateError::Malformed { what: error.to_string() };
    let report: Report = serde_json::from_str(json).map_err(malformed)?;
    report.points.map_or_else(|| serde_json::from_str(json).map_err(malformed), Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_field_is_refused() {
        let error = parse(r#"{"links": [], "lnks": []}"#).unwrap_err();
        assert!(error.to_string().contains("lnks"), "{error}");
        let error = parse(r#"{"url": "x", "points": {"lnks": []}}"#).unwrap_err();
        assert!(error.to_string().contains("lnks"), "{error}");
    }

    #[test]
    fn points_are_read_from_a_report_and_put_together() {
        let report =
            r#"{"series": [1], "points": {"attention": [{"rows": 1, "context": 2, "layer_us": 3}]}}"#;
        let bare = r#"{"attention": [{"rows": 4, "context": 2, "layer_us": 5}]}"#;
        let both = parse(report).unwrap().and(parse(bare).unwrap());
        assert_eq!(both.attention.iter().map(|point| point.rows).collect::<Vec<_>>(), [1.0, 4.0]);
        assert!(parse("{}").unwrap().is_empty() && !both.is_empty());
    }
}

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

/// Reads measured points.
///
/// # Errors
/// [`CalibrateError::Malformed`] names line and field.
pub fn parse(json: &str) -> Result<Measured, CalibrateError> {
    serde_json::from_str(json).map_err(|error| CalibrateError::Malformed { what: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_field_is_refused() {
        let error = parse(r#"{"links": [], "lnks": []}"#).unwrap_err();
        assert!(error.to_string().contains("lnks"), "{error}");
    }
}

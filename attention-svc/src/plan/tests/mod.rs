//! What the planner must get right: published tables, measured floors, and properties that hold whatever the numbers.
mod acceptance;
mod properties;

use super::case::{Case, Precision, Workload};
use super::config_reader;
use super::profile::Profile;

/// Decoding of a model that is known by name on hardware that is.
fn case(model: &str, hardware: &str, context: u64) -> Case {
    let shape = config_reader::load(model).unwrap();
    let precision = Precision::of(&shape);
    Case {
        shape,
        profile: Profile::load(hardware).unwrap(),
        precision,
        workload: Workload::decoding(context),
    }
}

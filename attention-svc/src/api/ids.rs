//! Names of requests.
use rand::Rng;

/// A name such as `cmpl-4f0c…`, unique for all practical purposes.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}-{:032x}", rand::rng().random::<u128>())
}

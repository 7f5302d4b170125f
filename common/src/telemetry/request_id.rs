//! The name of a request in logs, traces and answers.
use std::fmt;
use std::str::FromStr;

use rand::Rng;

/// Chosen by the client, or made here. Printable ASCII without spaces, so that it can go into headers and log lines as it
/// is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(String);

/// A client's request id cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request_id: must have 1 to {} printable ASCII characters without spaces", RequestId::MAX_LEN)]
pub struct BadRequestId;

impl RequestId {
    /// Most characters.
    pub const MAX_LEN: usize = 128;

    /// One nobody else has: 128 random bits.
    pub fn random(rng: &mut impl Rng) -> Self {
        Self(format!("req-{:032x}", rng.random::<u128>()))
    }

    /// The id itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RequestId {
    type Err = BadRequestId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits =
            (1..=Self::MAX_LEN).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        fits.then(|| Self(text.to_owned())).ok_or(BadRequestId)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_fits_into_a_header_is_an_id() {
        let made = RequestId::random(&mut rand::rng());
        assert_eq!(made.as_str().parse(), Ok(made.clone()));
        for wrong in ["", "a b", "line\nbreak", "ümlaut", &"x".repeat(129)] {
            assert_eq!(wrong.parse::<RequestId>(), Err(BadRequestId), "{wrong:?}");
        }
    }
}

//! What a level did to the two sides of the split, read from the server's own metrics where it has them.
use std::collections::BTreeMap;

use super::request::Target;

/// Sums that the engine keeps, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sums {
    step: f64,
    waited: f64,
    hidden: f64,
}

/// Parts of the steps' time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sides {
    /// Attention waited for the FFN and did nothing: the bubble.
    pub(super) waited: f64,
    /// Hops were under way while attention computed something else.
    pub(super) hidden: f64,
}

impl Sums {
    /// `None` when the server is another one, or does not say.
    pub(super) async fn read(target: &Target) -> Option<Self> {
        Self::parse(&target.metrics().await?)
    }

    fn parse(text: &str) -> Option<Self> {
        let samples: BTreeMap<&str, f64> = text
            .lines()
            .filter_map(|line| {
                let (name, value) = line.rsplit_once(' ')?;
                Some((name, value.parse().ok()?))
            })
            .collect();
        Some(Self {
            step: *samples.get(r#"afd_engine_seconds_total{part="step"}"#)?,
            waited: *samples.get(r#"afd_engine_seconds_total{part="ffn_wait"}"#)?,
            hidden: *samples.get("afd_ffn_hidden_seconds_total")?,
        })
    }

    /// What happened since.
    pub(super) fn until(self, later: Self) -> Option<Sides> {
        let step = later.step - self.step;
        let part = |sum: f64| sum / step;
        (step > 0.0).then(|| Sides {
            waited: part(later.waited - self.waited),
            hidden: part(later.hidden - self.hidden),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_read_and_another_server_has_none() {
        let text = |step: f64, waited: f64, hidden: f64| {
            format!(
                "# HELP\nafd_engine_seconds_total{{part=\"step\"}} {step}\nafd_engine_seconds_total{{part=\"ffn_wait\"}} \
                 {waited}\nafd_ffn_hidden_seconds_total {hidden}\n"
            )
        };
        let before = Sums::parse(&text(1.0, 0.5, 0.1)).unwrap();
        let after = Sums::parse(&text(3.0, 1.0, 1.1)).unwrap();
        assert_eq!(before.until(after), Some(Sides { waited: 0.25, hidden: 0.5 }));
        assert_eq!(before.until(before), None, "no step");
        assert_eq!(Sums::parse("vllm:num_requests_running 3"), None);
    }
}

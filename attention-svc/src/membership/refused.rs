//! Who was refused and how, so that an operator hears of a caller that tries on and on, and is not buried by it.
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tonic::Code;

/// Time after which the same is said again of somebody who still tries.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(600);
/// Refusals that are remembered, the oldest giving way.
const MAX_REFUSED: usize = 64;

/// A kind of refusal of one caller: its network, the call and the answer.
pub(super) type Refusal = (IpAddr, &'static str, Code);

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Refused(Mutex<VecDeque<(Refusal, Instant)>>);

impl Refused {
    /// Whether this is worth a warning: nothing was said of it lately.
    pub(super) fn is_news(&self, refusal: Refusal, now: Instant) -> bool {
        let mut said = self.lock();
        said.retain(|(_, at)| now.saturating_duration_since(*at) < SAID_AGAIN_AFTER);
        if said.iter().any(|(known, _)| *known == refusal) {
            return false;
        }
        if said.len() == MAX_REFUSED {
            said.pop_front();
        }
        said.push_back((refusal, now));
        true
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Refusal, Instant)>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(last: u8) -> Refusal {
        ([10, 0, 0, last].into(), "announce", Code::Unauthenticated)
    }

    #[test]
    fn a_caller_that_tries_on_is_news_once_in_a_while() {
        let (refused, now) = (Refused::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(refused.is_news(refusal(1), now));
        assert!((1..600).all(|second| !refused.is_news(refusal(1), after(second))));
        assert!(refused.is_news(refusal(2), after(1)), "somebody else");
        let other = (refusal(1).0, "announce", Code::FailedPrecondition);
        assert!(refused.is_news(other, after(1)), "refused in another way");
        assert!(refused.is_news(refusal(1), after(600)) && !refused.is_news(refusal(1), after(601)));
    }

    #[test]
    fn memory_is_bounded() {
        let (refused, now) = (Refused::default(), Instant::now());
        assert!((0..=255).all(|last| refused.is_news(refusal(last), now)));
        assert_eq!(refused.lock().len(), MAX_REFUSED);
        assert!(!refused.is_news(refusal(255), now));
    }
}

//! The W3C trace context (`traceparent`, level 1) that a request, its steps and their hops carry. Both roles derive the
//! span ids of a hop from its key, so that they agree on parents without a message per hop.
use std::fmt;
use std::str::FromStr;

use rand::Rng;

use crate::ids::HopKey;

/// 128 bits, not all zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceId(u128);

/// 64 bits, not all zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId(u64);

impl TraceId {
    /// `None` for zero, which the standard forbids.
    pub fn new(value: u128) -> Option<Self> {
        (value != 0).then_some(Self(value))
    }

    /// As a number.
    pub fn get(self) -> u128 {
        self.0
    }
}

impl SpanId {
    /// `None` for zero, which the standard forbids.
    pub fn new(value: u64) -> Option<Self> {
        (value != 0).then_some(Self(value))
    }

    /// As a number.
    pub fn get(self) -> u64 {
        self.0
    }

    /// One nobody else has.
    pub fn random(rng: &mut impl Rng) -> Self {
        Self(rng.random_range(1..=u64::MAX))
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Where in a trace something happens. Formats as a `traceparent` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// Which trace.
    pub trace_id: TraceId,
    /// The span that whatever is begun under this context is a child of.
    pub span_id: SpanId,
    /// Whether the trace is recorded.
    pub sampled: bool,
}

/// A `traceparent` that does not follow the standard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("traceparent: expected 00-<32 hex digits>-<16 hex digits>-<2 hex digits>, lower case, ids not zero")]
pub struct BadTraceparent;

impl TraceContext {
    /// The root of a new trace.
    pub fn root(rng: &mut impl Rng, sampled: bool) -> Self {
        Self { trace_id: TraceId(rng.random_range(1..=u128::MAX)), span_id: SpanId::random(rng), sampled }
    }

    /// The context of a child span with a random id.
    pub fn child(&self, rng: &mut impl Rng) -> Self {
        Self { span_id: SpanId::random(rng), ..*self }
    }

    /// The context of a hop's span to one shard, the same on both sides of the link.
    pub fn hop(&self, hop: HopKey, shard: u32) -> Self {
        let place = u64::from(hop.layer.0) << 40 | u64::from(hop.stage.0) << 32 | u64::from(shard);
        let mixed = [self.trace_id.0 as u64, self.span_id.0, hop.step.0, place].into_iter().fold(0, mix);
        Self { span_id: SpanId(mixed.max(1)), ..*self }
    }
}

/// A bijective mixing of 64 bits (xor, shift, multiply by odd constants) over the state and one more word.
fn mix(state: u64, word: u64) -> u64 {
    let mut z = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{:02x}", self.trace_id, self.span_id, u8::from(self.sampled))
    }
}

impl FromStr for TraceContext {
    type Err = BadTraceparent;

    /// Of a later version the known fields are read, as the standard asks.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut fields = text.split('-');
        let mut next = |digits| fields.next().and_then(|field| hex(field, digits)).ok_or(BadTraceparent);
        let (version, trace, span, flags) = (next(2)?, next(32)?, next(16)?, next(2)?);
        let more = fields.next().is_some();
        if version == 0xff || (version == 0 && more) {
            return Err(BadTraceparent);
        }
        Ok(Self {
            trace_id: TraceId::new(trace).ok_or(BadTraceparent)?,
            span_id: SpanId::new(span as u64).ok_or(BadTraceparent)?,
            sampled: flags & 1 == 1,
        })
    }
}

/// Exactly `digits` hexadecimal digits in lower case.
fn hex(field: &str, digits: usize) -> Option<u128> {
    let fits = field.len() == digits && field.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    fits.then(|| u128::from_str_radix(field, 16).ok())?
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::frame::FrameHeader;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_comes_back_as_it_went() {
        let context: TraceContext = PARENT.parse().unwrap();
        assert!(context.sampled);
        assert_eq!(context.to_string(), PARENT);
        let child = context.child(&mut rand::rng());
        assert_eq!(child.trace_id, context.trace_id);
        assert_ne!(child.span_id, context.span_id);
        let root = TraceContext::root(&mut rand::rng(), false);
        assert_eq!(root.to_string().parse(), Ok(root));
        let later = format!("01{}-what-comes-later", &PARENT[2..]);
        assert_eq!(later.parse(), Ok(context));
    }

    #[test]
    fn what_is_no_traceparent_is_refused() {
        let zero_trace = format!("00-{:032}-00f067aa0ba902b7-01", 0);
        for wrong in [
            "",
            "00",
            &PARENT[..54],
            &PARENT.to_uppercase(),
            &format!("{PARENT}-more"),
            &PARENT.replace("00-4b", "ff-4b"),
            &PARENT.replace("4bf9", "4bg9"),
            &PARENT.replace("4bf9", "+bf9"),
            &zero_trace,
        ] {
            assert_eq!(wrong.parse::<TraceContext>(), Err(BadTraceparent), "{wrong:?}");
        }
    }

    #[test]
    fn hops_have_span_ids_of_their_own_that_both_sides_agree_on() {
        let step: TraceContext = PARENT.parse().unwrap();
        let mut seen = HashSet::new();
        for step_id in 0..10 {
            for layer in 0..60 {
                for stage in 0..4 {
                    for shard in 0..4 {
                        let hop = FrameHeader::key(step_id, layer, stage);
                        assert_eq!(step.hop(hop, shard), step.hop(hop, shard));
                        assert!(seen.insert(step.hop(hop, shard).span_id));
                    }
                }
            }
        }
    }
}

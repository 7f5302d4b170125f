//! Links between the attention rank and FFN processes, and the adversary that sits on them.
use std::collections::{HashMap, HashSet};

use afd_common::frame::{BodySum, Checksum, FrameHeader, FrameKind, FrameLimits, HEADER_BYTES, body_sum};
use afd_common::ids::{Epoch, HopKey, Shard, StepId};
use afd_common::link::bare::BareWire;

use crate::dice::Dice;
use crate::faults::Faults;

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum To {
    Ffn,
    Attention,
}

pub(crate) struct Link {
    pub(crate) rank: usize,
    /// Of the rank, where the other end is the attention rank's and not a neighbour's.
    pub(crate) shard: Option<Shard>,
    pub(crate) attention: BareWire,
    pub(crate) ffn: BareWire,
    /// The FFN process behind it is gone: what its end says is said by nobody.
    pub(crate) is_orphan: bool,
    /// The same of the attention rank.
    pub(crate) is_forsaken: bool,
}

impl Link {
    pub(crate) fn new(rank: usize, shard: Option<Shard>, attention: BareWire, ffn: BareWire) -> Self {
        Self { rank, shard, attention, ffn, is_orphan: false, is_forsaken: false }
    }

    fn is_dead(&self, to: To) -> bool {
        match to {
            To::Ffn => self.is_forsaken,
            To::Attention => self.is_orphan,
        }
    }

    pub(crate) fn wire(&self, to: To) -> &BareWire {
        match to {
            To::Ffn => &self.ffn,
            To::Attention => &self.attention,
        }
    }
}

/// A frame on its way.
pub(crate) struct Arrival {
    pub(crate) link: usize,
    pub(crate) to: To,
    pub(crate) bytes: Vec<u8>,
    pub(crate) after_us: u64,
}

/// See the module's head.
pub(crate) struct Network {
    pub(crate) links: Vec<Link>,
    pub(crate) faults: Faults,
    /// Frames of one link stay in order, as on a TCP connection.
    pub(crate) in_order: bool,
    last_arrival_us: HashMap<(usize, To), u64>,
    pub(crate) num_harmed: u64,
    /// How often the attention rank sent each shard its part of a hop.
    sends: HashMap<(HopKey, u32), u8>,
    most_sends: u8,
    /// What was answered on which link.
    answered: HashSet<(usize, HopKey)>,
    pub(crate) answered_twice: Option<(usize, HopKey)>,
}

impl Network {
    pub(crate) fn new(faults: Faults, in_order: bool) -> Self {
        Self {
            links: Vec::new(),
            faults,
            in_order,
            last_arrival_us: HashMap::new(),
            num_harmed: 0,
            sends: HashMap::new(),
            most_sends: 0,
            answered: HashSet::new(),
            answered_twice: None,
        }
    }

    /// The attention rank is gone, with all that it counted its steps by. Those up to `warm_up` are run again by every rank that
    /// joins.
    pub(crate) fn end_life(&mut self, warm_up: StepId) {
        let sends = self.sends.drain().filter(|((hop, _), _)| hop.step > warm_up).map(|(_, sends)| sends);
        self.most_sends = sends.fold(self.most_sends, u8::max);
    }

    /// The most that one shard was sent its part of one hop.
    pub(crate) fn most_sends(&self) -> u8 {
        self.most_sends
    }

    /// Takes what the ends have sent. `is_cut` says whether a direction of a rank is cut now.
    pub(crate) fn pump(
        &mut self,
        now_us: u64,
        dice: &mut Dice,
        is_cut: impl Fn(usize, To) -> bool,
    ) -> Vec<Arrival> {
        let mut arrivals = Vec::new();
        for at in 0..self.links.len() {
            for to in [To::Ffn, To::Attention] {
                loop {
                    let link = &self.links[at];
                    let from = if to == To::Ffn { &link.attention } else { &link.ffn };
                    let Some(bytes) = from.take_sent() else { break };
                    if link.is_dead(to) {
                        continue;
                    }
                    let hop = header_of(&bytes).map(|header| header.hop);
                    match (to, hop, link.shard) {
                        (To::Ffn, Some(hop), Some(shard)) => {
                            *self.sends.entry((hop, shard.index())).or_default() += 1;
                        }
                        (To::Attention, Some(hop), _) if !self.answered.insert((at, hop)) => {
                            self.answered_twice = Some((at, hop));
                        }
                        _ => {}
                    }
                    if is_cut(link.rank, to) {
                        continue;
                    }
                    self.judge(at, to, bytes, now_us, dice, &mut arrivals);
                }
            }
        }
        arrivals
    }

    fn judge(
        &mut self,
        link: usize,
        to: To,
        mut bytes: Vec<u8>,
        now_us: u64,
        dice: &mut Dice,
        arrivals: &mut Vec<Arrival>,
    ) {
        let faults = &self.faults;
        let harmed_before = self.num_harmed;
        if dice.chance(faults.stale)
            && let Some(stale) = of_an_earlier_life(&bytes)
        {
            self.num_harmed += 1;
            arrivals.push(Arrival { link, to, bytes: stale, after_us: dice.between(1, 400) });
        }
        if dice.chance(faults.drop) {
            self.num_harmed += 1;
            return;
        }
        if dice.chance(faults.corrupt) {
            let at = dice.index(bytes.len());
            bytes[at] ^= 1 << dice.index(8);
            self.num_harmed += 1;
        }
        if dice.chance(faults.truncate) {
            bytes.truncate(dice.index(bytes.len()));
            self.num_harmed += 1;
        }
        let copies = if dice.chance(faults.duplicate) { dice.between(2, 3) } else { 1 };
        for _ in 0..copies {
            let late = dice.chance(faults.delay);
            let mut after_us = dice.between(20, 200) + if late { dice.between(1_000, 60_000) } else { 0 };
            if self.in_order {
                let last = self.last_arrival_us.entry((link, to)).or_default();
                after_us = after_us.max(last.saturating_sub(now_us));
                *last = now_us + after_us;
            }
            self.num_harmed += u64::from(late);
            arrivals.push(Arrival { link, to, bytes: bytes.clone(), after_us });
        }
        self.num_harmed += copies - 1;
        debug_assert!(self.num_harmed >= harmed_before);
    }
}

/// The same hop in a frame of an earlier life of the link, with other numbers: sound in itself.
fn of_an_earlier_life(frame: &[u8]) -> Option<Vec<u8>> {
    let (header, sum) = decoded(frame)?;
    let mut body = frame[HEADER_BYTES..].to_vec();
    for value in body.chunks_exact_mut(4) {
        value.copy_from_slice(&77_777f32.to_le_bytes());
    }
    let header = FrameHeader { epoch: Epoch(header.epoch.0 - 1), ..header };
    Some([&header.encode(body_sum(sum.checksum(), &[&body]))[..], &body].concat())
}

/// Of a frame with rows.
fn header_of(frame: &[u8]) -> Option<FrameHeader> {
    decoded(frame).map(|(header, _)| header)
}

/// The same with the sum of its body, of whichever kind.
fn decoded(frame: &[u8]) -> Option<(FrameHeader, BodySum)> {
    let head = frame.first_chunk::<HEADER_BYTES>()?;
    [Checksum::Crc32c, Checksum::Sum64].into_iter().find_map(|checksum| {
        let limits = FrameLimits { max_rows: u32::MAX, max_body_bytes: u32::MAX, checksum };
        let (header, sum) = FrameHeader::decode(head, &limits).ok()?;
        let has_rows = matches!(header.kind, FrameKind::Dispatch | FrameKind::Combine);
        sum.filter(|_| has_rows).map(|sum| (header, sum))
    })
}

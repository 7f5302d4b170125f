//! Hops that have arrived and not yet run, keyed by layer: decides what the engine runs next.
//!
//! On a hop's path it stands between the session's links and the engine. It is a plain state machine: no clock, no
//! async, no tensors; the payload is whatever the engine wants back. What it decides:
//!
//! - **Which layer.** The layer of the hop whose turn is lowest, and of those the one that arrived first. A link's hops
//!   take consecutive turns, so with one hop per link this is oldest-first, and a link with many hops in flight leads no
//!   more batches than any other.
//! - **Which hops.** All that have arrived for that layer, whichever link they came by, in order of turn, as long as
//!   their rows fit. The leader always runs.
//! - **What is refused.** A hop that was accepted before ([`HopLedger`]), or that the model has no layer or stage for.
//!   Closing a link forgets its hops and nobody else's.
//!
//! Waiting for company (convoy mode) is not its business: [`Convoys`] says which hops are held, and
//! [`HopQueue::pick_ready`] leaves those out.
use std::fmt;

use afd_common::ids::{HopKey, LayerIdx};

mod convoy;
mod ledger;
#[cfg(test)]
mod tests;

pub use convoy::Convoys;
pub use ledger::{HopLedger, MAX_STAGES};

/// Names a source of hops within one engine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(pub u64);

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "link {}", self.0)
    }
}

/// A hop that waits for its turn.
#[derive(Debug, PartialEq, Eq)]
pub struct QueuedHop<T> {
    /// Where it came from and where its result goes.
    pub source: SourceId,
    /// Which hop of that link.
    pub key: HopKey,
    /// Its rows; zero is legal.
    pub rows: u32,
    /// What the engine keeps with it.
    pub payload: T,
    turn: u64,
    arrival: u64,
}

/// Why a hop was not queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It was accepted before on this link: drop it, the first one is answered.
    #[error("{key} was sent twice on {link}")]
    Duplicate {
        /// Where it came from.
        link: SourceId,
        /// Which.
        key: HopKey,
    },
    /// Its step is older than the last steps of this link.
    #[error("{key} on {link} is older than the last {window} steps")]
    Stale {
        /// Where it came from.
        link: SourceId,
        /// Which.
        key: HopKey,
        /// How many steps of a link may be under way.
        window: usize,
    },
    /// The model has no such layer.
    #[error("layer {found} is out of range: the model has {num_layers} layers")]
    Layer {
        /// As sent.
        found: u16,
        /// Of the model.
        num_layers: u16,
    },
    /// More stages than any step has.
    #[error("stage {found} is out of range: a step has at most {MAX_STAGES} stages")]
    Stage {
        /// As sent.
        found: u8,
    },
    /// The link was closed, or never opened.
    #[error("{link} is not open")]
    NotOpen {
        /// Which.
        link: SourceId,
    },
}

struct LinkState {
    id: SourceId,
    next_turn: u64,
    queued: usize,
    ledger: HopLedger,
}

/// See the module's head.
pub struct HopQueue<T> {
    layers: Vec<Vec<QueuedHop<T>>>,
    links: Vec<LinkState>,
    max_rows: u64,
    turn: u64,
    arrivals: u64,
    len: usize,
}

impl<T> HopQueue<T> {
    /// For a model of `num_layers` layers; a batch has at most `max_rows` rows unless one hop alone has more.
    pub fn new(num_layers: u16, max_rows: u32) -> Self {
        Self {
            layers: (0..num_layers).map(|_| Vec::new()).collect(),
            links: Vec::new(),
            max_rows: u64::from(max_rows),
            turn: 0,
            arrivals: 0,
            len: 0,
        }
    }

    /// Hops that wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Hops of a link that wait.
    pub fn waiting_of(&self, source: SourceId) -> usize {
        self.links.iter().find(|state| state.id == source).map_or(0, |state| state.queued)
    }

    /// Starts accepting hops of a link. Opening an open link changes nothing.
    pub fn open(&mut self, source: SourceId) {
        if self.links.iter().all(|state| state.id != source) {
            let ledger = HopLedger::new(self.num_layers());
            self.links.push(LinkState { id: source, next_turn: self.turn, queued: 0, ledger });
        }
    }

    /// Forgets a link and drops its hops into `dropped`, so that the caller may reuse what they hold.
    pub fn close(&mut self, source: SourceId, dropped: &mut Vec<QueuedHop<T>>) {
        let before = dropped.len();
        for hops in &mut self.layers {
            dropped.extend(hops.extract_if(.., |hop| hop.source == source));
        }
        self.len -= dropped.len() - before;
        self.links.retain(|state| state.id != source);
    }

    /// Queues a hop.
    ///
    /// # Errors
    /// [`Refused`] gives the payload back with the reason; nothing else changes.
    pub fn push(&mut self, source: SourceId, key: HopKey, rows: u32, payload: T) -> Result<(), (Refused, T)> {
        let num_layers = self.num_layers();
        let Some(hops) = self.layers.get_mut(usize::from(key.layer.0)) else {
            return Err((Refused::Layer { found: key.layer.0, num_layers }, payload));
        };
        let Some(state) = self.links.iter_mut().find(|state| state.id == source) else {
            return Err((Refused::NotOpen { link: source }, payload));
        };
        if let Err(refused) = state.ledger.accept(source, key) {
            return Err((refused, payload));
        }
        let turn = state.next_turn.max(self.turn);
        state.next_turn = turn + 1;
        state.queued += 1;
        hops.push(QueuedHop { source, key, rows, payload, turn, arrival: self.arrivals });
        self.arrivals += 1;
        self.len += 1;
        Ok(())
    }

    /// Moves the hops to run next into `batch`, the leader first, and says their layer; `None` when nothing waits.
    pub fn pick(&mut self, batch: &mut Vec<QueuedHop<T>>) -> Option<LayerIdx> {
        self.pick_ready(batch, |_| false)
    }

    /// The same among the hops that are not held; `None` when all are.
    pub fn pick_ready(
        &mut self,
        batch: &mut Vec<QueuedHop<T>>,
        is_held: impl Fn(&QueuedHop<T>) -> bool,
    ) -> Option<LayerIdx> {
        let ready = self.layers.iter().flatten().filter(|hop| !is_held(hop));
        let leader = ready.min_by_key(|hop| (hop.turn, hop.arrival))?;
        let (layer, turn) = (leader.key.layer, leader.turn);
        self.turn = turn;
        let hops = &mut self.layers[usize::from(layer.0)];
        hops.sort_unstable_by_key(|hop| (hop.turn, hop.arrival));
        let (first, mut rows) = (batch.len(), 0u64);
        let max_rows = self.max_rows;
        batch.extend(hops.extract_if(.., |hop| {
            if is_held(hop) {
                return false;
            }
            let fits = rows == 0 || hop.rows == 0 || rows + u64::from(hop.rows) <= max_rows;
            rows += if fits { u64::from(hop.rows) } else { 0 };
            fits
        }));
        self.len -= batch.len() - first;
        for hop in &batch[first..] {
            if let Some(state) = self.links.iter_mut().find(|state| state.id == hop.source) {
                state.queued -= 1;
                // Running early, beside another's hop, costs a link nothing: its next hop waits one turn at most.
                if state.queued == 0 {
                    state.next_turn = state.next_turn.min(turn + 1);
                }
            }
        }
        Some(layer)
    }

    fn num_layers(&self) -> u16 {
        // Built from a u16.
        self.layers.len() as u16
    }
}

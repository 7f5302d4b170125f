//! How far a rank that joined late is with being warmed up: the part of a [rehearsal](super::rehearsal) that its edge keeps.
use std::time::Instant;

use afd_common::ids::LayerIdx;

/// How far an edge is.
#[derive(Clone, Debug)]
pub struct WarmUp {
    /// Steps that are over.
    pub(super) step: usize,
    /// The layer that each stage of the present one waits for.
    pub(super) awaited: Vec<Option<LayerIdx>>,
    pub(super) begun: Option<Instant>,
    /// When something was sent or came last.
    pub(super) moved: Instant,
    /// Somebody waits for this rank since then: nothing more of it is sent.
    pub(super) needed: Option<Instant>,
}

impl WarmUp {
    /// Of an edge that has just joined.
    pub fn new(now: Instant) -> Self {
        Self { step: 0, awaited: Vec::new(), begun: None, moved: now, needed: None }
    }

    /// Whether the rank still owes answers: its link has no room for others then.
    pub fn owes(&self) -> bool {
        self.awaited.iter().any(Option::is_some)
    }

    /// Somebody waits for this rank.
    pub fn handle_needed(&mut self, now: Instant) {
        self.needed.get_or_insert(now);
    }

    /// Since when it owes an answer and has not got on; and whether it is needed.
    pub fn waiting(&self) -> Option<(Instant, bool)> {
        self.owes().then(|| (self.needed.unwrap_or(self.moved), self.needed.is_some()))
    }
}

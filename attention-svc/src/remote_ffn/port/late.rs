//! Ranks that join when the first ones are warm already: each goes through the warm-up beside the steps that serve
//! somebody, and serves nobody before that unless nothing else serves its shard.
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use afd_common::link::InFrame;
use afd_common::spelling::span;

use super::RemoteFfn;
use crate::remote_ffn::edge::Edge;
use crate::remote_ffn::hop_table::EdgeId;
use crate::remote_ffn::rehearsal::{Script, Wire};

impl RemoteFfn {
    /// The first ranks are warm: those that have joined meanwhile are next.
    pub(super) fn warm_late(&mut self) {
        self.script.handle_complete();
        let late = self.edges.iter().filter(|edge| edge.warm_up.is_some()).map(|edge| edge.id);
        for id in late.collect::<Vec<_>>() {
            self.begin_late(id);
        }
    }

    /// An edge that was taken in just now, or waited for the first ranks to be warm, begins its warm-up.
    pub(super) fn begin_late(&mut self, id: EdgeId) {
        let now = self.clock.now();
        let Some(edge) = self.edges.iter_mut().find(|edge| edge.id == id) else { return };
        let wire = &mut Wire::new(&self.settings, &mut self.gathered, &self.stats, now);
        if let Err(why) = self.script.begin(edge, wire) {
            self.handle_down(id, &why);
        }
    }

    /// Rows wait for edges that still owe an answer of their warm-up: it ends with that.
    pub(super) fn hasten_late(&mut self) {
        if self.hops.table.unsent().next().is_none() {
            return;
        }
        let now = self.clock.now();
        for part in self.hops.table.unsent() {
            if let Some(edge) = self.edges.choose(part.shard)
                && let Some(warm_up) = &mut edge.warm_up
            {
                warm_up.handle_needed(now);
            }
        }
    }

    /// Gives up the edges whose warm-up does not get on. Returns when to look again.
    pub(super) fn expire_late(&mut self) -> Option<Instant> {
        loop {
            let (overdue, id, allowed, option) = self.first_late()?;
            if self.clock.now() < overdue {
                return Some(overdue);
            }
            let allowed = span(allowed);
            self.handle_down(
                id,
                &format!("no answer and no progress within {allowed} while it was warmed up ({option})"),
            );
        }
    }

    /// For people.
    pub(super) fn count_cold(&self) {
        let cold = self.edges.iter().filter(|edge| edge.warm_up.is_some()).count();
        self.stats.cold.store(cold as u64, Relaxed);
    }

    /// When the first edge is overdue that owes an answer of its warm-up, how long it had, and by which option.
    pub(super) fn first_late(&self) -> Option<(Instant, EdgeId, Duration, &'static str)> {
        let settings = &self.settings;
        let overdue = |edge: &Edge| {
            let (since, is_needed) = edge.warm_up.as_ref()?.waiting()?;
            let (allowed, option) = match is_needed {
                true => (settings.hop_timeout, "--hop-timeout"),
                false => (settings.warmup_timeout, "--warmup-timeout"),
            };
            let moved = edge.control.as_ref().and_then(|control| control.life.moved_at());
            Some((moved.map_or(since, |moved| since.max(moved)) + allowed, edge.id, allowed, option))
        };
        self.edges.iter().filter_map(overdue).min_by_key(|(overdue, ..)| *overdue)
    }
}

/// Takes in what an edge sent, if it belongs to its warm-up: gives the frame back otherwise.
pub(super) fn take_late(
    script: &Script,
    edge: &mut Edge,
    frame: InFrame,
    wire: &mut Wire<'_>,
) -> Result<Option<InFrame>, String> {
    if !script.is_answer(edge, &frame) {
        return Ok(Some(frame));
    }
    script.handle_answer(edge, frame, wire).map(|()| None)
}

//! Rows go out and partial sums come back; what an edge owes for too long, it has lost.
use std::time::{Duration, Instant};

use afd_common::frame::FrameKind;
use afd_common::link::LinkError;
use afd_common::spelling::{count, span};

use super::RemoteFfn;
use super::late::take_late;
use crate::engine::FfnLoss;
use crate::remote_ffn::edge::Edge;
use crate::remote_ffn::hop_table::{Arrival, EdgeId, MAX_SENDS};
use crate::remote_ffn::rehearsal::Wire;
use crate::remote_ffn::settings::PortSettings;

impl RemoteFfn {
    /// Hands every unsent part to an edge of its shard, as far as there is one.
    pub(super) fn send_unsent(&mut self) -> Result<(), FfnLoss> {
        loop {
            let now_us = self.now_us();
            let has_room = |shard| {
                let edge = self.edges.chosen(shard);
                edge.is_some_and(|edge| edge.warm_up.as_ref().is_none_or(|warm_up| !warm_up.owes()))
            };
            let Some(part) = self.hops.table.unsent().find(|part| has_room(part.shard)) else {
                self.hasten_late();
                return Ok(());
            };
            let (Some(edge), Some(kept)) = (self.edges.choose(part.shard), self.hops.kept(part.key)) else {
                return Err(FfnLoss::Fatal { what: format!("{} has no rows to send", part.key) });
            };
            if part.sends >= MAX_SENDS {
                return Err(FfnLoss::Unavailable {
                    peer: format!("shard {} ({})", part.shard, edge.peer),
                    what: format!("{} was lost with its FFN rank {MAX_SENDS} times", part.key),
                });
            }
            // Nothing else serves its shard: whatever it has missed does not matter now.
            edge.warm_up = None;
            let PortSettings { rows: dtype, hidden_size, .. } = self.settings;
            match kept.send(edge.link.as_mut(), part.shard, dtype, hidden_size, &mut self.gathered) {
                Ok(()) => {
                    let num_rows = kept.num_rows_of(part.shard);
                    self.stats.handle_sent(part.shard, num_rows);
                    self.announced.handle_sent(edge, &self.stats);
                    let id = edge.id;
                    self.recorder.handle_sent(part.key, part.shard, num_rows, edge, part.sends);
                    self.hops.table.handle_sent(part.key, part.shard, id, now_us);
                }
                Err(error @ LinkError::BadFrame { .. }) => {
                    return Err(FfnLoss::Rejected {
                        hop: part.key,
                        peer: edge.peer.to_string(),
                        what: error.to_string(),
                    });
                }
                // Without credit the rank still owes answers to a step that was given up: a new link is quicker.
                Err(error) => {
                    let id = edge.id;
                    self.handle_down(id, &error.to_string());
                }
            }
        }
    }

    pub(super) fn poll_links(&mut self) {
        // One lost edge at a time: the loop starts over, the edges before it have nothing new then.
        while let Some((id, why)) = self.poll_until_loss() {
            self.handle_down(id, &why);
        }
    }

    fn poll_until_loss(&mut self) -> Option<(EdgeId, String)> {
        let now = self.clock.now();
        let now_us = (now - self.started).as_micros() as u64;
        let num_layers = self.settings.model.num_layers();
        let wire = &mut Wire::new(&self.settings, &mut self.gathered, &self.stats, now);
        for edge in self.edges.iter_mut() {
            loop {
                match edge.link.poll_recv() {
                    Ok(None) => break,
                    Ok(Some(frame)) => {
                        let frame = match take_late(&self.script, edge, frame, wire) {
                            Ok(Some(frame)) => frame,
                            Ok(None) => continue,
                            Err(why) => return Some((edge.id, why)),
                        };
                        let (hop, shard) = (frame.header.hop, edge.shard.index() as usize);
                        let sent_us = self.hops.table.waiting_since(hop, shard);
                        match self.hops.handle_frame(edge, &frame, self.settings.hidden_size) {
                            Ok(arrival) => {
                                if arrival == Arrival::Accepted {
                                    let is_last = usize::from(hop.layer.0) + 1 == num_layers;
                                    if is_last && frame.header.kind == FrameKind::Combine {
                                        self.announced.handle_served(edge.id);
                                    }
                                    self.recorder.handle_arrival(hop, shard);
                                    observe(edge, sent_us, now_us);
                                    // Whatever waits behind it has its whole time from here on.
                                    if let Some(control) = &edge.control {
                                        control.life.handle_moved(now);
                                    }
                                }
                                self.stats.handle_arrival(arrival);
                            }
                            Err(why) => return Some((edge.id, why)),
                        }
                    }
                    Err(error) => return Some((edge.id, error.to_string())),
                }
            }
        }
        None
    }

    /// Gives up the edge that has owed an answer for too long without getting on. Returns when to look again.
    pub(super) fn expire_overdue(&mut self) -> Option<Instant> {
        let (id, since_us) = self.hops.table.oldest_wait()?;
        let edge = self.edges.iter().find(|edge| edge.id == id)?;
        let num_rows = self.hops.num_rows();
        let PortSettings { hop_timeout, hop_timeout_per_row, warmup_timeout, .. } = self.settings;
        let (allowed, option) = match self.is_warming {
            true => (warmup_timeout, "--warmup-timeout"),
            false => (hop_timeout + hop_timeout_per_row * num_rows, "--hop-timeout"),
        };
        let moved = edge.control.as_ref().and_then(|control| control.life.moved_at());
        let sent = self.started + Duration::from_micros(since_us);
        let overdue = moved.map_or(sent, |moved| sent.max(moved)) + allowed;
        if self.clock.now() >= overdue {
            let (allowed, rows) = (span(allowed), count(num_rows, "row"));
            let why = format!("no answer and no progress within {allowed} for {rows} ({option})");
            self.handle_down(id, &why);
        }
        Some(overdue)
    }
}

/// Counts how long an answer of `edge` took that was sent for at `sent_us` on the engine's clock.
fn observe(edge: &Edge, sent_us: Option<u64>, now_us: u64) {
    if let (Some(seconds), Some(sent_us)) = (&edge.hop_seconds, sent_us) {
        seconds.observe(now_us.saturating_sub(sent_us) as f64 / 1e6);
    }
}

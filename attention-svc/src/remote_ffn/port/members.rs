//! Edges come and go: who joins, who is lost, and whether every shard has a rank.
use std::sync::Arc;
use std::time::Instant;

use super::RemoteFfn;
use crate::engine::FfnLoss;
use crate::remote_ffn::edge::{Edge, EdgeEvent};
use crate::remote_ffn::hop_table::EdgeId;
use crate::remote_ffn::stream_edge::StreamEdge;
use crate::remote_ffn::streams::Streams;
use crate::remote_ffn::warm_up::WarmUp;

impl RemoteFfn {
    pub(super) fn handle_events(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            match event {
                EdgeEvent::Up(edge) => self.handle_up(edge),
                EdgeEvent::StreamUp(edge) => self.handle_stream_up(*edge),
                EdgeEvent::Down { id, why } => self.handle_down(id, &why),
                EdgeEvent::Draining { id } => {
                    self.streams.iter_mut().for_each(|streams| streams.handle_draining(id));
                    if let Some(edge) = self.edges.iter_mut().find(|edge| edge.id == id) {
                        edge.draining = true;
                    }
                    self.note_readiness();
                }
            }
        }
    }

    fn handle_up(&mut self, mut edge: Edge) {
        edge.hop_seconds = self.stats.hop_seconds_of(edge.link.limits().kind);
        self.stats.links.handle_up(edge.link.as_ref());
        // Where rows wait for it there is no time for that.
        let is_waited_for = self.hops.table.unsent().any(|part| part.shard == edge.shard.index() as usize);
        let is_cold = self.script.is_late() && !is_waited_for;
        edge.warm_up = is_cold.then(|| WarmUp::new(self.clock.now()));
        let id = edge.id;
        let (peer, shard, link) = (Arc::clone(&edge.peer), edge.shard, edge.link.limits().kind);
        let placement = self.settings.placement(shard.count());
        let adopted = match &placement {
            Ok(_) => self.edges.adopt(edge),
            Err(why) => Err((edge, why.clone())),
        };
        match adopted {
            Ok(()) => tracing::info!(%peer, %shard, %link, "FFN rank joined"),
            Err((edge, why)) => {
                tracing::error!(%peer, %shard, why, "FFN rank does not fit");
                self.stats.links.handle_down(edge.link.as_ref());
                edge.abandon(&why, self.clock.now());
            }
        }
        if self.placement.is_none() && self.edges.num_shards() > 0 {
            self.placement = placement.ok();
            self.stats.handle_shards(self.edges.num_shards());
        }
        self.note_readiness();
        self.begin_late(id);
    }

    fn handle_stream_up(&mut self, edge: StreamEdge) {
        let now = self.clock.now();
        match &mut self.streams {
            Some(streams) => streams.handle_up(edge, &self.stats, now),
            None => edge.abandon("this attention rank has no GPU (--device)", now),
        }
        let num_shards = self.streams.as_ref().map_or(0, Streams::num_shards);
        self.stats.handle_shards(num_shards);
        self.note_readiness();
    }

    pub(super) fn handle_down(&mut self, id: EdgeId, why: &str) {
        let now = self.clock.now();
        if let Some(streams) = &mut self.streams
            && streams.handle_down(id, why, &self.stats, now)
        {
            self.note_readiness();
            return;
        }
        if let Some(edge) = self.edges.remove(id) {
            let replays = self.hops.table.handle_loss(id);
            self.stats.links.handle_down(edge.link.as_ref());
            if edge.draining && replays == 0 {
                tracing::info!(peer = %edge.peer, shard = %edge.shard, why, "FFN rank has left, as it said it would");
            } else {
                self.stats.handle_loss(replays);
                tracing::warn!(peer = %edge.peer, shard = %edge.shard, replays, why, "FFN rank lost");
            }
            edge.abandon(why, self.clock.now());
            self.note_readiness();
        }
    }

    pub(super) fn note_readiness(&mut self) {
        let ready = self.is_complete();
        self.stats.set_ready(ready && !self.is_leaving());
        self.bereft_since = if ready { None } else { self.bereft_since.or_else(|| Some(self.clock.now())) };
    }

    /// Whether every shard has a rank, all by links of one sort.
    pub(super) fn is_complete(&self) -> bool {
        self.edges.is_complete() || self.by_stream()
    }

    /// Whether what is begun now might not be finished: the ranks that serve some shard are about to stop.
    pub(super) fn is_leaving(&self) -> bool {
        match self.streams.as_ref().filter(|_| self.by_stream()) {
            Some(streams) => streams.is_leaving(),
            None => self.edges.is_leaving(),
        }
    }

    pub(super) fn streams(&mut self) -> Result<&mut Streams, FfnLoss> {
        let none = || FfnLoss::Fatal { what: "no link is driven by a stream".into() };
        self.streams.as_mut().ok_or_else(none)
    }

    /// Whether steps go by links that a stream drives.
    pub(super) fn by_stream(&self) -> bool {
        self.streams.as_ref().is_some_and(Streams::is_complete)
    }

    /// The shard that has no rank, and until when that is borne.
    pub(super) fn bereft(&self) -> Option<(usize, Instant)> {
        Some((self.edges.first_bereft()?, self.bereft_since? + self.settings.loss_timeout))
    }

    /// What a step is lost with that needs a shard without a rank.
    pub(super) fn unavailable(&self, shard: usize) -> FfnLoss {
        let count = self.edges.num_shards();
        FfnLoss::Bereft { shard: if count == 0 { "0".into() } else { format!("{shard}/{count}") } }
    }
}

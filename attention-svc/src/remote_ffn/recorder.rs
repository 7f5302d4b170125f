//! Times of every part of every hop, noted while a step is recorded. The engine makes spans of them afterwards; for other
//! steps this costs a comparison per call.
use std::time::Instant;

use afd_common::ids::HopKey;

use super::edge::Edge;
use crate::engine::HopRecord;

/// See the module's head.
#[derive(Default)]
pub struct HopRecorder {
    is_on: bool,
    /// When the hop under way began to be dispatched.
    begun: Option<Instant>,
    hops: Vec<HopRecord>,
}

impl HopRecorder {
    /// A step begins, and is recorded or not. The buffer stays, so that it grows in the first such steps only.
    pub fn begin_step(&mut self, is_on: bool) {
        self.is_on = is_on;
        self.hops.clear();
    }

    /// What the last recorded step left.
    pub fn hops(&self) -> &[HopRecord] {
        &self.hops
    }

    /// The rows of a hop are about to go out.
    pub fn handle_dispatch(&mut self) {
        if self.is_on {
            self.begun = Some(Instant::now());
        }
    }

    /// A link took a part that was sent `before` times already.
    pub fn handle_sent(&mut self, key: HopKey, shard: usize, rows: u32, edge: &Edge, before: u8) {
        let Some(begun) = self.begun.filter(|_| self.is_on) else { return };
        let limits = edge.link.limits();
        let (link, epoch, sent) = (limits.kind, limits.epoch, Instant::now());
        if before > 0 {
            if let Some(record) = self.find(key, shard) {
                (record.sends, record.link, record.epoch) = (before + 1, link, epoch);
            }
            return;
        }
        self.hops.push(HopRecord {
            key,
            shard: shard as u32,
            rows,
            link,
            epoch,
            sends: 1,
            begun,
            sent,
            combine_begun: None,
            arrived: None,
            combined: None,
        });
    }

    /// The engine begins to wait for a hop.
    pub fn handle_wait(&mut self, key: HopKey, begun: Instant) {
        if self.is_on {
            self.of_hop(key).for_each(|record| record.combine_begun = Some(begun));
        }
    }

    /// A part came back.
    pub fn handle_arrival(&mut self, key: HopKey, shard: usize) {
        if self.is_on {
            let now = Instant::now();
            self.find(key, shard).into_iter().for_each(|record| record.arrived = Some(now));
        }
    }

    /// All parts of a hop are here.
    pub fn handle_complete(&mut self, key: HopKey) {
        if self.is_on {
            let now = Instant::now();
            self.of_hop(key).for_each(|record| record.combined = Some(now));
        }
    }

    fn find(&mut self, key: HopKey, shard: usize) -> Option<&mut HopRecord> {
        self.of_hop(key).find(|record| record.shard as usize == shard)
    }

    /// The parts of a hop lie side by side, and only the youngest hops are outstanding.
    fn of_hop(&mut self, key: HopKey) -> impl Iterator<Item = &mut HopRecord> {
        let youngest_first = self.hops.iter_mut().rev();
        youngest_first.skip_while(move |record| record.key != key).take_while(move |record| record.key == key)
    }
}

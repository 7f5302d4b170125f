//! The hops of a step on attention's stream: what is said of them once, puts and waits for every shard, and their times when
//! they are wanted.
use afd_common::ids::{HopKey, LayerIdx, StageIdx};
use afd_gpu::{Region, Stream};

use super::{Streams, not_enqueued};
use crate::device::{HopRows, Summand};
use crate::engine::FfnLoss;
use crate::remote_ffn::stream_edge::StreamEdge;
use crate::remote_ffn::stream_times::{Point, StreamTimes, Way};

impl Streams {
    /// Enqueues what is said once of all hops of a step: of every stage its rows, and how many are real if not all are.
    pub(in crate::remote_ffn) fn begin<'a>(
        &mut self,
        stream: &Stream,
        stages: impl Iterator<Item = (usize, Option<&'a Region>)> + Clone,
    ) -> Result<(), FfnLoss> {
        let num_layers = self.place.num_layers;
        let (mut out, mut into) = std::mem::take(&mut self.frames);
        let mut begin = |edge: &mut StreamEdge| {
            for (stage, (rows, real)) in stages.clone().enumerate() {
                out.clear();
                into.clear();
                for layer in (0..num_layers).map(LayerIdx) {
                    let (there, back) = edge.link.frames(layer, stage, rows);
                    out.push(there);
                    into.push(back);
                }
                let begun = edge.link.channel.begin(stream, &out, &into, real);
                begun.map_err(|error| not_enqueued(edge, &error))?;
            }
            Ok(())
        };
        let begun = self.used_mut().try_for_each(&mut begin);
        self.frames = (out, into);
        begun
    }

    /// Where the rows of a hop can be written at once: where one shard takes them all.
    pub(in crate::remote_ffn) fn direct(
        &self,
        layer: LayerIdx,
        stage: usize,
        num_rows: usize,
    ) -> Option<Region> {
        let mut used = self.used();
        let edge = used.next().filter(|_| self.chosen.len() == 1)?;
        edge.link.channel.direct(&edge.link.frames(layer, stage, num_rows).0)
    }

    /// Enqueues: the rows of a stage to every shard.
    pub(super) fn put(
        &mut self,
        stream: &Stream,
        layer: LayerIdx,
        stage: usize,
        num_rows: usize,
        rows: &Region,
        real_rows: Option<&Region>,
    ) -> Result<(), FfnLoss> {
        let key = HopKey { step: self.step_id, layer, stage: StageIdx(stage as u8) };
        let mut timing = self.timing.take();
        for edge in self.used_mut() {
            let (frame, _) = edge.link.frames(layer, stage, num_rows);
            mark(&mut timing, stream, Point::PutBegins, key, edge, num_rows)?;
            let channel = edge.link.channel.as_mut();
            let written = channel.direct(&frame).is_some_and(|direct| direct.address() == rows.address());
            let put = match written {
                true => channel.put_written(stream, frame, real_rows),
                false => channel.put(stream, frame, rows, real_rows),
            };
            put.map_err(|error| not_enqueued(edge, &error))?;
            mark(&mut timing, stream, Point::PutEnds, key, edge, num_rows)?;
            let bytes = (num_rows * edge.link.shape.row_bytes) as u64;
            if let Some(stats) = &edge.stats {
                stats.handle_step((1, bytes), (1, bytes * edge.link.shape.units_back as u64));
            }
        }
        self.timing = timing;
        Ok(())
    }

    /// Enqueues: later work finds the parts of every shard in what is returned, until the stage's next put.
    pub(super) fn wait(
        &mut self,
        stream: &Stream,
        layer: LayerIdx,
        stage: usize,
        num_rows: usize,
    ) -> Result<Vec<Region>, FfnLoss> {
        let key = HopKey { step: self.step_id, layer, stage: StageIdx(stage as u8) };
        let mut timing = self.timing.take();
        let landed = self
            .used_mut()
            .map(|edge| {
                let (_, frame) = edge.link.frames(layer, stage, num_rows);
                mark(&mut timing, stream, Point::WaitBegins, key, edge, num_rows)?;
                let landed = edge.link.channel.wait(stream, frame);
                let landed = landed.map_err(|error| not_enqueued(edge, &error))?;
                mark(&mut timing, stream, Point::WaitEnds, key, edge, num_rows)?;
                Ok(landed.rows)
            })
            .collect();
        self.timing = timing;
        landed
    }

    // ---- whole decode steps

    pub(in crate::remote_ffn) fn put_hop(
        &mut self,
        stream: &Stream,
        layer: LayerIdx,
        stage: usize,
        padded_rows: usize,
        rows: &HopRows<'_>,
    ) -> Result<(), FfnLoss> {
        self.put(stream, layer, stage, padded_rows, rows.rows, Some(rows.num_rows))
    }

    pub(in crate::remote_ffn) fn wait_hop(
        &mut self,
        stream: &Stream,
        layer: LayerIdx,
        stage: usize,
        padded_rows: usize,
    ) -> Result<Summand, FfnLoss> {
        let mut landed = self.wait(stream, layer, stage, padded_rows)?;
        Ok(match landed.len() {
            1 => Summand::Whole(landed.remove(0)),
            _ => Summand::Parts(landed),
        })
    }
}

/// Notes where the stream is, if the step's times are wanted.
fn mark(
    timing: &mut Option<StreamTimes>,
    stream: &Stream,
    point: Point,
    key: HopKey,
    edge: &StreamEdge,
    num_rows: usize,
) -> Result<(), FfnLoss> {
    let Some(timing) = timing else { return Ok(()) };
    let (link, epoch) = (edge.link.kind, edge.link.epoch);
    let way = Way { key, shard: edge.shard.index(), rows: num_rows as u32, link, epoch };
    timing.mark(stream, point, way).map_err(|error| FfnLoss::Fatal { what: error.to_string() })
}

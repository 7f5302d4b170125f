//! What came of a hop goes back the way it came.
use std::sync::atomic::Ordering::Relaxed;

use afd_common::frame::{FrameHeader, FrameKind, SideKind};
use afd_common::ids::Epoch;
use afd_common::link::LinkError;
use afd_ffi::memory;
use tch::Tensor;

use super::{Origin, Waiting, Worker, seconds};
use crate::engine::StageModel;
use crate::engine::accounts::HopTimes;
use crate::engine::hop_error::HopError;
use crate::hop_queue::{QueuedHop, SourceId};

impl<M: StageModel> Worker<M> {
    /// Sends every hop its slice of `output`, in the order in which the rows were put together.
    pub(super) fn send_all(
        &mut self,
        batch: &mut Vec<QueuedHop<Waiting>>,
        output: Option<&Tensor>,
        started_us: u64,
    ) {
        let finished_us = self.clock.now_us();
        let mut rest: &[u8] = match output.map(memory::bytes) {
            None => &[],
            Some(Ok(bytes)) => bytes,
            Some(Err(error)) => {
                for hop in batch.drain(..) {
                    let error = HopError::Model { layer: hop.key.layer.0, what: error.to_string() };
                    self.answer_error(hop.source, hop.payload.origin, &error);
                }
                return;
            }
        };
        self.note_batch(batch, started_us, finished_us);
        let row_bytes = self.spec.hidden_size * self.spec.combine().bytes();
        let mut before_us = finished_us;
        let batch_hops = batch.len() as u32;
        let batch_rows = batch.iter().map(|hop| hop.rows).sum();
        for hop in batch.drain(..) {
            let (slice, behind) = rest.split_at(hop.rows as usize * row_bytes);
            rest = behind;
            let (source, key, rows, arrived_us) = (hop.source, hop.key, hop.rows, hop.payload.arrived_us);
            self.answer(source, hop.payload.origin, slice);
            let sent_us = self.clock.now_us();
            let metrics = self.metrics();
            metrics.send_seconds.observe(seconds(before_us, sent_us));
            metrics.queue_seconds.observe(seconds(arrived_us, started_us));
            before_us = sent_us;
            if let Some(source) = self.source(source) {
                source.accounts.handle_served(&HopTimes {
                    key,
                    rows,
                    batch_rows,
                    batch_hops,
                    epoch: source.link.limits().epoch,
                    arrived_us,
                    started_us,
                    finished_us,
                    sent_us,
                });
            }
        }
        self.metrics().busy_us.fetch_add(before_us.saturating_sub(started_us), Relaxed);
    }

    fn note_batch(&self, batch: &[QueuedHop<Waiting>], started_us: u64, finished_us: u64) {
        let metrics = self.metrics();
        let rows: u64 = batch.iter().map(|hop| u64::from(hop.rows)).sum();
        metrics.hops.inc_by(batch.len() as u64);
        metrics.rows.inc_by(rows);
        metrics.batch_rows.observe(rows as f64);
        metrics.batch_hops.observe(batch.len() as f64);
        let newcomers =
            (0..batch.len()).filter(|at| batch[..*at].iter().all(|hop| hop.source != batch[*at].source));
        metrics.batch_ranks.observe(newcomers.count() as f64);
        metrics.compute_seconds.observe(seconds(started_us, finished_us));
    }

    pub(super) fn answer(&mut self, source: SourceId, origin: Origin, slice: &[u8]) {
        let header = match origin {
            // A caller that has gone away is no error.
            Origin::Call { reply, .. } => return drop(reply.send(Ok(slice.to_vec()))),
            Origin::Link(frame) => frame.header,
        };
        let combine = FrameHeader {
            kind: FrameKind::Combine,
            dtype: self.spec.combine(),
            side: SideKind::None,
            side_columns: 0,
            body_bytes: slice.len() as u32,
            ..header
        };
        self.send(source, combine, slice);
    }

    pub(super) fn answer_error(&mut self, source: SourceId, origin: Origin, error: &HopError) {
        self.metrics().refused.with_label_values(&[error.reason()]).inc();
        let header = match origin {
            Origin::Call { reply, .. } => return drop(reply.send(Err(error.clone()))),
            Origin::Link(frame) => frame.header,
        };
        let mut text = std::mem::take(&mut self.text);
        error.encode(&mut text);
        let answer = FrameHeader {
            kind: FrameKind::Error,
            side: SideKind::None,
            epoch: Epoch(0),
            rows: 0,
            columns: 0,
            side_columns: 0,
            body_bytes: text.len() as u32,
            ..header
        };
        if let Some(source) = self.sources.iter_mut().find(|candidate| candidate.id == source) {
            source.failed_hops += 1;
            // A peer that is wrong all the time does not fill the log.
            if source.failed_hops.is_power_of_two() {
                let (peer, failed_hops) = (&source.link.limits().peer, source.failed_hops);
                tracing::warn!(%peer, hop = %header.hop, failed_hops, %error, "hop failed");
            }
            source.accounts.handle_failed(header.hop.step, error.code() as i32, &error.to_string());
        }
        self.send(source, answer, &text);
        self.text = text;
    }

    /// Sends on a link, which is dropped when it is broken. A link that has gone meanwhile needs no answer.
    fn send(&mut self, source: SourceId, header: FrameHeader, body: &[u8]) {
        let Some(at) = self.sources.iter().position(|candidate| candidate.id == source) else { return };
        match self.sources[at].link.send(header, &[body]) {
            Ok(()) => {}
            // Our own mistake or a result larger than agreed: the peer must not wait for what will not come.
            Err(error @ (LinkError::NoCredit { .. } | LinkError::BadFrame { .. })) => {
                self.sources[at].link.close(&error.to_string());
                self.drop_source(at, &error.to_string());
            }
            Err(end) => self.drop_source(at, &end.to_string()),
        }
    }
}

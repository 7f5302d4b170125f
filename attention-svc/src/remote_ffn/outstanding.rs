//! The hops a step waits for: their rows, which shard still owes its part, and what was refused.
use afd_common::frame::{FrameHeader, FrameKind};
use afd_common::ids::{HopKey, StepId};
use afd_common::link::InFrame;
use tch::Tensor;
use tonic::Code;

use super::edge::Edge;
use super::hop_table::{Arrival, HopTable};
use super::kept::{Kept, row_kind};
use crate::engine::FfnLoss;

/// What an error frame says is wrong, in the rank's own words.
pub(super) enum Refusal {
    /// These rows; the rank and its link live on.
    OfRows(String),
    /// Not these rows: an answer got lost on the link, or the rank is about to go.
    OfLink(String),
}

/// Reads an error frame.
pub(super) fn refusal(frame: &InFrame) -> Refusal {
    let (code, text) = frame.body().split_first_chunk().unwrap_or((&[0; 4], &[]));
    let what = String::from_utf8_lossy(text).into_owned();
    match Code::from(i32::from_le_bytes(*code)) {
        Code::AlreadyExists | Code::Unavailable => Refusal::OfLink(what),
        _ => Refusal::OfRows(what),
    }
}

/// Outstanding hops of the current step.
#[derive(Default)]
pub struct Outstanding {
    /// Who owes what.
    pub table: HopTable<Tensor>,
    kept: Vec<Kept>,
    rejected: Option<FfnLoss>,
    current: StepId,
}

impl Outstanding {
    /// Opens a hop and keeps its rows.
    pub fn keep(&mut self, kept: Kept, num_shards: usize) {
        self.current = kept.key.step;
        self.table.handle_open(kept.key, (0..num_shards).map(|shard| kept.share(shard).is_any()));
        self.kept.push(kept);
    }

    /// The kept rows of a hop.
    pub fn kept(&self, key: HopKey) -> Option<&Kept> {
        self.kept.iter().find(|kept| kept.key == key)
    }

    /// Hops whose rows are kept, or that somebody owes an answer for.
    pub fn num_outstanding(&self) -> usize {
        self.kept.len().max(self.table.len())
    }

    /// Rows of all outstanding hops together.
    pub fn num_rows(&self) -> u32 {
        self.kept.iter().map(|kept| kept.num_rows).sum()
    }

    /// Puts an answer of `edge` where it belongs.
    ///
    /// # Errors
    /// Why the edge cannot be trusted any more.
    pub fn handle_frame(
        &mut self,
        edge: &Edge,
        frame: &InFrame,
        hidden_size: u32,
    ) -> Result<Arrival, String> {
        let FrameHeader { kind, hop, rows, columns, dtype, .. } = frame.header;
        let Some(sent) = self.kept(hop) else {
            // Of a step that was given up, or an answer to something never asked.
            return if hop.step <= self.current {
                Ok(Arrival::Unknown)
            } else {
                Err(format!("{hop} was never sent"))
            };
        };
        let shard = edge.shard.index() as usize;
        match kind {
            FrameKind::Combine => {
                let expected = (sent.num_rows_of(shard), hidden_size, edge.combine_dtype);
                if (rows, columns, dtype) != expected {
                    return Err(format!(
                        "{hop}: came back as {rows} × {columns} {dtype}, expected {} × {} {}",
                        expected.0, expected.1, expected.2
                    ));
                }
                let shape = [i64::from(rows), i64::from(columns)];
                let part = Tensor::f_from_data_size(frame.body(), &shape, row_kind(dtype))
                    .map_err(|error| format!("{hop}: {error}"))?;
                Ok(self.table.handle_arrival(hop, shard, edge.id, part))
            }
            FrameKind::Error => {
                let what = match refusal(frame) {
                    Refusal::OfLink(what) => return Err(format!("{hop}: {what}")),
                    Refusal::OfRows(what) => what,
                };
                self.rejected = Some(FfnLoss::Rejected { hop, peer: edge.peer.to_string(), what });
                Ok(Arrival::Accepted)
            }
            FrameKind::Dispatch | FrameKind::Close => {
                Err(format!("{hop}: an FFN rank sent a {kind:?} frame"))
            }
        }
    }

    /// What an FFN rank refused, once.
    pub fn take_rejected(&mut self) -> Option<FfnLoss> {
        self.rejected.take()
    }

    /// Appends the parts of a complete hop, each with its shard and in shard order, to `parts`, and gives its rows back.
    /// `None`, and nothing changes, while one is missing.
    pub fn take(&mut self, key: HopKey, parts: &mut Vec<(usize, Tensor)>) -> Option<Kept> {
        let at = self.kept.iter().position(|kept| kept.key == key)?;
        self.table.take(key, parts).then(|| self.kept.swap_remove(at))
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.table.clear();
        self.kept.clear();
        self.rejected = None;
    }
}

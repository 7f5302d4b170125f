//! What a stage of a decode step chose, brought to the host by one copy: token ids, and the intervals they were drawn from.
use std::time::Duration;

use afd_gpu::ops::Rows;
use afd_gpu::{Device, GpuError, Region, Staging, Stream};

use crate::engine::DeviceChoice;

/// Tokens and intervals of one stage, on the device and on the host.
pub(super) struct Outcome {
    /// `[max_rows]` i32
    pub(super) tokens: Region,
    /// `[max_rows, 2]` f64
    pub(super) intervals: Region,
    /// Both, one behind the other.
    all: Region,
    /// Of a step, and of the one behind it.
    here: [Staging; 2],
}

impl Outcome {
    pub(super) fn new(device: &Device, max_rows: usize) -> Result<Self, GpuError> {
        let intervals_at = (max_rows * 4).next_multiple_of(256);
        let all = Region::zeroed(device, intervals_at + max_rows * 16)?;
        Ok(Self {
            tokens: all.part(0..max_rows * 4)?,
            intervals: all.part(intervals_at..all.len())?,
            here: [Staging::new(device, all.len())?, Staging::new(device, all.len())?],
            all,
        })
    }

    /// Enqueues the copy to the host; `turn` is another one for a step and the one behind it.
    pub(super) fn fetch(
        &mut self,
        kernels: &Rows,
        stream: &Stream,
        padded: usize,
        turn: usize,
    ) -> Result<(), GpuError> {
        let bytes = self.all.len() - self.intervals.len() + padded * 16;
        kernels.carry_out(stream, &self.all, &mut self.here[turn % 2], bytes)
    }

    /// What was chosen for `padded` rows, once it is here.
    pub(super) fn chosen(
        &mut self,
        padded: usize,
        turn: usize,
        deadline: Duration,
    ) -> Result<Vec<DeviceChoice>, GpuError> {
        let at = self.all.len() - self.intervals.len();
        let here = &mut self.here[turn % 2];
        here.wait(deadline)?;
        let tokens = here.elements::<i32>(0..padded * 4)?;
        let mut chosen: Vec<_> = tokens
            .iter()
            .map(|&token| DeviceChoice { token: u32::try_from(token).ok(), below: 0.0, upto: 0.0 })
            .collect();
        let intervals = here.elements::<u64>(at..at + padded * 16)?;
        for (choice, [below, upto]) in chosen.iter_mut().zip(intervals.as_chunks().0) {
            (choice.below, choice.upto) = (f64::from_bits(*below), f64::from_bits(*upto));
        }
        Ok(chosen)
    }
}

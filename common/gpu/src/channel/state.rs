//! What every kind of channel keeps on the device: how many frames went through each slot, and what went wrong first.
use std::sync::Arc;

use crate::channel::{StepError, StepLimits};
use crate::{Device, HostWords, Launch, Region};

/// Sequence numbers of a slot and a direction: one for each block of a put, as in `channel.cu`.
pub(super) const BLOCKS: usize = 16;

/// See the module's head.
pub(super) struct State {
    pub(super) limits: StepLimits,
    /// `[slots, BLOCKS]` u32 each: of what this end has put, and of what it has waited for.
    sent: Region,
    received: Region,
    status: Region,
    host_status: Arc<HostWords>,
}

impl State {
    pub(super) fn new(device: &Device, limits: StepLimits) -> Result<Self, StepError> {
        let sequences = || Region::zeroed(device, limits.num_slots * BLOCKS * 4);
        Ok(Self {
            limits,
            sent: sequences()?,
            received: sequences()?,
            status: Region::zeroed(device, 32)?,
            host_status: Arc::new(HostWords::new(device, 8)?),
        })
    }

    /// Sequence numbers of what was put into a slot.
    pub(super) fn sent(&self, slot: usize) -> Result<Region, StepError> {
        Self::of_slot(&self.sent, slot)
    }

    /// Sequence numbers of what was waited for in a slot.
    pub(super) fn received(&self, slot: usize) -> Result<Region, StepError> {
        Self::of_slot(&self.received, slot)
    }

    fn of_slot(all: &Region, slot: usize) -> Result<Region, StepError> {
        Ok(all.part(slot * BLOCKS * 4..(slot + 1) * BLOCKS * 4)?)
    }

    /// The device's status, for kernels that only look whether there is one.
    pub(super) fn status(&self) -> &Region {
        &self.status
    }

    /// Adds the arguments `status` and `host` of a kernel that may find something wrong. The host's words live as long as
    /// the channel, which waits for its device when it is dropped.
    pub(super) fn report<'a>(&'a self, launch: Launch<'a>) -> Launch<'a> {
        launch.region(&self.status).u64(self.host_status.address())
    }

    /// What [`report`](Self::report) adds, for whoever lives by himself.
    pub(super) fn reported(&self) -> (Region, Arc<HostWords>) {
        (self.status.clone(), Arc::clone(&self.host_status))
    }

    /// The first thing that went wrong, as the kernels' `Status` says.
    pub(super) fn check(&self) -> Result<(), StepError> {
        let word = |i| self.host_status.get(i).unwrap_or_default();
        let long = |i| u64::from(word(i)) | u64::from(word(i + 1)) << 32;
        let (slot, seen, expected) = (word(1), long(2), long(4));
        match word(0) {
            0 => Ok(()),
            1 => Err(StepError::Late { slot, patience: self.limits.patience, seen, expected }),
            2 => Err(StepError::Foreign { slot, seen, expected }),
            4 => Err(StepError::Aborted),
            _ => Err(StepError::Ahead { slot, seen, expected }),
        }
    }
}

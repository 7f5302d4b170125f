//! A device's marks as moments of the host's clock.
use std::time::{Duration, Instant};

use crate::{Completion, Device, GpuError};

/// One moment on both clocks, within about ten microseconds: what it takes the host to see a mark.
#[derive(Debug)]
pub struct Anchor {
    mark: Completion,
    at: Instant,
}

impl Anchor {
    /// Now. On a stream of its own, so that it waits for nothing that runs elsewhere.
    ///
    /// # Errors
    /// [`GpuError::Late`] after `deadline`, [`GpuError::Driver`].
    pub fn now(device: &Device, deadline: Duration) -> Result<Self, GpuError> {
        let mark = device.stream()?.mark(true)?;
        mark.wait(deadline)?;
        Ok(Self { mark, at: Instant::now() })
    }

    /// When the device came to a timed mark that is done.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn moment(&self, mark: &Completion) -> Result<Instant, GpuError> {
        let ago_us = self.mark.us_since(mark)?;
        let apart = Duration::from_secs_f64(ago_us.abs() / 1e6);
        let moment = if ago_us < 0.0 { self.at.checked_add(apart) } else { self.at.checked_sub(apart) };
        Ok(moment.unwrap_or(self.at))
    }
}

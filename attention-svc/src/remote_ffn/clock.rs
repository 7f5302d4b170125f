//! Time as the port sees it. A trait, so that a simulation can own it: there a wait is what makes the world go on.
use std::time::Instant;

use afd_common::link::Doorbell;

/// What the time is, and how to let it pass.
pub trait Clock: Send {
    /// Now. Never goes back.
    fn now(&self) -> Instant;

    /// Returns once `bell` has rung since its count was `seen`, or at `deadline`.
    fn wait(&mut self, bell: &Doorbell, seen: u64, deadline: Instant);
}

/// The machine's own.
pub struct WallClock;

impl Clock for WallClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wait(&mut self, bell: &Doorbell, seen: u64, deadline: Instant) {
        bell.wait(seen, Some(deadline));
    }
}

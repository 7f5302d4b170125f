//! Virtual time: a clock that the port reads and waits by.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::link::Doorbell;
use attention_svc::remote_ffn::clock::Clock;

use crate::world::World;

/// Times that the clock may be read without any time passing.
const PATIENCE: u64 = 200_000;

/// Shows the time of a world, and moves it on while somebody waits.
pub(crate) struct SimClock {
    world: Arc<Mutex<World>>,
    base: Instant,
    reads: AtomicU64,
}

impl SimClock {
    /// As long after `base` as it is in `world`.
    pub(crate) fn new(world: Arc<Mutex<World>>, base: Instant) -> Self {
        Self { world, base, reads: AtomicU64::new(0) }
    }
}

pub(crate) fn lock(world: &Mutex<World>) -> MutexGuard<'_, World> {
    world.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Clock for SimClock {
    fn now(&self) -> Instant {
        let reads = self.reads.fetch_add(1, Ordering::Relaxed);
        assert!(reads < PATIENCE, "somebody spins: the time was read {PATIENCE} times and nothing happened");
        self.base + Duration::from_micros(lock(&self.world).now_us)
    }

    fn wait(&mut self, bell: &Doorbell, seen: u64, deadline: Instant) {
        let until_us = (deadline - self.base).as_micros() as u64;
        let mut world = lock(&self.world);
        let before_us = world.now_us;
        world.look();
        while bell.count() == seen {
            match world.next_at() {
                Some(at) if at <= until_us => world.step(),
                _ => {
                    world.now_us = world.now_us.max(until_us);
                    break;
                }
            }
        }
        if world.now_us > before_us {
            self.reads.store(0, Ordering::Relaxed);
        }
    }
}

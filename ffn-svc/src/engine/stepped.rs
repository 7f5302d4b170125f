//! The engine without a thread of its own: whoever holds it says when it takes a turn. For simulations, which own the
//! time that passes between two turns.
use std::sync::Arc;

use afd_common::link::{Doorbell, HopLink};
use crossbeam_channel::{Sender, unbounded};

use super::stream_links::GiveUps;
use super::worker::{Turn, Worker};
use super::{Command, EngineOptions, SessionTag, StageModel, StepAccounts};

/// See the module's head.
pub struct SteppedEngine<M> {
    worker: Worker<M>,
    commands: Sender<Command>,
    bell: Doorbell,
}

impl<M: StageModel> SteppedEngine<M> {
    /// With no links.
    pub fn new(model: M, options: EngineOptions) -> Self {
        let ((commands, inbox), bell) = (unbounded(), Doorbell::default());
        Self {
            worker: Worker::new(model, options, (inbox, bell.clone()), GiveUps::default()),
            commands,
            bell,
        }
    }

    /// What every link of this engine must ring.
    pub fn bell(&self) -> Doorbell {
        self.bell.clone()
    }

    /// As [`EngineHandle::adopt_for`](super::EngineHandle::adopt_for).
    pub fn adopt_for(&self, link: Box<dyn HopLink>, accounts: Arc<StepAccounts>, session: SessionTag) {
        // The receiver is in the worker beside it.
        let _ = self.commands.send(Command::Adopt { link, accounts, session, rank: 0 });
    }

    /// As [`EngineHandle::close_session`](super::EngineHandle::close_session).
    pub fn close_session(&self, session: SessionTag, reason: impl Into<String>) {
        let _ = self.commands.send(Command::CloseSession { session, reason: reason.into() });
    }

    /// Runs at most one batch; whether it did.
    pub fn turn(&mut self) -> bool {
        self.worker.turn() == Turn::Ran
    }
}

//! What a session does for traces, without a session: the attention rank is in this very process (`--ffn local`). Plans
//! come over a channel instead of a stream and say which steps are recorded; the spans of those are made, and nothing is
//! reported. There is no lease and nobody to refuse.
use std::sync::Arc;

use afd_common::ids::{Shard, StepId};
use afd_common::proto::v1::steps_request::Message;
use afd_common::telemetry::SpanSink;
use tokio::sync::mpsc;

use super::{steps, trace};
use crate::engine::{EngineHandle, StepAccounts};

/// See the module's head.
#[derive(Debug)]
pub struct InProcess {
    accounts: Arc<StepAccounts>,
    shard: Shard,
    spans: SpanSink,
}

impl InProcess {
    /// Beside `engine`, which must [keep these accounts](EngineHandle::adopt_for) of its link.
    pub fn new(engine: &EngineHandle, spans: SpanSink) -> Self {
        let num_layers = u16::try_from(engine.spec().layers.len()).unwrap_or(u16::MAX);
        let accounts = Arc::new(StepAccounts::new(num_layers, spans.is_on()));
        Self { accounts, shard: engine.spec().shard, spans }
    }

    /// What the engine has to keep.
    pub fn accounts(&self) -> &Arc<StepAccounts> {
        &self.accounts
    }

    /// Makes spans until whoever sends plans is gone. The engine may still have a step then: [`end_spans`](Self::end_spans)
    /// once it has stopped.
    pub async fn run(self, mut plans: mpsc::Receiver<Message>) -> Self {
        loop {
            tokio::select! {
                message = plans.recv() => match message {
                    Some(message) => self.handle(message),
                    None => return self,
                },
                () = self.accounts.wait_finished() => self.end_spans(),
            }
        }
    }

    fn handle(&self, message: Message) {
        match message {
            Message::Plan(plan) => self.accounts.handle_plan(StepId(plan.step_id), steps::planned(&plan)),
            Message::Cancel(cancel) => self.accounts.handle_cancel(StepId(cancel.step_id)),
            Message::Heartbeat(_) => {}
        }
    }

    /// Makes the spans of the recorded steps that are over.
    pub fn end_spans(&self) {
        while let Some(step) = self.accounts.take_traced() {
            trace::end_spans(&self.spans, self.shard, &step);
            self.accounts.recycle(step);
        }
        // Reports have no reader here.
        while self.accounts.take_finished().is_some() {}
    }
}

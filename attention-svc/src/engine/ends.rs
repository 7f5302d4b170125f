//! Sequences end, well or not, and whoever asked for them is told.
use super::AttentionPort;
use super::active::Active;
use super::run::Engine;
use crate::request::{FinishReason, SequenceError, SequenceEvent, SequenceId, Usage};

impl<A: AttentionPort> Engine<A> {
    /// Frees all that a sequence holds, before anybody is told of its end: whoever is told may count on it.
    fn take_out(&mut self, id: SequenceId) -> Option<(Active, Usage)> {
        let mut active = self.sequences.remove(&id)?;
        active.leave_queue();
        let usage = self.scheduler.remove(id).unwrap_or_default();
        self.publish();
        Some((active, usage))
    }

    /// Ends a sequence well. Nothing happens when it has already ended.
    pub(super) fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        let Some((mut active, usage)) = self.take_out(id) else { return };
        let count = match reason {
            FinishReason::Stop => &self.metrics.finished_stop,
            FinishReason::Length => &self.metrics.finished_length,
            FinishReason::Cancelled => &self.metrics.finished_cancelled,
        };
        count.add(1);
        self.end_spans(&mut active, usage, None);
        active.tell(&mut self.news, SequenceEvent::Finished { reason, usage });
    }

    /// Ends a sequence with an error.
    pub(super) fn fail(&mut self, id: SequenceId, error: SequenceError) {
        let Some((mut active, usage)) = self.take_out(id) else { return };
        self.metrics.failed.add(1);
        self.end_spans(&mut active, usage, Some(&error));
        active.tell(&mut self.news, SequenceEvent::Failed(error));
    }

    fn end_spans(&self, active: &mut Active, usage: Usage, error: Option<&SequenceError>) {
        if let Some(spans) = active.spans.take() {
            spans.end(&self.recorder.spans, usage, error.map(SequenceError::to_string).as_deref());
        }
    }

    pub(super) fn fail_all(&mut self, error: &SequenceError) {
        for id in self.sequences.keys().copied().collect::<Vec<_>>() {
            self.fail(id, error.clone());
        }
    }
}

//! What the API asks of the engine.
use crate::engine::EngineHandle;
use crate::request::{SequenceError, SequenceId, SequenceRequest};

/// Runs sequences. Calls return at once; everything else comes as events.
pub trait Engine: Send + Sync + 'static {
    /// Takes a sequence; its events go to [`SequenceRequest::events`], the last one being `Finished` or `Failed`.
    ///
    /// # Errors
    /// [`SequenceError::QueueFull`], [`SequenceError::TooLarge`], [`SequenceError::ShuttingDown`].
    fn submit(&self, request: SequenceRequest) -> Result<SequenceId, SequenceError>;

    /// Ends a sequence within one step and frees what it holds; it finishes as cancelled. An unknown one is no error.
    fn abort(&self, id: SequenceId);
}

impl Engine for EngineHandle {
    fn submit(&self, request: SequenceRequest) -> Result<SequenceId, SequenceError> {
        Self::submit(self, request)
    }

    fn abort(&self, id: SequenceId) {
        Self::abort(self, id);
    }
}

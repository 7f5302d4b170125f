//! The engine's thread: how it starts, and how its end, whatever the cause, reaches everybody who waits for it.
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use afd_common::link::Doorbell;
use tokio::sync::watch;

use super::handle::Command;
use super::run::Engine;
use super::{
    AttentionPort, EngineConfig, EngineConfigError, EngineHandle, EngineMetrics, EngineState, FfnPort,
};
use crate::request::{SequenceError, SequenceEvent};

/// The engine cannot go on; neither can the process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the engine died: {0}")]
pub struct EngineDeath(pub String);

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineStartError {
    /// A size that cannot work.
    #[error(transparent)]
    Config(#[from] EngineConfigError),
    /// The operating system gave no thread.
    #[error("starting the engine's thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// Starts the engine on a thread of its own. `bell` is the one that the links behind `ffn` ring.
///
/// The thread ends after [`EngineHandle::drain`], or with [`EngineDeath`]; either way every sequence has been told.
///
/// # Errors
/// [`EngineStartError`] names the option.
pub fn spawn<A: AttentionPort + 'static>(
    config: EngineConfig,
    attention: A,
    mut ffn: Box<dyn FfnPort>,
    bell: Doorbell,
    metrics: Arc<EngineMetrics>,
) -> Result<(EngineHandle, JoinHandle<Result<(), EngineDeath>>), EngineStartError> {
    config.check()?;
    let state = Arc::new(watch::Sender::new(if attention.warms_up() || ffn.warms_up() {
        EngineState::Warming
    } else {
        EngineState::Running
    }));
    let (handle, commands) =
        EngineHandle::new(&config, bell.clone(), Arc::clone(&state), Arc::clone(&metrics));
    ffn.end_with(handle.ending().clone());
    let engine = Engine::new(config, attention, ffn, commands, bell, state, metrics);
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || live(engine))?;
    Ok((handle, thread))
}

fn live<A: AttentionPort>(mut engine: Engine<A>) -> Result<(), EngineDeath> {
    let _no_grad = tch::no_grad_guard();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _on_thread = engine.attention.enter_thread().map_err(|error| EngineDeath(error.0))?;
        engine.run()
    }))
    .unwrap_or_else(|panic| Err(EngineDeath(format!("panic: {}", panic_message(&*panic)))));
    let (state, error) = match &outcome {
        Ok(()) => (EngineState::Stopped, SequenceError::ShuttingDown),
        Err(death) => {
            tracing::error!(%death, "the engine's thread ends");
            (EngineState::Died { reason: death.to_string() }, SequenceError::Internal(death.to_string()))
        }
    };
    engine.state.send_replace(state);
    engine.metrics.ffn_ready.set(0);
    for (_, active) in engine.sequences.drain() {
        active.tell(&mut engine.news, SequenceEvent::Failed(error.clone()));
    }
    engine.news.deliver();
    while let Ok(command) = engine.commands.try_recv() {
        if let Command::Submit(_, request, _) = command {
            // A receiver that is gone needs no answer.
            let _ = request.events.send(SequenceEvent::Failed(error.clone()));
        }
    }
    // After a panic the engine's own state may be inconsistent; what its destructors do then must not matter.
    let _ = catch_unwind(AssertUnwindSafe(move || {
        engine.publish();
        drop(engine);
    }));
    outcome
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no message)")
}

//! Follows what readiness depends on: the FFN ranks and the engine.
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::api::{Readiness, Reason};
use crate::engine::{EngineHandle, EngineState};
use crate::remote_ffn::stats::FfnStats;

/// Keeps `readiness` true until the task is aborted.
pub(super) fn follow(
    readiness: watch::Sender<Readiness>,
    engine: &EngineHandle,
    stats: &FfnStats,
    missing: Reason,
) -> JoinHandle<()> {
    let (mut state, mut ffn_ready) = (engine.state(), stats.watch_ready());
    tokio::spawn(async move {
        loop {
            let now = match (&*state.borrow_and_update(), *ffn_ready.borrow_and_update()) {
                (EngineState::Warming, true) => {
                    Readiness::Waiting(Reason::from("steps are being made ready"))
                }
                (EngineState::Running, true) => Readiness::Ready,
                (EngineState::Warming | EngineState::Running, false) => Readiness::Waiting(missing.clone()),
                (EngineState::Draining { .. } | EngineState::Stopped, _) => Readiness::Draining,
                (EngineState::Died { reason }, _) => Readiness::Dead(reason.clone()),
            };
            let changed = readiness.send_if_modified(|was| std::mem::replace(was, now.clone()) != now);
            if changed {
                tracing::info!(state = now.word(), reason = now.reason(), "readiness");
            }
            let gone = tokio::select! {
                changed = state.changed() => changed.is_err(),
                changed = ffn_ready.changed() => changed.is_err(),
            };
            if gone {
                return;
            }
        }
    })
}

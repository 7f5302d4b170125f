//! The signals that tell a process to end.
use std::future::pending;
use std::io;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::spelling::span;

/// That a process was told to end, and by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// SIGTERM: a supervisor.
    Terminate,
    /// SIGINT: Ctrl-C.
    Interrupt,
}

impl Told {
    /// The signal's name.
    pub fn by(self) -> &'static str {
        match self {
            Self::Terminate => "SIGTERM",
            Self::Interrupt => "SIGINT",
        }
    }
}

/// SIGTERM, and SIGINT, which is Ctrl-C. From its making on neither ends the process by itself; what was
/// [held](afd_ffi::process::hold_end) before comes then.
#[derive(Debug)]
pub struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    /// Within a runtime, on a thread that lives as long as the process: it is the one that is told.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        let stop =
            Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
        afd_ffi::process::let_end();
        Ok(stop)
    }

    /// Waits for the next of them. One that is not waited for is not lost.
    pub async fn told(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::Terminate,
            _ = self.interrupt.recv() => Told::Interrupt,
        }
    }
    /// What `serve` comes to, which is given the first of them and then has `limit` to end (`--drain-timeout`). Of every later
    /// one the log says that it changes nothing, and what does.
    pub async fn until_ended<T, F: Future<Output = T>>(
        &mut self,
        limit: Duration,
        serve: impl FnOnce(BoxFuture<'static, Told>) -> F,
    ) -> T {
        let (tell, first) = oneshot::channel();
        let first = async {
            match first.await {
                Ok(told) => told,
                // Whoever tells lives as long as this does.
                Err(_) => pending().await,
            }
        };
        let telling = async {
            let _ = tell.send(self.told().await);
            let deadline = Instant::now() + limit;
            loop {
                let why = self.told().await.by();
                let left = span(deadline.saturating_duration_since(Instant::now()));
                tracing::warn!(
                    why,
                    left,
                    "told to end again, which changes nothing: what runs may still take the time that is left \
                     (--drain-timeout); SIGKILL ends it at once"
                );
            }
        };
        tokio::select! {
            ended = serve(Box::pin(first)) => ended,
            never = telling => match never {},
        }
    }
}

//! The signals that tell a process to end.
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

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
}

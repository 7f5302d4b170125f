//! The thread that reads one end's frames.
use std::io::BufReader;
use std::net::Shutdown;
use std::sync::Arc;

use super::outbox::Outbox;
use crate::link::LinkError;
use crate::link::intake::Intake;
use crate::link::stream::LinkStream;

/// Small frames are read together with their header; a larger body goes straight into its pooled buffer.
const READ_AHEAD_BYTES: usize = 16 << 10;

pub(super) struct Reader {
    pub(super) stream: LinkStream,
    pub(super) intake: Intake,
    pub(super) outbox: Arc<Outbox>,
}

impl Reader {
    pub(super) fn run(self) {
        let mut input = BufReader::with_capacity(READ_AHEAD_BYTES, &self.stream);
        let end = loop {
            if let Err(end) = self.intake.read_frame(&mut input) {
                break self.explained(end);
            }
        };
        self.intake.inbox.end(end);
        // Frees a writer that waits for a peer which will not read any more.
        let _ = self.stream.socket().shutdown(Shutdown::Both);
    }

    /// A connection that broke while it was written to says why.
    fn explained(&self, end: LinkError) -> LinkError {
        match (end, self.outbox.error()) {
            (LinkError::Lost { what, .. }, Some(error)) => {
                self.intake.inbox.lost(format!("{what}; writing failed: {error}"))
            }
            (end, _) => end,
        }
    }
}

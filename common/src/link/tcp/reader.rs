//! The thread that reads one end's frames where the engine does not.
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use super::outbox::Outbox;
use crate::link::LinkError;
use crate::link::intake::{FrameReader, Progress};
use crate::link::stream::LinkStream;

/// For how long the thread is to read.
pub(super) enum Errand {
    /// To the end of a large frame, while the engine does something else.
    OneFrame(FrameReader),
    /// To the end of the link.
    Everything(FrameReader),
}

pub(super) struct Thread {
    pub(super) stream: LinkStream,
    pub(super) outbox: Arc<Outbox>,
    pub(super) errands: Receiver<Errand>,
    /// The way back to the engine.
    pub(super) done: Sender<FrameReader>,
}

impl Thread {
    /// Until the link's end is dropped, or nothing more comes.
    pub(super) fn run(self) {
        let mut input = &self.stream;
        while let Ok(errand) = self.errands.recv() {
            let (mut reader, is_for_good) = match errand {
                Errand::OneFrame(reader) => (reader, false),
                Errand::Everything(reader) => (reader, true),
            };
            loop {
                let inbox = Arc::clone(&reader.intake.inbox);
                match reader.read(&mut input) {
                    Ok(Progress::Frame(frame)) => drop(frame.map(|frame| inbox.place(frame))),
                    // The socket blocks.
                    Ok(Progress::Waits { .. }) => continue,
                    Err(end) => return end_link(&reader, &self.stream, &self.outbox, end),
                }
                // What still comes after a farewell is read so that the peer gets rid of it.
                if !is_for_good && inbox.ended().is_none() {
                    if self.done.send(reader).is_err() {
                        return;
                    }
                    inbox.ring();
                    break;
                }
                inbox.ring();
            }
        }
    }
}

/// Nothing more comes, for this reason.
pub(super) fn end_link(reader: &FrameReader, stream: &LinkStream, outbox: &Outbox, end: LinkError) {
    let inbox = &reader.intake.inbox;
    // A connection that broke while it was written to says why.
    inbox.end(match (end, outbox.error()) {
        (LinkError::Lost { what, .. }, Some(error)) => inbox.lost(format!("{what}; writing failed: {error}")),
        (end, _) => end,
    });
    // A peer whose frames were damaged is still to be told.
    if matches!(inbox.ended(), Some(LinkError::Corrupt { .. })) && outbox.is_idle() {
        return;
    }
    // Frees a writer that waits for a peer which will not read any more.
    let _ = stream.socket().shutdown(Shutdown::Both);
}

//! A link whose transport is played by a test: it is given the bytes of every frame that an end sends, and decides what
//! the other end gets to see of them, when, how often and in which state. Everything but the transport is that of every
//! other link: checks, credits, epochs, verification. One frame is one message, as if each came on a connection of its own.
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use super::intake::{FrameReader, Intake, Progress};
use super::port::Port;
use super::{Doorbell, HopLink, InFrame, Limits, LinkError, LinkStats};
use crate::frame::{FrameHeader, body_sum};

type Sent = Arc<Mutex<VecDeque<Vec<u8>>>>;

/// What the engine holds.
pub struct BareLink {
    port: Port,
    sent: Sent,
}

/// What the transport holds of the same end.
pub struct BareWire {
    intake: Intake,
    sent: Sent,
}

/// One end of a link and its transport. The other end has the same limits but for the peer's name.
pub fn end(limits: Limits, bell: Doorbell) -> (BareLink, BareWire) {
    let port = Port::new(limits, bell);
    let (intake, sent) = (Intake::new(&port), Sent::default());
    (BareLink { port, sent: Arc::clone(&sent) }, BareWire { intake, sent })
}

impl BareWire {
    /// The oldest frame that the end has sent and the transport has not taken yet.
    pub fn take_sent(&self) -> Option<Vec<u8>> {
        lock(&self.sent).pop_front()
    }

    /// These bytes arrive as a frame, or what is left of one.
    pub fn deliver(&self, bytes: &[u8]) {
        match FrameReader::new(self.intake.clone()).read(&mut &*bytes) {
            Ok(Progress::Frame(frame)) => {
                frame.map(|frame| self.intake.inbox.place(frame));
                self.intake.inbox.ring();
            }
            Ok(Progress::Waits { .. }) => {}
            Err(end) => self.intake.inbox.end(end),
        }
    }

    /// The transport breaks.
    pub fn cut(&self, what: &str) {
        self.intake.inbox.end(self.intake.inbox.lost(what));
    }

    /// Whether somebody still has the end.
    pub fn is_held(&self) -> bool {
        Arc::strong_count(&self.sent) > 1
    }

    /// Counters of the end.
    pub fn stats(&self) -> Arc<LinkStats> {
        Arc::clone(&self.intake.inbox.stats)
    }
}

impl BareLink {
    fn push(&self, header: &FrameHeader, body: &[&[u8]]) {
        let mut frame = header.encode(body_sum(self.port.limits.checksum, body)).to_vec();
        body.iter().for_each(|part| frame.extend_from_slice(part));
        lock(&self.sent).push_back(frame);
    }
}

impl HopLink for BareLink {
    fn limits(&self) -> &Limits {
        &self.port.limits
    }

    fn send(&mut self, mut header: FrameHeader, body: &[&[u8]]) -> Result<(), LinkError> {
        self.port.check_send(&mut header, body)?;
        self.push(&header, body);
        self.port.handle_sent(&header);
        Ok(())
    }

    fn poll_recv(&mut self) -> Result<Option<InFrame>, LinkError> {
        self.port.poll_recv()
    }

    fn close(&mut self, reason: &str) {
        if let Some((header, text)) = self.port.close(reason) {
            self.push(&header, &[text]);
        }
    }

    fn stats(&self) -> Arc<LinkStats> {
        Arc::clone(&self.port.inbox.stats)
    }
}

impl Drop for BareLink {
    fn drop(&mut self) {
        self.close("the other end was dropped");
        if let Some((header, text)) = self.port.blame() {
            self.push(&header, &[text.as_bytes()]);
        }
    }
}

fn lock(sent: &Sent) -> MutexGuard<'_, VecDeque<Vec<u8>>> {
    sent.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::super::contract::{self, Fixture, Side, Wire};
    use super::*;
    use crate::frame::Checksum;

    /// A transport that is always there and harms nobody.
    struct Bare(Checksum);

    impl Fixture for Bare {
        fn checksum(&self) -> Checksum {
            self.0
        }

        fn has_trailers(&self) -> bool {
            true
        }

        fn pair(&self, a: Limits, b: Limits) -> (Side, Side) {
            let bells = (Doorbell::default(), Doorbell::default());
            let ((left, at_left), (right, at_right)) = (end(a, bells.0.clone()), end(b, bells.1.clone()));
            thread::spawn(move || {
                // Until both ends and their last words are gone.
                while Arc::strong_count(&at_left.sent) + Arc::strong_count(&at_right.sent) > 2 {
                    for (from, to) in [(&at_left, &at_right), (&at_right, &at_left)] {
                        while let Some(frame) = from.take_sent() {
                            to.deliver(&frame);
                        }
                    }
                    thread::sleep(Duration::from_micros(20));
                }
            });
            (Side::new(left, bells.0), Side::new(right, bells.1))
        }

        fn raw(&self, limits: Limits) -> Option<(Side, Box<dyn Wire>)> {
            let bell = Doorbell::default();
            let (link, wire) = end(limits, bell.clone());
            Some((Side::new(link, bell), Box::new(wire)))
        }
    }

    impl Wire for BareWire {
        fn write(&mut self, bytes: &[u8]) {
            self.deliver(bytes);
        }

        fn cut_within(&mut self, frame: &[u8]) {
            if !frame.is_empty() {
                self.deliver(&frame[..frame.len() / 2]);
            }
            self.cut("it was cut");
        }
    }

    contract::contract_tests!(Bare(Checksum::Crc32c));

    mod sum64 {
        use super::*;

        contract::contract_tests!(Bare(Checksum::Sum64));
    }
}

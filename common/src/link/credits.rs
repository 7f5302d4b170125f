//! Which dispatches of a link are unanswered, in both directions. Pure: every end keeps one of these and asks it before a
//! frame goes out or is handed to the engine.
use crate::frame::FrameKind;
use crate::ids::HopKey;

/// Unanswered dispatches of one end.
pub(super) struct Credits {
    limit: usize,
    /// Sent by this end and not answered.
    asked: Vec<HopKey>,
    /// Sent by the peer and not answered.
    owed: Vec<HopKey>,
}

/// Why a frame must not be sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// As many dispatches as agreed are unanswered.
    NoCredit,
    /// The same hop is in flight already.
    InFlight,
    /// The peer did not ask for this hop, or it was answered.
    NotAsked,
}

/// What to do with a frame that arrived.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// Hand it to the engine.
    Take,
    /// An answer nobody waits for.
    Unasked,
    /// A dispatch that is here already.
    Duplicate,
    /// The peer has more dispatches in flight than agreed.
    OverCredit,
}

impl Credits {
    pub(super) fn new(limit: u32) -> Self {
        let limit = limit as usize;
        Self { limit, asked: Vec::with_capacity(limit), owed: Vec::with_capacity(limit) }
    }

    pub(super) fn may_send(&self, kind: FrameKind, hop: &HopKey) -> Result<(), Refused> {
        match kind {
            FrameKind::Dispatch if self.asked.contains(hop) => Err(Refused::InFlight),
            FrameKind::Dispatch if self.asked.len() >= self.limit => Err(Refused::NoCredit),
            FrameKind::Dispatch => Ok(()),
            FrameKind::Combine | FrameKind::Error if self.owed.contains(hop) => Ok(()),
            FrameKind::Combine | FrameKind::Error | FrameKind::Close => Err(Refused::NotAsked),
        }
    }

    /// To be called when a frame that [`may_send`](Self::may_send) allowed has gone out.
    pub(super) fn handle_sent(&mut self, kind: FrameKind, hop: HopKey) {
        match kind {
            FrameKind::Dispatch => self.asked.push(hop),
            _ => self.owed.retain(|owed| *owed != hop),
        }
    }

    pub(super) fn handle_arrival(&mut self, kind: FrameKind, hop: HopKey) -> Arrival {
        match kind {
            FrameKind::Dispatch if self.owed.contains(&hop) => Arrival::Duplicate,
            FrameKind::Dispatch if self.owed.len() >= self.limit => Arrival::OverCredit,
            FrameKind::Dispatch => {
                self.owed.push(hop);
                Arrival::Take
            }
            _ => match self.asked.iter().position(|asked| *asked == hop) {
                Some(at) => {
                    self.asked.swap_remove(at);
                    Arrival::Take
                }
                None => Arrival::Unasked,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameHeader;
    use FrameKind::{Combine, Dispatch, Error};

    #[test]
    fn dispatches_need_credit_and_answers_give_it_back() {
        let mut ours = Credits::new(2);
        let hop = |step| FrameHeader::key(step, 0, 0);
        for step in [1, 2] {
            assert_eq!(ours.may_send(Dispatch, &hop(step)), Ok(()));
            ours.handle_sent(Dispatch, hop(step));
        }
        assert_eq!(ours.may_send(Dispatch, &hop(3)), Err(Refused::NoCredit));
        assert_eq!(ours.may_send(Dispatch, &hop(1)), Err(Refused::InFlight));
        assert_eq!(ours.handle_arrival(Combine, hop(3)), Arrival::Unasked);
        assert_eq!(ours.handle_arrival(Error, hop(1)), Arrival::Take);
        assert_eq!(ours.handle_arrival(Combine, hop(1)), Arrival::Unasked);
        assert_eq!(ours.may_send(Dispatch, &hop(3)), Ok(()));
    }

    #[test]
    fn answers_need_a_question_and_a_peer_cannot_ask_for_more_than_agreed() {
        let mut ours = Credits::new(1);
        let hop = |step| FrameHeader::key(step, 0, 0);
        assert_eq!(ours.may_send(Combine, &hop(1)), Err(Refused::NotAsked));
        assert_eq!(ours.handle_arrival(Dispatch, hop(1)), Arrival::Take);
        assert_eq!(ours.handle_arrival(Dispatch, hop(1)), Arrival::Duplicate);
        assert_eq!(ours.handle_arrival(Dispatch, hop(2)), Arrival::OverCredit);
        assert_eq!(ours.may_send(Combine, &hop(1)), Ok(()));
        ours.handle_sent(Combine, hop(1));
        assert_eq!(ours.may_send(Error, &hop(1)), Err(Refused::NotAsked));
        assert_eq!(ours.handle_arrival(Dispatch, hop(2)), Arrival::Take);
    }
}

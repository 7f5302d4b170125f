//! Which process holds which place among the FFN ranks, as this attention rank sees them. Pure.
//!
//! The mirror of what an FFN rank does with attention ranks: one live process per (deployment, rank). The live one
//! stays; once its session here has ended, a newer process may take its place, and an older one never comes back, so that
//! one that was stopped for a while cannot. A process that is reached by a second address is no second process: the
//! address it was joined by last is the one that counts.
use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;

use afd_common::proto::v1;

/// A place among the FFN ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    deployment: String,
    rank: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "F{} of `{}`", self.rank, self.deployment)
    }
}

/// Who answered at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    place: Place,
    incarnation: u64,
}

impl Process {
    /// As it says itself.
    pub fn of(identity: &v1::Identity) -> Self {
        let place = Place { deployment: identity.deployment.clone(), rank: identity.rank };
        Self { place, incarnation: identity.incarnation }
    }

    /// Among the FFN ranks.
    pub fn rank(&self) -> u32 {
        self.place.rank
    }
}

/// What is said of a second address of a process that is in use.
pub(super) const TWICE: &str = "--ffn names one process twice";

/// Why a process is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotSeated {
    /// Another live process says that it is the same rank. It is tried again once that one is gone.
    #[error(
        "identity.rank: {place} is live at {address} as incarnation {live}; the process here is incarnation {caller}: \
         give one of the two another --rank"
    )]
    Twin {
        /// Which place.
        place: Place,
        /// Where the live one is.
        address: SocketAddr,
        /// Who holds it.
        live: u64,
        /// Who asked for it.
        caller: u64,
    },
    /// A newer process has held this place.
    #[error(
        "identity.incarnation: {place} was taken over by incarnation {newer}; the process here is the older {caller}"
    )]
    Fenced {
        /// Which place.
        place: Place,
        /// Newest that held it.
        newer: u64,
        /// Who asked for it.
        caller: u64,
    },
    /// The process is in use already, by another address.
    #[error("{place} is in use as {address}: {TWICE}")]
    Alias {
        /// Which place.
        place: Place,
        /// By which address.
        address: SocketAddr,
    },
}

#[derive(Debug)]
struct Seat {
    newest: u64,
    holder: Option<SocketAddr>,
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Roster {
    seats: HashMap<Place, Seat>,
}

impl Roster {
    /// Whether a process may be joined at `address`: not while it is in use by another one.
    ///
    /// # Errors
    /// [`NotSeated::Alias`].
    pub fn check(&self, process: &Process, address: SocketAddr) -> Result<(), NotSeated> {
        match self.seats.get(&process.place) {
            Some(Seat { newest, holder: Some(holder) })
                if *newest == process.incarnation && *holder != address =>
            {
                Err(NotSeated::Alias { place: process.place.clone(), address: *holder })
            }
            _ => Ok(()),
        }
    }

    /// A process has been joined at `address` and is to be used. One that is in use by another address moves here: its
    /// session there ended with this join.
    ///
    /// # Errors
    /// [`NotSeated::Twin`] and [`NotSeated::Fenced`]; nothing changes then.
    pub fn seat(&mut self, process: &Process, address: SocketAddr) -> Result<(), NotSeated> {
        let (place, caller) = (process.place.clone(), process.incarnation);
        let seat = self.seats.entry(place.clone()).or_insert(Seat { newest: caller, holder: None });
        match seat.holder {
            Some(holder) if holder != address && seat.newest != caller => {
                return Err(NotSeated::Twin { place, address: holder, live: seat.newest, caller });
            }
            _ if seat.newest > caller => return Err(NotSeated::Fenced { place, newer: seat.newest, caller }),
            _ => {}
        }
        *seat = Seat { newest: caller, holder: Some(address) };
        Ok(())
    }

    /// The session of a process at `address` has ended.
    pub fn vacate(&mut self, process: &Process, address: SocketAddr) {
        if let Some(seat) = self.seats.get_mut(&process.place)
            && seat.holder == Some(address)
            && seat.newest == process.incarnation
        {
            seat.holder = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(rank: u32, incarnation: u64) -> Process {
        let role = v1::Role::Ffn.into();
        Process::of(&v1::Identity { deployment: "default".into(), role, rank, incarnation })
    }

    fn at(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    #[test]
    fn the_live_one_of_two_twins_stays_and_both_are_named() {
        let mut roster = Roster::default();
        roster.seat(&process(0, 10), at(1)).unwrap();
        for caller in [9, 11] {
            let refused = roster.seat(&process(0, caller), at(2)).unwrap_err().to_string();
            for part in ["F0 of `default`", "10.0.0.1:1", "incarnation 10", "--rank"] {
                assert!(refused.contains(part), "{refused}");
            }
        }
        roster.seat(&process(1, 11), at(2)).unwrap();
    }

    #[test]
    fn a_newer_process_takes_the_place_of_one_that_is_gone_and_the_older_stays_out() {
        let mut roster = Roster::default();
        roster.seat(&process(0, 10), at(1)).unwrap();
        roster.vacate(&process(0, 10), at(1));
        roster.seat(&process(0, 11), at(2)).unwrap();
        roster.vacate(&process(0, 10), at(1));
        assert!(matches!(roster.seat(&process(0, 12), at(3)), Err(NotSeated::Twin { live: 11, .. })));
        roster.vacate(&process(0, 11), at(2));
        let fenced = roster.seat(&process(0, 10), at(1)).unwrap_err();
        assert!(matches!(fenced, NotSeated::Fenced { newer: 11, caller: 10, .. }), "{fenced}");
        roster.seat(&process(0, 11), at(2)).unwrap();
    }

    #[test]
    fn a_process_restarted_at_its_address_needs_no_patience() {
        let mut roster = Roster::default();
        roster.seat(&process(0, 10), at(1)).unwrap();
        roster.seat(&process(0, 11), at(1)).unwrap();
        roster.vacate(&process(0, 10), at(1));
        assert!(matches!(roster.seat(&process(0, 12), at(2)), Err(NotSeated::Twin { live: 11, .. })));
    }

    #[test]
    fn a_second_address_of_one_process_waits_until_the_first_is_given_up() {
        let mut roster = Roster::default();
        roster.seat(&process(0, 10), at(1)).unwrap();
        roster.seat(&process(0, 10), at(2)).unwrap();
        roster.vacate(&process(0, 10), at(1));
        let alias = roster.check(&process(0, 10), at(1)).unwrap_err();
        assert!(matches!(&alias, NotSeated::Alias { address, .. } if *address == at(2)), "{alias}");
        assert!(
            roster.check(&process(0, 11), at(1)).is_ok(),
            "another process at this address is another matter"
        );
        roster.vacate(&process(0, 10), at(2));
        assert!(roster.check(&process(0, 10), at(1)).is_ok());
    }
}

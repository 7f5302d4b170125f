//! What can happen in the world, each at its time.
use attention_svc::remote_ffn::hop_table::EdgeId;

use crate::faults::Mishap;
use crate::network::To;

/// What may happen next.
#[derive(Debug)]
pub(super) enum Event {
    Arrive {
        link: usize,
        to: To,
        bytes: Vec<u8>,
    },
    /// An FFN engine looks at its links.
    Turn {
        rank: usize,
    },
    /// A control task tries to join.
    Connect {
        rank: usize,
    },
    /// A rank hears the next thing that was said on its control stream.
    Hear {
        rank: usize,
        edge: EdgeId,
    },
    /// A control task and its rank hear of each other, if they can.
    Beat {
        rank: usize,
        edge: EdgeId,
    },
    /// An FFN process looks for leases that are over.
    Expire {
        rank: usize,
        incarnation: u64,
    },
    /// A rank hears that a control stream has ended.
    Hangup {
        rank: usize,
        incarnation: u64,
        tag: u64,
    },
    /// The attention rank hears that a process is gone.
    Reset {
        link: usize,
    },
    /// A rank hears that the attention rank is gone.
    Forsaken {
        link: usize,
    },
    Neighbour {
        rank: usize,
        incarnation: u64,
    },
    Mishap(Mishap),
    Continue {
        rank: usize,
    },
    Heal {
        rank: usize,
    },
    /// A process that drains ends.
    Leave {
        rank: usize,
        down_us: u64,
    },
    Restart {
        rank: usize,
    },
}

//! Where everything lies in a segment. See the module's head for the picture.
const PAGE: usize = 4096;
/// Of page 0.
pub(super) const NONCE_AT: usize = 8;
pub(super) const SLOTS_AT: usize = 24;
pub(super) const SLOT_BYTES_AT: usize = 32;
/// Within a lane's control page: the words that change are on lines of their own.
const HEAD_AT: usize = 0;
const SLEEPING_AT: usize = 64;
const STATES_AT: usize = 128;

/// Size of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    slots: u32,
    slot_bytes: usize,
}

impl Shape {
    /// Lanes of `slots` slots of `slot_bytes`; `None` when there is nothing to share or an address could not express it.
    pub fn new(slots: u32, slot_bytes: usize) -> Option<Self> {
        let shape = Self { slots, slot_bytes };
        let per_lane = slot_bytes.checked_add(PAGE)?.checked_mul(slots as usize)?;
        let total = per_lane.checked_add(8 * slots as usize + 2 * PAGE)?.checked_mul(2)?;
        (slots > 0 && slot_bytes > 0 && isize::try_from(total).is_ok()).then_some(shape)
    }

    pub(super) fn slots(self) -> u32 {
        self.slots
    }

    pub(super) fn slot_bytes(self) -> usize {
        self.slot_bytes
    }

    /// Bytes of the whole file.
    pub fn total_bytes(self) -> usize {
        self.slot_at(1, self.slots)
    }

    fn lane_control_bytes(self) -> usize {
        (STATES_AT + 8 * self.slots as usize).next_multiple_of(PAGE)
    }

    fn lane_at(self, lane: usize) -> usize {
        PAGE + lane * self.lane_control_bytes()
    }

    pub(super) fn head_at(self, lane: usize) -> usize {
        self.lane_at(lane) + HEAD_AT
    }

    pub(super) fn sleeping_at(self, lane: usize) -> usize {
        self.lane_at(lane) + SLEEPING_AT
    }

    pub(super) fn state_at(self, lane: usize, slot: u32) -> usize {
        self.lane_at(lane) + STATES_AT + 4 * slot as usize
    }

    pub(super) fn queue_at(self, lane: usize, place: u32) -> usize {
        self.state_at(lane, self.slots) + 4 * place as usize
    }

    pub(super) fn slot_at(self, lane: usize, slot: u32) -> usize {
        let stride = self.slot_bytes.next_multiple_of(PAGE);
        self.lane_at(2) + (lane * self.slots as usize + slot as usize) * stride
    }
}

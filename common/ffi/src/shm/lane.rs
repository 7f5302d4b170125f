//! The slots of one direction. See the module's head for the protocol.
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, fence};

use super::mapping::Mapping;
use super::shape::Shape;
use crate::futex::{self, Scope};

const FREE: u32 = 0;
const FULL: u32 = 1;
const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

/// Why nothing was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushError {
    /// The receiver holds every slot.
    Full,
    /// The parts do not fit into a slot.
    TooLarge,
}

/// The other process broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("shared memory: {what}")]
pub struct Broken {
    /// How.
    pub what: &'static str,
}

/// The sending end of a lane.
pub struct Sender {
    mapping: Arc<Mapping>,
    shape: Shape,
    lane: usize,
    head: u32,
}

impl Sender {
    pub(super) fn new(mapping: Arc<Mapping>, shape: Shape, lane: usize) -> Self {
        Self { mapping, shape, lane, head: 0 }
    }

    /// Sends `head` and the concatenation of `parts` behind it, and wakes the receiver if it sleeps.
    ///
    /// # Errors
    /// [`PushError`]; nothing was sent.
    pub fn push(&mut self, head: &[u8], parts: &[&[u8]]) -> Result<(), PushError> {
        let mut claim = self.claim(head.len(), parts.iter().map(|part| part.len()).sum())?;
        parts.iter().for_each(|part| claim.write(part));
        claim.send(head);
        Ok(())
    }

    /// A free slot for `body_bytes` that are written piece by piece, and for `head_bytes` before them that are known once all
    /// others are. Dropped without being sent it stays free.
    ///
    /// # Errors
    /// [`PushError`].
    pub fn claim(&mut self, head_bytes: usize, body_bytes: usize) -> Result<Claim<'_>, PushError> {
        if head_bytes.saturating_add(body_bytes) > self.shape.slot_bytes() {
            return Err(PushError::TooLarge);
        }
        // Always the first: the one that was used last is still in the processor's cache.
        let is_free = |slot: &u32| self.state(*slot).load(Acquire) == FREE;
        let slot = (0..self.shape.slots()).find(is_free).ok_or(PushError::Full)?;
        let begin = self.shape.slot_at(self.lane, slot);
        Ok(Claim {
            slot,
            begin,
            head_bytes,
            at: begin + head_bytes,
            end: begin + head_bytes + body_bytes,
            sender: self,
        })
    }

    fn state(&self, slot: u32) -> &AtomicU32 {
        self.mapping.word(self.shape.state_at(self.lane, slot))
    }

    #[cfg(test)]
    pub(super) fn forge_head(&mut self, head: u32) {
        self.mapping.word(self.shape.head_at(self.lane)).store(head, SeqCst);
    }

    #[cfg(test)]
    pub(super) fn forge_queue(&mut self, place: u32, slot: u32) {
        self.mapping.word(self.shape.queue_at(self.lane, place)).store(slot, SeqCst);
    }
}

/// See [`Sender::claim`].
pub struct Claim<'a> {
    sender: &'a mut Sender,
    slot: u32,
    begin: usize,
    head_bytes: usize,
    at: usize,
    end: usize,
}

impl Claim<'_> {
    /// Copies the next piece of the body.
    pub fn write(&mut self, piece: &[u8]) {
        assert!(piece.len() <= self.end - self.at, "more than was claimed");
        self.sender.mapping.write(self.at, piece);
        self.at += piece.len();
    }

    /// Announces the slot, and wakes the receiver if it sleeps.
    pub fn send(self, head: &[u8]) {
        assert!(head.len() == self.head_bytes && self.at == self.end, "less than was claimed");
        let Sender { mapping, shape, lane, head: sent, .. } = self.sender;
        mapping.write(self.begin, head);
        mapping.word(shape.state_at(*lane, self.slot)).store(FULL, Relaxed);
        mapping.word(shape.queue_at(*lane, *sent % shape.slots())).store(self.slot, Relaxed);
        *sent = sent.wrapping_add(1);
        mapping.word(shape.head_at(*lane)).store(*sent, Release);
        // Against a receiver that says it sleeps and then looks at the head: one of both sees the other.
        fence(SeqCst);
        let sleeping = mapping.word(shape.sleeping_at(*lane));
        // Looked at first: to write there takes the line from the receiver. Whoever takes the word back wakes, once.
        if sleeping.load(Relaxed) != AWAKE && sleeping.swap(AWAKE, SeqCst) != AWAKE {
            futex::wake(sleeping, Scope::Shared);
        }
    }
}

/// The receiving end of a lane.
pub struct Receiver {
    lane: Arc<Lane>,
    tail: u32,
}

/// What a receiver, its slots and its watch share.
struct Lane {
    mapping: Arc<Mapping>,
    shape: Shape,
    index: usize,
    /// Slots that are handed out: kept here, where the other process cannot change it.
    held: Box<[AtomicBool]>,
    /// The head when the receiver last found nothing.
    seen: AtomicU32,
}

impl Lane {
    fn head(&self) -> &AtomicU32 {
        self.mapping.word(self.shape.head_at(self.index))
    }
}

impl Receiver {
    pub(super) fn new(mapping: Arc<Mapping>, shape: Shape, index: usize) -> Self {
        let held = (0..shape.slots()).map(|_| AtomicBool::new(false)).collect();
        let seen = AtomicU32::new(0);
        Self { lane: Arc::new(Lane { mapping, shape, index, held, seen }), tail: 0 }
    }

    /// The next slot that was sent, or `None`.
    ///
    /// # Errors
    /// [`Broken`]: nothing more may be taken from this lane.
    pub fn pop(&mut self) -> Result<Option<Slot>, Broken> {
        let Lane { mapping, shape, index, held, seen } = &*self.lane;
        let waiting = self.lane.head().load(Acquire).wrapping_sub(self.tail);
        if waiting == 0 {
            seen.store(self.tail, Relaxed);
            return Ok(None);
        }
        if waiting > shape.slots() {
            return Err(Broken { what: "more frames are announced than there are slots" });
        }
        let slot = mapping.word(shape.queue_at(*index, self.tail % shape.slots())).load(Relaxed);
        let Some(held) = held.get(slot as usize) else {
            return Err(Broken { what: "a slot is announced that does not exist" });
        };
        if held.swap(true, Acquire) {
            return Err(Broken { what: "a slot is announced that was not given back" });
        }
        self.tail = self.tail.wrapping_add(1);
        Ok(Some(Slot { lane: Arc::clone(&self.lane), slot }))
    }

    /// For sleeping until the lane may have something new.
    pub fn watch(&self) -> Watch {
        Watch { lane: Arc::clone(&self.lane) }
    }
}

/// Bytes that were received, where they lie. The whole slot is visible; what was sent is at its beginning.
pub struct Slot {
    lane: Arc<Lane>,
    slot: u32,
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Lane { mapping, shape, index, .. } = &*self.lane;
        // SAFETY: this process's end of the lane only receives, so nothing here writes to its slots; the other process
        // does not before the slot is marked free, which happens when `self` is dropped.
        unsafe { mapping.slice(shape.slot_at(*index, self.slot), shape.slot_bytes()) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Lane { mapping, shape, index, held, .. } = &*self.lane;
        held[self.slot as usize].store(false, Release);
        mapping.word(shape.state_at(*index, self.slot)).store(FREE, Release);
    }
}

/// Tells whether a lane moved since its receiver last found nothing.
pub struct Watch {
    lane: Arc<Lane>,
}

impl Watch {
    /// Frames announced so far; starts again at 0 after 2^32.
    pub fn head(&self) -> u32 {
        self.lane.head().load(SeqCst)
    }

    /// Whether there may be something the receiver has not seen.
    pub fn moved(&self) -> bool {
        self.head() != self.lane.seen.load(Relaxed)
    }

    /// The word to sleep on, and its value while nobody has woken the receiver.
    pub fn word(&self) -> futex::Watched<'_> {
        (self.sleeping(), ASLEEP, Scope::Shared)
    }

    /// Says whether senders have to wake somebody. To be said before looking at [`moved`](Self::moved) for the last time, and
    /// once more before every further sleep: whoever wakes takes it back.
    pub fn set_sleeping(&self, sleeping: bool) {
        self.sleeping().store(if sleeping { ASLEEP } else { AWAKE }, SeqCst);
    }

    /// Wakes the receiver for another reason than a frame.
    pub fn wake(&self) {
        // Whatever it was: a sender may have taken it back and died before it woke anybody.
        self.set_sleeping(false);
        futex::wake(self.sleeping(), Scope::Shared);
    }

    fn sleeping(&self) -> &AtomicU32 {
        self.lane.mapping.word(self.lane.shape.sleeping_at(self.lane.index))
    }
}

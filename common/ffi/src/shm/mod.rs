//! A segment of shared memory with a lane of slots in each direction between two processes.
//!
//! ```text
//! page 0      magic u64, nonce 16 B, slots u32, slot_bytes u64
//! per lane    head u32, sleeping u32 (64 B apart), state u32 per slot, queue u32 per slot      page-aligned
//! per lane    the slots                                                                    each page-aligned
//! ```
//! A [`Sender`] copies into a slot that is free, marks it full, puts its number into the queue and advances the head. A
//! receiver that finds nothing says so in `sleeping`, looks once more and sleeps on that word; the next sender takes it back
//! and wakes, and so does whoever else has something to say to it. A [`Receiver`] takes numbers out of the queue in
//! order and hands out [`Slot`]s: the bytes where they lie. Dropping a slot marks it free, in any order. Neither side
//! ever waits for the other.
//!
//! # Trust
//! Both processes run as the same user and one of them created the file with mode 0600. Every number read from shared
//! memory is checked before it is used, so a peer that breaks the rules can spoil what it sends, not this process's
//! memory. What it cannot be kept from is changing bytes that were handed out, or truncating the file: whoever may do that
//! may also attach a debugger.
mod lane;
mod mapping;
mod segment;
mod shape;

pub use lane::{Broken, Claim, PushError, Receiver, Sender, Slot, Watch};
pub use segment::{Nonce, Segment, Side};
pub use shape::Shape;

#[cfg(test)]
mod tests;

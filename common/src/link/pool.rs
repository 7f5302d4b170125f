//! Buffers that are made when a link is opened and come back when what was in them is dropped, so that the per-hop path
//! allocates nothing.
use std::sync::{Arc, Mutex};

use super::stats::LinkStats;
use crate::frame::{HEADER_BYTES, TRAILER_BYTES};

/// Where bodies begin: at lines of the processor's cache. Sums and copies that read 64 bytes at a time run at half their
/// rate where each of those lies in two lines.
const LINE_BYTES: usize = 64;
/// Before a body its header and what brings it to the begin of a line, behind it its sum and the next header.
const AROUND_BYTES: usize = LINE_BYTES + 2 * HEADER_BYTES + TRAILER_BYTES;

/// A set of equally large buffers, each with room around a body.
#[derive(Clone)]
pub struct Pool {
    free: Arc<Mutex<Vec<Vec<u8>>>>,
    capacity_bytes: usize,
    stats: Arc<LinkStats>,
}

impl Pool {
    /// `count` buffers for bodies of `capacity_bytes`. Their pages are taken from the system at first use.
    pub fn new(count: usize, capacity_bytes: usize, stats: Arc<LinkStats>) -> Self {
        let free = (0..count).map(|_| vec![0; capacity_bytes + AROUND_BYTES]).collect();
        Self { free: Arc::new(Mutex::new(free)), capacity_bytes, stats }
    }

    /// A buffer for a body of `len` bytes, to be overwritten. Makes a new one (and counts it) when a receiver holds on
    /// to more frames than the link's credits allow for, which a peer cannot bring about.
    pub fn take(&self, len: usize) -> PooledBuf {
        let recycled = self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop();
        let mut buf = recycled.unwrap_or_else(|| {
            self.stats.buffer_grown();
            vec![0; self.capacity_bytes + AROUND_BYTES]
        });
        if buf.len() < len + AROUND_BYTES {
            buf.resize(len + AROUND_BYTES, 0);
        }
        let header_at = buf.as_ptr().addr().next_multiple_of(LINE_BYTES) - buf.as_ptr().addr();
        PooledBuf { buf, header_at, len, home: Arc::clone(&self.free) }
    }
}

/// A buffer that goes back to its pool when dropped.
pub struct PooledBuf {
    // Stays as long as it was made, so that no byte is ever cleared just to be overwritten.
    buf: Vec<u8>,
    header_at: usize,
    len: usize,
    home: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl PooledBuf {
    /// The body that was written.
    pub fn bytes(&self) -> &[u8] {
        &self.buf[self.header_at + HEADER_BYTES..][..self.len]
    }

    /// The body, for the link that fills it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buf[self.header_at + HEADER_BYTES..][..self.len]
    }

    /// Header, body, its sum and the next header, for a link that gets one behind the other.
    pub(super) fn frame_mut(&mut self) -> &mut [u8] {
        &mut self.buf[self.header_at..][..self.len + 2 * HEADER_BYTES + TRAILER_BYTES]
    }

    /// Only the first `len` bytes of the body were written.
    pub(super) fn shorten(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Fills it with the concatenation of `parts`, which is as long as what was asked for.
    pub(super) fn copy_parts(&mut self, parts: &[&[u8]]) {
        let mut rest = self.bytes_mut();
        for part in parts {
            let (here, behind) = rest.split_at_mut(part.len());
            here.copy_from_slice(part);
            rest = behind;
        }
    }
}

impl Drop for PooledBuf {
    fn drop(&mut self) {
        let buf = std::mem::take(&mut self.buf);
        self.home.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(buf);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_more_are_made_only_when_held() {
        let stats = Arc::new(LinkStats::default());
        let pool = Pool::new(2, 8, Arc::clone(&stats));
        for _ in 0..5 {
            let (mut first, second) = (pool.take(3), pool.take(8));
            first.copy_parts(&[b"a", b"", b"bc"]);
            assert_eq!((first.bytes(), second.bytes().len()), (&b"abc"[..], 8));
            assert!(first.bytes().as_ptr().addr().is_multiple_of(LINE_BYTES));
        }
        assert_eq!(stats.counts().buffers_grown, 0);
        let held = [pool.take(1), pool.take(1), pool.take(1)];
        assert_eq!(stats.counts().buffers_grown, 1);
        drop(held);
        assert_eq!(pool.free.lock().unwrap().len(), 3);
    }
}

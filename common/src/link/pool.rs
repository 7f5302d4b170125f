//! Buffers for received bodies that are made when a link is opened and come back when a frame is dropped, so that the
//! per-hop path allocates nothing.
use std::sync::{Arc, Mutex};

/// A set of equally large buffers.
#[derive(Clone)]
pub struct Pool {
    free: Arc<Mutex<Vec<Vec<u8>>>>,
    capacity_bytes: usize,
}

impl Pool {
    /// `count` buffers with room for `capacity_bytes` each.
    pub fn new(count: usize, capacity_bytes: usize) -> Self {
        let free = (0..count).map(|_| Vec::with_capacity(capacity_bytes)).collect();
        Self { free: Arc::new(Mutex::new(free)), capacity_bytes }
    }

    /// An empty buffer with room for the agreed size. Makes a new one when a receiver holds on to more frames than
    /// the link's credits allow for, which a peer cannot bring about.
    pub fn take(&self) -> PooledBuf {
        let mut free = self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let buf = free.pop().unwrap_or_else(|| Vec::with_capacity(self.capacity_bytes));
        PooledBuf { buf, home: Arc::clone(&self.free) }
    }
}

/// A buffer that goes back to its pool when dropped.
pub struct PooledBuf {
    buf: Vec<u8>,
    home: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl PooledBuf {
    /// What was written.
    pub fn bytes(&self) -> &[u8] {
        &self.buf
    }

    /// For the link that fills it.
    pub fn vec_mut(&mut self) -> &mut Vec<u8> {
        &mut self.buf
    }
}

impl Drop for PooledBuf {
    fn drop(&mut self) {
        let mut buf = std::mem::take(&mut self.buf);
        buf.clear();
        self.home.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(buf);
    }
}

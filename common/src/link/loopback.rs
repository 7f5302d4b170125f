//! Two ends in one process: the monolithic mode, and the link that tests of everything else use. A send copies the rows
//! once, into a buffer of the receiver's pool; nothing is encoded and no checksum is computed.
use std::sync::Arc;

use super::inbox::Inbox;
use super::pool::Pool;
use super::port::Port;
use super::{Body, Doorbell, HopLink, InFrame, Limits, LinkError, LinkStats};
use crate::frame::{FrameHeader, MAX_TEXT_BYTES};

/// One end of a pair.
pub struct LoopbackLink {
    port: Port,
    peer: Arc<Inbox>,
    peer_pool: Pool,
}

/// Two ends joined to each other. Their limits differ in nothing but `peer`; each rings its own bell.
pub fn pair(a: (Limits, Doorbell), b: (Limits, Doorbell)) -> (LoopbackLink, LoopbackLink) {
    let (a, b) = (Port::new(a.0, a.1), Port::new(b.0, b.1));
    let (to_a, to_b) = (Arc::clone(&a.inbox), Arc::clone(&b.inbox));
    let (pool_a, pool_b) = (receive_pool(&a), receive_pool(&b));
    (
        LoopbackLink { port: a, peer: to_b, peer_pool: pool_b },
        LoopbackLink { port: b, peer: to_a, peer_pool: pool_a },
    )
}

/// Room for every frame that can be on its way or in the hands of an engine that drops a dispatch before it answers it,
/// and for one that will be dropped.
pub(super) fn receive_pool(port: &Port) -> Pool {
    let bytes = port.limits.max_body_bytes.max(MAX_TEXT_BYTES) as usize;
    Pool::new(2 * port.limits.credits as usize + 1, bytes, Arc::clone(&port.inbox.stats))
}

impl HopLink for LoopbackLink {
    fn limits(&self) -> &Limits {
        &self.port.limits
    }

    fn send(&mut self, mut header: FrameHeader, body: &[&[u8]]) -> Result<(), LinkError> {
        self.port.check_send(&mut header, body)?;
        if self.peer.admits(&header) {
            let mut buf = self.peer_pool.take(header.body_bytes as usize);
            buf.copy_parts(body);
            self.peer.deliver(header, Body::Pooled(buf));
        }
        self.port.handle_sent(&header);
        Ok(())
    }

    fn poll_recv(&mut self) -> Result<Option<InFrame>, LinkError> {
        self.port.poll_recv()
    }

    fn close(&mut self, reason: &str) {
        self.port.inbox.end(self.port.inbox.closed(reason));
        self.peer.end(self.peer.closed(reason));
    }

    fn stats(&self) -> Arc<LinkStats> {
        Arc::clone(&self.port.inbox.stats)
    }
}

impl Drop for LoopbackLink {
    fn drop(&mut self) {
        self.close("the other end was dropped");
    }
}

#[cfg(test)]
mod tests {
    use super::super::contract::{self, Fixture, Side, Wire};
    use super::*;

    struct Loopback;

    impl Fixture for Loopback {
        fn pair(&self, a: Limits, b: Limits) -> (Side, Side) {
            let bells = (Doorbell::default(), Doorbell::default());
            let (left, right) = pair((a, bells.0.clone()), (b, bells.1.clone()));
            (Side::new(left, bells.0), Side::new(right, bells.1))
        }

        fn raw(&self, _: Limits) -> Option<(Side, Box<dyn Wire>)> {
            None
        }
    }

    contract::contract_tests!(Loopback);
}

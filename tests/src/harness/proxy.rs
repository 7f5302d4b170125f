//! A network that goes wrong when told to: a TCP proxy in front of an FFN rank, which passes control and links on and knows
//! the frames of links well enough to harm a single one.
//!
//! What is cut is held back, not lost, as TCP would hold it back: after the cut has healed it arrives, late.
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use afd_common::frame::HEADER_BYTES;
use afd_common::link::attach::MAGIC;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From attention.
    ToFfn,
    /// From the FFN.
    ToAttention,
}

/// What happens to one frame of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// One bit of its header is another.
    FlipHeader,
    /// One bit of its body is another.
    FlipBody,
    /// It arrives twice.
    Duplicate,
    /// Half of it arrives, then the connection ends.
    Truncate,
    /// It, and what is behind it, arrives later.
    Delay(Duration),
}

/// What all proxies of a deployment do to what passes them.
#[derive(Debug, Default)]
pub struct Network {
    to_ffn_cut: AtomicBool,
    to_attention_cut: AtomicBool,
    healed: Notify,
    harm: Mutex<VecDeque<(Way, Harm)>>,
    done: Notify,
}

impl Network {
    /// Nothing passes in these directions until [`heal`](Self::heal).
    pub fn cut(&self, ways: &[Way]) {
        for way in ways {
            self.flag(*way).store(true, SeqCst);
        }
    }

    /// Everything passes again.
    pub fn heal(&self) {
        self.to_ffn_cut.store(false, SeqCst);
        self.to_attention_cut.store(false, SeqCst);
        self.healed.notify_waiters();
    }

    /// The next frame with a body in this direction, on whichever link, is harmed. Returns once it has been.
    pub async fn harm(&self, way: Way, harm: Harm) {
        self.lock().push_back((way, harm));
        while !self.lock().is_empty() {
            let done = self.done.notified();
            if !self.lock().is_empty() {
                let _ = tokio::time::timeout(Duration::from_millis(50), done).await;
            }
        }
    }

    fn flag(&self, way: Way) -> &AtomicBool {
        match way {
            Way::ToFfn => &self.to_ffn_cut,
            Way::ToAttention => &self.to_attention_cut,
        }
    }

    async fn passable(&self, way: Way) {
        loop {
            let healed = self.healed.notified();
            if !self.flag(way).load(SeqCst) {
                return;
            }
            healed.await;
        }
    }

    fn take_harm(&self, way: Way) -> Option<Harm> {
        let mut waiting = self.lock();
        let harm = waiting.front().filter(|(of, _)| *of == way).map(|(_, harm)| *harm)?;
        waiting.pop_front();
        drop(waiting);
        self.done.notify_waiters();
        Some(harm)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<(Way, Harm)>> {
        self.harm.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// One proxy; ends when dropped.
pub(super) struct Proxy {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Proxy {
    /// In front of `target`.
    ///
    /// # Errors
    /// When there is no port.
    pub(super) async fn start(target: SocketAddr, network: Arc<Network>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                // A process that is not there refuses at once, as it would without a proxy.
                let Ok(far) = TcpStream::connect(target).await else { continue };
                let network = Arc::clone(&network);
                tokio::spawn(async move { pass(near, far, network).await });
            }
        });
        Ok(Self { address, task })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Until one side ends.
async fn pass(near: TcpStream, far: TcpStream, network: Arc<Network>) {
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let mut first = [0; MAGIC.len()];
    let is_link = matches!(near.peek(&mut first).await, Ok(count) if first[..count] == MAGIC);
    let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
    // Of a link the ticket, and the answer to it, come before the frames.
    let frames_after = |bytes: usize| if is_link { Some(bytes) } else { None };
    let there = Pump { way: Way::ToFfn, network: Arc::clone(&network), frames_after: frames_after(40) };
    let back = Pump { way: Way::ToAttention, network, frames_after: frames_after(8) };
    tokio::select! {
        _ = there.run(from_near, to_far) => {}
        _ = back.run(from_far, to_near) => {}
    }
}

/// One direction of a connection.
struct Pump {
    way: Way,
    network: Arc<Network>,
    /// `None`: not a link.
    frames_after: Option<usize>,
}

impl Pump {
    async fn run(self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
        if let Some(preamble) = self.frames_after {
            let mut bytes = vec![0; preamble];
            from.read_exact(&mut bytes).await?;
            self.network.passable(self.way).await;
            to.write_all(&bytes).await?;
            loop {
                self.frame(&mut from, &mut to).await?;
            }
        }
        let mut bytes = vec![0; 64 << 10];
        loop {
            let count = from.read(&mut bytes).await?;
            self.network.passable(self.way).await;
            if count == 0 {
                return to.shutdown().await;
            }
            to.write_all(&bytes[..count]).await?;
        }
    }

    async fn frame(&self, from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf) -> io::Result<()> {
        let mut frame = vec![0; HEADER_BYTES];
        from.read_exact(&mut frame).await?;
        // See the layout at the head of `common/src/frame/mod.rs`.
        let body_bytes = u32::from_le_bytes([frame[40], frame[41], frame[42], frame[43]]) as usize;
        frame.resize(HEADER_BYTES + body_bytes, 0);
        from.read_exact(&mut frame[HEADER_BYTES..]).await?;
        self.network.passable(self.way).await;
        let harm = if body_bytes > 0 { self.network.take_harm(self.way) } else { None };
        match harm {
            None => {}
            Some(Harm::FlipHeader) => frame[20] ^= 1,
            Some(Harm::FlipBody) => frame[HEADER_BYTES + body_bytes / 2] ^= 0x10,
            Some(Harm::Duplicate) => to.write_all(&frame).await?,
            Some(Harm::Truncate) => {
                to.write_all(&frame[..HEADER_BYTES + body_bytes / 2]).await?;
                to.flush().await?;
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            Some(Harm::Delay(time)) => tokio::time::sleep(time).await,
        }
        to.write_all(&frame).await
    }
}

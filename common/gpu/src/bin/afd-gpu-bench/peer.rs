//! The second process: this program again, on the second GPU, told over a socket which part to play.
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use afd_gpu::Device;
use afd_gpu::channel::contract::{Ends, Side};
use afd_gpu::channel::{DeviceChannel, Landing, NcclChannel, Offer, StepChannel, StepError, StepLimits};
use afd_gpu::nccl::UniqueId;

use crate::{Result, contract, hops, loss};

const PATIENCE: Duration = Duration::from_secs(60);

/// Messages between the two, each with its length ahead.
pub(crate) struct Wire(TcpStream);

impl Wire {
    fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(stream))
    }

    pub(crate) fn send(&mut self, message: &[u8]) -> Result<()> {
        self.0.write_all(&(message.len() as u32).to_le_bytes())?;
        Ok(self.0.write_all(message)?)
    }

    pub(crate) fn receive(&mut self) -> Result<Vec<u8>> {
        let mut len = [0; 4];
        self.0.read_exact(&mut len)?;
        let mut message = vec![0; u32::from_le_bytes(len).min(1 << 20) as usize];
        self.0.read_exact(&mut message)?;
        Ok(message)
    }

    /// Returns when both are here.
    pub(crate) fn meet(&mut self) -> Result<()> {
        self.send(b"here")?;
        match self.receive()?.as_slice() {
            b"here" => Ok(()),
            other => Err(format!("the peer says {}", String::from_utf8_lossy(other)).into()),
        }
    }
}

/// The other process; killed when dropped.
pub(crate) struct Peer {
    child: Child,
    pub(crate) wire: Wire,
}

impl Peer {
    /// Starts it on a GPU with `part` to play.
    pub(crate) fn start_on(part: &str, gpu: usize) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let mut child = Command::new(std::env::current_exe()?)
            .args(["peer", &port.to_string()])
            .env("CUDA_VISIBLE_DEVICES", gpu.to_string())
            .spawn()?;
        listener.set_nonblocking(true)?;
        let begin = Instant::now();
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock && begin.elapsed() < PATIENCE => {
                    if let Some(status) = child.try_wait()? {
                        return Err(format!("the peer ended with {status}").into());
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(e) => {
                    let _ = child.kill();
                    return Err(e.into());
                }
            }
        };
        stream.set_nonblocking(false)?;
        let mut peer = Self { child, wire: Wire::new(stream)? };
        peer.wire.send(part.as_bytes())?;
        Ok(peer)
    }

    /// SIGKILL, and waits until the system has buried it.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The second process's whole life.
pub(crate) fn serve(port: u16) -> Result<()> {
    let mut wire = Wire::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?)?;
    let part = String::from_utf8(wire.receive()?)?;
    let device = Device::open(0)?;
    let played = match part.split_once(' ').unwrap_or((&part, "")) {
        ("contract", kind) => contract::play(&device, Side::Ffn, kind, &mut wire),
        ("hops", _) => hops::play(&device, Side::Ffn, &mut wire).map(drop),
        ("loss", case) => loss::play(&device, case, &mut wire),
        _ => Err(format!("no part {part}").into()),
    };
    if let Err(e) = &played {
        // The other end is at one of its meetings, and reads this there.
        let _ = wire.send(e.to_string().as_bytes());
    }
    let _ = wire.receive(); // the other end ends first
    played
}

/// Opens channels of a kind, one after the other, at both ends.
pub(crate) struct Opener<'a> {
    pub(crate) device: &'a Device,
    pub(crate) side: Side,
    pub(crate) kind: &'a str,
    pub(crate) limits: StepLimits,
    pub(crate) wire: &'a mut Wire,
}

impl Opener<'_> {
    pub(crate) fn ipc(&mut self) -> Result<DeviceChannel> {
        let side = if self.side == Side::Attention { 1 } else { 2 };
        let landing = Landing::new(self.device, self.limits, [side; 16])?;
        let own = landing.offer()?;
        self.wire.send(&own.handle)?;
        let handle: [u8; 64] = self.wire.receive()?.try_into().map_err(|_| "not a handle")?;
        let channel = DeviceChannel::connect(landing, &Offer { handle, nonce: [3 - side; 16], ..own })?;
        self.wire.meet()?;
        Ok(channel)
    }

    /// Both ends' ids: from the attention side, to it.
    pub(crate) fn ids(&mut self) -> Result<[UniqueId; 2]> {
        if self.side == Side::Attention {
            let ids = [UniqueId::new()?, UniqueId::new()?];
            self.wire.send(&[ids[0].0, ids[1].0].concat())?;
            return Ok(ids);
        }
        let both = self.wire.receive()?;
        let id = |at: usize| both.get(at..at + 128).and_then(|b| b.try_into().ok()).map(UniqueId);
        Ok([id(0).ok_or("not an id")?, id(128).ok_or("not an id")?])
    }

    pub(crate) fn nccl(&mut self, stream: &afd_gpu::Stream) -> Result<NcclChannel> {
        let ids = self.ids()?;
        let first = self.side == Side::Attention;
        Ok(NcclChannel::join(self.device, stream, self.limits, first, ids, Duration::from_secs(30))?)
    }
}

impl Ends for Opener<'_> {
    fn open(&mut self, stream: &afd_gpu::Stream) -> std::result::Result<Box<dyn StepChannel>, StepError> {
        let opened: Result<Box<dyn StepChannel>> = match self.kind {
            "cuda-ipc" => self.ipc().map(|c| Box::new(c) as Box<dyn StepChannel>),
            _ => self.nccl(stream).map(|c| Box::new(c) as Box<dyn StepChannel>),
        };
        opened.map_err(|e| StepError::Lost(e.to_string()))
    }

    fn meet(&mut self) -> std::result::Result<(), String> {
        self.wire.meet().map_err(|e| e.to_string())
    }
}

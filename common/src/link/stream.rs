//! A connection that carries a link: in the clear, or under the TLS of the port it came through.
//!
//! Clones share the connection. One thread may read while another writes: what waits for the socket holds no lock that the
//! other direction needs. Under TLS a write is [sealed](LinkStream::seal) first and then written like any other bytes, so that
//! whoever writes without blocking goes on doing so; records are allocated there, which in the clear nothing is.
use std::io::{self, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard};

use afd_ffi::socket::recv_now;
use rustls::Connection;

/// What one read takes from the socket: a whole record of TLS.
const READ_BYTES: usize = 18 << 10;

/// See the module's head.
#[derive(Clone)]
pub struct LinkStream {
    stream: Arc<TcpStream>,
    tls: Option<Arc<Tls>>,
}

struct Tls {
    session: Mutex<Connection>,
    /// Read and not opened yet. Held while the socket is waited for.
    arrived: Mutex<Arrived>,
}

struct Arrived {
    bytes: Box<[u8]>,
    at: usize,
    end: usize,
}

impl From<TcpStream> for LinkStream {
    fn from(stream: TcpStream) -> Self {
        Self { stream: Arc::new(stream), tls: None }
    }
}

impl LinkStream {
    /// After the handshake of `session`, which may hold bytes that came with it.
    pub fn under_tls(stream: TcpStream, session: impl Into<Connection>) -> Self {
        let arrived = Arrived { bytes: vec![0; READ_BYTES].into(), at: 0, end: 0 };
        let tls = Tls { session: Mutex::new(session.into()), arrived: Mutex::new(arrived) };
        Self { stream: Arc::new(stream), tls: Some(Arc::new(tls)) }
    }

    /// The socket, for its options, its end, and for bytes that are sealed already.
    pub fn socket(&self) -> &Arc<TcpStream> {
        &self.stream
    }

    /// Reads without ever blocking: `WouldBlock` where nothing whole is there.
    pub(super) fn now(&self) -> Now<'_> {
        Now(self)
    }

    /// Whether what is written must be sealed.
    pub fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Appends to `out` what has to be written in place of `parts`. What was sealed first must be written first.
    ///
    /// # Errors
    /// TLS has ended.
    pub fn seal(&self, parts: &[&[u8]], out: &mut Vec<u8>) -> io::Result<()> {
        let Some(tls) = &self.tls else {
            parts.iter().for_each(|part| out.extend_from_slice(part));
            return Ok(());
        };
        let mut session = lock(&tls.session);
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                // Takes up to a limit, which draining lifts again.
                let taken = session.writer().write(rest)?;
                rest = &rest[taken..];
                while session.wants_write() {
                    session.write_tls(out)?;
                }
            }
        }
        Ok(())
    }
}

impl Tls {
    fn read(&self, mut socket: impl Read, buf: &mut [u8]) -> io::Result<usize> {
        let mut arrived = lock(&self.arrived);
        loop {
            let mut session = lock(&self.session);
            match session.reader().read(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Frames have lengths and checksums of their own: an end without a farewell is an end.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                read => return read,
            }
            if arrived.at == arrived.end {
                drop(session);
                let read = socket.read(&mut arrived.bytes)?;
                (arrived.at, arrived.end) = (0, read);
                session = lock(&self.session);
                if read == 0 {
                    session.read_tls(&mut io::empty())?;
                }
            }
            let mut rest = &arrived.bytes[arrived.at..arrived.end];
            let before = rest.len();
            if before > 0 {
                session.read_tls(&mut rest)?;
            }
            let taken = before - rest.len();
            arrived.at += taken;
            session
                .process_new_packets()
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Blocks as the socket does.
impl Read for &LinkStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match &self.tls {
            None => (&*self.stream).read(buf),
            Some(tls) => tls.read(&*self.stream, buf),
        }
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &self.tls {
            None => (&*self.stream).read_vectored(bufs),
            Some(tls) => read_first(bufs, |buf| tls.read(&*self.stream, buf)),
        }
    }
}

/// See [`LinkStream::now`].
pub(super) struct Now<'a>(&'a LinkStream);

/// The bare socket, never waited for.
struct SocketNow<'a>(&'a TcpStream);

impl Read for Now<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(buf)])
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &self.0.tls {
            None => recv_now(&*self.0.stream, bufs),
            Some(tls) => read_first(bufs, |buf| tls.read(SocketNow(&self.0.stream), buf)),
        }
    }
}

impl Read for SocketNow<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        recv_now(self.0, &mut [IoSliceMut::new(buf)])
    }
}

/// Fills the first place that has room: what is opened of TLS is copied anyway.
fn read_first(
    bufs: &mut [IoSliceMut<'_>],
    read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
) -> io::Result<usize> {
    bufs.iter_mut().find(|buf| !buf.is_empty()).map_or(Ok(0), |buf| read(buf))
}

/// Blocks as the socket does: for handshakes, where one thread does both.
impl Write for &LinkStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if !self.is_tls() {
            return (&*self.stream).write(buf);
        }
        let mut sealed = Vec::new();
        self.seal(&[buf], &mut sealed)?;
        (&*self.stream).write_all(&sealed)?;
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

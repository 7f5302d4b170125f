//! A connection that carries a link: in the clear, or under the TLS of the port it came through.
//!
//! Clones share the connection. One thread may read while another writes: what waits for the socket holds no lock that the
//! other direction needs. Under TLS a write is [sealed](LinkStream::seal) first and then written like any other bytes, so that
//! whoever writes without blocking goes on doing so; records are allocated there, which in the clear nothing is.
use std::io::{self, Read, Write};
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
    ///
    /// In the clear, a read that finds less than it has room for leaves the socket empty, and is remembered in `is_dry`: the
    /// next one is answered without asking the system. What came since then is found by the read after it, or by whoever sleeps
    /// until the socket can be read.
    pub(super) fn now<'a>(&'a self, is_dry: &'a mut bool) -> Now<'a> {
        Now { stream: self, is_dry }
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
}

/// See [`LinkStream::now`].
pub(super) struct Now<'a> {
    stream: &'a LinkStream,
    is_dry: &'a mut bool,
}

/// The bare socket, never waited for.
struct SocketNow<'a>(&'a TcpStream);

impl Read for Now<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let socket = &self.stream.stream;
        if let Some(tls) = &self.stream.tls {
            return tls.read(SocketNow(socket), buf);
        }
        if std::mem::take(self.is_dry) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let read = recv_now(&**socket, buf)?;
        *self.is_dry = read < buf.len();
        Ok(read)
    }
}

impl Read for SocketNow<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        recv_now(self.0, buf)
    }
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn an_empty_socket_is_not_asked_again_at_once_and_nothing_is_missed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, mut is_dry) = (LinkStream::from(listener.accept().unwrap().0), false);
        let waits = |error: io::Error| assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let look = |room: usize, is_dry: &mut bool| {
            let mut buf = [0; 8];
            near.now(is_dry).read(&mut buf[..room]).map(|read| buf[..read].to_vec())
        };
        waits(look(8, &mut is_dry).unwrap_err());
        far.write_all(b"abcde").unwrap();
        // Until they have come.
        near.socket().peek(&mut [0]).unwrap();
        assert_eq!(look(3, &mut is_dry).unwrap(), b"abc");
        assert_eq!(
            (look(3, &mut is_dry).unwrap(), is_dry),
            (b"de".to_vec(), true),
            "there may be more after a full read"
        );
        far.write_all(b"f").unwrap();
        near.socket().peek(&mut [0]).unwrap();
        waits(look(3, &mut is_dry).unwrap_err());
        assert_eq!(look(3, &mut is_dry).unwrap(), b"f");
    }
}

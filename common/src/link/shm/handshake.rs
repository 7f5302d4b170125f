//! How two processes find out that they share memory, on the connection that has just shown its ticket.
//!
//! ```text
//! dialed side   the 8 bytes of an accepted ticket, or Refusal::NotShared when nothing can be allocated
//!               name of the segment, ASCII, padded with zeros   48 B
//! dialer        0  code  u32: 0 opened, 1 not      4  reserved, zero  4 B      8  nonce found in it  16 B
//! dialed side   8 bytes as above: the nonce was right, or Refusal::NotShared
//! ```
//! The name is removed before the last answer, whatever it says: nothing stays behind in `/dev/shm` when a process dies
//! later.
use std::path::{Path, PathBuf};

use afd_ffi::shm::{Nonce, Segment, Shape};
use rand::RngCore;

use crate::link::grants::Refusal;
use crate::link::socket::{AttachError, Socket, answer_bytes};

/// Where shared memory lies. Containers have one of their own unless they are told to share it.
const FOLDER: &str = "/dev/shm";
const NAME_BYTES: usize = 48;
const OPENED: u32 = 0;
const NOT_OPENED: u32 = 1;

/// Removes the name when dropped.
struct Name(PathBuf);

impl Drop for Name {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(super) fn offer(mut socket: Socket, shape: Option<Shape>) -> Result<(Segment, Socket), AttachError> {
    let mut rng = rand::rng();
    let mut nonce = Nonce::default();
    rng.fill_bytes(&mut nonce);
    let name = format!("afd-{:016x}{:016x}", rng.next_u64(), rng.next_u64());
    let path = Name(Path::new(FOLDER).join(&name));
    let made = match shape {
        Some(shape) => Segment::create(&path.0, shape, &nonce).map_err(|error| error.to_string()),
        None => Err("the frames that were agreed are too large".into()),
    };
    let segment = match made {
        Ok(segment) => segment,
        Err(what) => {
            socket.refuse(Refusal::NotShared);
            return Err(AttachError::NotShared { peer: socket.peer, what });
        }
    };
    let mut padded = [0; NAME_BYTES];
    padded[..name.len()].copy_from_slice(name.as_bytes());
    socket.write(&[&answer_bytes(0)[..], &padded].concat())?;
    let found: [u8; 24] = socket.read()?;
    drop(path);
    if found[..8] != reply_head(OPENED) || found[8..] != nonce {
        socket.refuse(Refusal::NotShared);
        let what = "it did not find the segment: it runs on another host or in another container".into();
        return Err(AttachError::NotShared { peer: socket.peer, what });
    }
    socket.write(&answer_bytes(0))?;
    Ok((segment, socket))
}

pub(super) fn join(mut socket: Socket, shape: Option<Shape>) -> Result<(Segment, Socket), AttachError> {
    let padded: [u8; NAME_BYTES] = socket.read()?;
    let name = checked_name(&padded)
        .ok_or_else(|| socket.protocol("offered a segment with a name that cannot be one".into()))?;
    let opened = match shape {
        Some(shape) => Segment::open(&Path::new(FOLDER).join(name), shape).map_err(|error| error.to_string()),
        None => Err("the frames that were agreed are too large".into()),
    };
    match opened {
        Ok(segment) => {
            socket.write(&[&reply_head(OPENED)[..], &segment.nonce()].concat())?;
            match socket.read_answer() {
                Err(AttachError::Refused { peer, refusal: Refusal::NotShared }) => {
                    let what = "it has another segment of the same name".into();
                    Err(AttachError::NotShared { peer, what })
                }
                answered => answered.map(|()| (segment, socket)),
            }
        }
        Err(what) => {
            socket.write(&[&reply_head(NOT_OPENED)[..], &Nonce::default()].concat())?;
            Err(AttachError::NotShared { peer: socket.peer, what })
        }
    }
}

fn reply_head(code: u32) -> [u8; 8] {
    u64::from(code).to_le_bytes()
}

/// A name that stays within the folder.
fn checked_name(padded: &[u8; NAME_BYTES]) -> Option<&str> {
    let len = padded.iter().position(|byte| *byte == 0)?;
    let name = std::str::from_utf8(&padded[..len]).ok()?;
    let fits =
        name.starts_with("afd-") && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    fits.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let padded = |name: &str| {
            let mut out = [0; NAME_BYTES];
            out[..name.len()].copy_from_slice(name.as_bytes());
            out
        };
        assert_eq!(checked_name(&padded("afd-0123abcd")), Some("afd-0123abcd"));
        for wrong in ["", "other", "afd-/../x", "afd-../x", "afd-\u{e9}"] {
            assert_eq!(checked_name(&padded(wrong)), None, "{wrong:?}");
        }
        assert_eq!(checked_name(&[b'a'; NAME_BYTES]), None);
    }
}

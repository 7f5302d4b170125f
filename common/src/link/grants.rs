//! Links that an FFN rank has granted and nobody has attached to yet. Pure: time and randomness are passed in.
//!
//! `OpenLinks` grants, a connection attaches. What attaches names the link and shows the grant's secret; that works
//! once, and only for a while. `T` is whatever the session wants back with the attachment.
use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use rand::CryptoRng;
use subtle::ConstantTimeEq;

use super::{Limits, LinkKind};
use crate::frame::Checksum;
use crate::ids::Epoch;

/// Names a link within the FFN process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

impl fmt::Display for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "link {}", self.0)
    }
}

/// Proves, once, the right to attach. Compared in constant time; never shown.
#[derive(Clone)]
pub struct Secret([u8; Self::BYTES]);

impl Secret {
    /// Size of a secret.
    pub const BYTES: usize = 16;

    /// As it came over the control plane; `None` unless it has [`BYTES`](Self::BYTES) bytes.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// For the control plane and the attach preamble, and nothing else.
    pub fn expose(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl From<[u8; Secret::BYTES]> for Secret {
    fn from(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What the dialing end needs to attach: part of the grant that travels.
#[derive(Clone, Debug)]
pub struct Ticket {
    /// Which link.
    pub link_id: LinkId,
    /// Works once.
    pub secret: Secret,
}

/// Why an attachment was refused. The number travels in the answer to a preamble.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u32)]
pub enum Refusal {
    /// No such link, used before, expired, or another secret: which of them is nobody's business.
    #[error("no link is granted under this id and secret (used, expired or never granted)")]
    Unknown = 1,
    /// Granted, but as another kind of link.
    #[error("the link was granted as another kind")]
    WrongKind = 2,
    /// The FFN rank is draining or its session ended.
    #[error("the FFN rank is not accepting links")]
    Unavailable = 3,
    /// Shared memory: it cannot be allocated, or the two processes do not see the same.
    #[error("no memory can be shared with this process")]
    NotShared = 4,
}

impl Refusal {
    /// From an answer; a number this version does not know reads as [`Unavailable`](Self::Unavailable).
    pub fn from_wire(code: u32) -> Self {
        [Self::Unknown, Self::WrongKind, Self::NotShared]
            .into_iter()
            .find(|known| *known as u32 == code)
            .unwrap_or(Self::Unavailable)
    }
}

/// What is granted; its epoch is minted by [`Grants::grant`].
#[derive(Clone, Debug)]
pub struct GrantSpec {
    /// Which implementation may attach.
    pub kind: LinkKind,
    /// Who will attach, for messages: "A0".
    pub peer: String,
    /// Dispatches in flight per direction.
    pub credits: u32,
    /// Most rows of a frame.
    pub max_rows: u32,
    /// Most bytes of a frame's body.
    pub max_body_bytes: u32,
    /// How bodies are summed.
    pub checksum: Checksum,
}

/// A grant: the ticket for the peer, and what both ends will hold to.
#[derive(Clone, Debug)]
pub struct Grant {
    /// For the peer.
    pub ticket: Ticket,
    /// Of the FFN's end.
    pub limits: Limits,
}

/// There are as many unattached links as may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{limit} links are waiting for somebody to attach, which is the limit")]
pub struct TooManyGrants {
    /// The limit.
    pub limit: usize,
}

/// All links granted by a process and not attached, of all its sessions.
pub struct Grants<T> {
    waiting: HashMap<LinkId, Waiting<T>>,
    max_waiting: usize,
    attach_timeout: Duration,
    next_id: u64,
    next_epoch: u64,
}

struct Waiting<T> {
    secret: Secret,
    limits: Limits,
    expires_at: Instant,
    session: T,
}

impl<T> Grants<T> {
    /// Nothing granted. Epochs count up from `first_epoch`, which must differ from run to run (nanoseconds at start), so
    /// that a frame of an earlier life of the process never matches.
    pub fn new(first_epoch: Epoch, attach_timeout: Duration, max_waiting: usize) -> Self {
        Self { waiting: HashMap::new(), max_waiting, attach_timeout, next_id: 1, next_epoch: first_epoch.0 }
    }

    /// How long a grant waits for its attachment.
    pub fn attach_timeout(&self) -> Duration {
        self.attach_timeout
    }

    /// Links nobody attached to yet.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Those of them that somebody has not attached to, as `is_own` says.
    pub fn num_waiting_of(&self, is_own: impl Fn(&T) -> bool) -> usize {
        self.waiting.values().filter(|waiting| is_own(&waiting.session)).count()
    }

    /// The epoch of a link that is up as soon as it is granted: it waits for nobody to attach.
    pub fn mint_epoch(&mut self) -> Epoch {
        let epoch = Epoch(self.next_epoch);
        self.next_epoch = self.next_epoch.wrapping_add(1);
        epoch
    }

    /// Grants a link to `session`.
    ///
    /// # Errors
    /// [`TooManyGrants`]; retrying helps once others attached or expired.
    pub fn grant(
        &mut self,
        spec: GrantSpec,
        session: T,
        now: Instant,
        rng: &mut impl CryptoRng,
    ) -> Result<Grant, TooManyGrants> {
        self.handle_time(now);
        if self.waiting.len() >= self.max_waiting {
            return Err(TooManyGrants { limit: self.max_waiting });
        }
        let mut secret = [0; Secret::BYTES];
        rng.fill_bytes(&mut secret);
        let ticket = Ticket { link_id: LinkId(self.next_id), secret: Secret(secret) };
        let limits = Limits {
            kind: spec.kind,
            peer: spec.peer,
            epoch: self.mint_epoch(),
            credits: spec.credits,
            max_rows: spec.max_rows,
            max_body_bytes: spec.max_body_bytes,
            checksum: spec.checksum,
        };
        self.next_id += 1;
        let (secret, limits_here) = (ticket.secret.clone(), limits.clone());
        let expires_at = now + self.attach_timeout;
        self.waiting.insert(ticket.link_id, Waiting { secret, limits: limits_here, expires_at, session });
        Ok(Grant { ticket, limits })
    }

    /// Uses a grant up.
    ///
    /// # Errors
    /// [`Refusal`]. A wrong secret, or a grant of none of `kinds`, leaves the grant to whom it belongs.
    pub fn attach(
        &mut self,
        ticket: &Ticket,
        kinds: &[LinkKind],
        now: Instant,
    ) -> Result<(Limits, T), Refusal> {
        self.handle_time(now);
        let waiting = self.waiting.get(&ticket.link_id).ok_or(Refusal::Unknown)?;
        if !bool::from(waiting.secret.0.ct_eq(&ticket.secret.0)) {
            return Err(Refusal::Unknown);
        }
        if !kinds.contains(&waiting.limits.kind) {
            return Err(Refusal::WrongKind);
        }
        let granted = self.waiting.remove(&ticket.link_id).ok_or(Refusal::Unknown)?;
        Ok((granted.limits, granted.session))
    }

    /// Takes back what the session's end leaves behind: every grant for which `ended` says so.
    pub fn revoke(&mut self, mut ended: impl FnMut(&T) -> bool) {
        self.waiting.retain(|_, waiting| !ended(&waiting.session));
    }

    /// Forgets what expired.
    pub fn handle_time(&mut self, now: Instant) {
        self.waiting.retain(|_, waiting| now < waiting.expires_at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    const TIMEOUT: Duration = Duration::from_secs(5);

    fn spec(kind: LinkKind) -> GrantSpec {
        let checksum = Checksum::Sum64;
        GrantSpec { kind, peer: "A0".into(), credits: 2, max_rows: 8, max_body_bytes: 512, checksum }
    }

    fn grants() -> (Grants<&'static str>, rand_chacha::ChaCha12Rng, Instant) {
        (Grants::new(Epoch(100), TIMEOUT, 3), SeedableRng::seed_from_u64(7), Instant::now())
    }

    #[test]
    fn a_grant_works_once_for_who_has_the_secret() {
        let (mut grants, mut rng, now) = grants();
        let first = grants.grant(spec(LinkKind::Tcp), "s1", now, &mut rng).unwrap();
        let second = grants.grant(spec(LinkKind::Tcp), "s2", now, &mut rng).unwrap();
        assert_eq!((first.limits.epoch, second.limits.epoch), (Epoch(100), Epoch(101)));
        let stolen = Ticket { link_id: first.ticket.link_id, secret: second.ticket.secret.clone() };
        assert_eq!(grants.attach(&stolen, &[LinkKind::Tcp], now).unwrap_err(), Refusal::Unknown);
        assert_eq!(
            grants.attach(&first.ticket, &[LinkKind::Inline, LinkKind::Shm], now).unwrap_err(),
            Refusal::WrongKind
        );
        let (limits, session) = grants.attach(&first.ticket, &[LinkKind::Tcp], now).unwrap();
        assert_eq!((limits, session), (first.limits, "s1"));
        assert_eq!(grants.attach(&first.ticket, &[LinkKind::Tcp], now).unwrap_err(), Refusal::Unknown);
        assert_eq!(grants.attach(&second.ticket, &[LinkKind::Tcp], now).unwrap().1, "s2");
    }

    #[test]
    fn a_grant_expires_and_is_revoked_with_its_session() {
        let (mut grants, mut rng, now) = grants();
        let grant = grants.grant(spec(LinkKind::Tcp), "s1", now, &mut rng).unwrap();
        assert_eq!(
            grants.attach(&grant.ticket, &[LinkKind::Tcp], now + TIMEOUT).unwrap_err(),
            Refusal::Unknown
        );
        let grant = grants.grant(spec(LinkKind::Tcp), "s2", now, &mut rng).unwrap();
        grants.revoke(|session| *session == "s2");
        assert_eq!(grants.attach(&grant.ticket, &[LinkKind::Tcp], now).unwrap_err(), Refusal::Unknown);
        assert_eq!(grants.num_waiting(), 0);
    }

    #[test]
    fn there_is_a_limit_that_expiry_lifts() {
        let (mut grants, mut rng, now) = grants();
        for _ in 0..3 {
            grants.grant(spec(LinkKind::Tcp), "s", now, &mut rng).unwrap();
        }
        let refused = grants.grant(spec(LinkKind::Tcp), "s", now, &mut rng).unwrap_err();
        assert_eq!(refused, TooManyGrants { limit: 3 });
        assert!(grants.grant(spec(LinkKind::Tcp), "s", now + TIMEOUT, &mut rng).is_ok());
    }

    #[test]
    fn a_secret_is_never_shown() {
        let (mut grants, mut rng, now) = grants();
        let grant = grants.grant(spec(LinkKind::Tcp), "s", now, &mut rng).unwrap();
        assert!(format!("{grant:?}").contains("Secret(..)"));
        assert_eq!(Secret::from_slice(&[0; 15]).map(|_| ()), None);
    }
}

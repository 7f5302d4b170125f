//! Links of a session: granted over the control plane, attached over their own transport, given to the engine.
use std::sync::Arc;
use std::time::Instant;

use afd_common::link::grants::{Grant, GrantSpec, Refusal as AttachRefusal, Ticket};
use afd_common::link::{Doorbell, HopLink, Limits, LinkKind, features};
use afd_common::proto::v1;
use afd_common::spelling;
use tonic::{Code, Status};

use super::sessions::{MAX_WAITING_LINKS, Session, Sessions};
use super::status::detailed;

/// Most links of one call, and of a session that wait to be attached: one that never attaches leaves room for others.
const MAX_LINKS_AT_ONCE: usize = 16;
/// Most dispatches in flight on a link.
const MAX_CREDITS: u32 = 4;

impl Sessions {
    /// Grants host-driven links to a session, all or none.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field; `RESOURCE_EXHAUSTED` when too many links wait to be attached.
    pub fn open_links(
        &self,
        session: &Arc<Session>,
        wanted: &[v1::LinkRequest],
    ) -> Result<Vec<v1::LinkGrant>, Status> {
        if wanted.is_empty() || wanted.len() > MAX_LINKS_AT_ONCE {
            return Err(invalid(
                "links",
                format!("{} entries; expected 1 to {MAX_LINKS_AT_ONCE}", wanted.len()),
            ));
        }
        let specs =
            wanted.iter().map(|link| self.grant_spec(session, link)).collect::<Result<Vec<_>, _>>()?;
        let (now, mut rng) = (Instant::now(), rand::rng());
        let mut grants = self.lock_grants();
        let attach_timeout_ms = grants.attach_timeout().as_millis() as u32;
        grants.handle_time(now);
        let own = grants.num_waiting_of(|owner| owner.id == session.id);
        if own + specs.len() > MAX_LINKS_AT_ONCE {
            let message = format!(
                "{own} links of this session wait for it to attach, and {} more are asked for: {MAX_LINKS_AT_ONCE} is the \
                 limit of a session",
                specs.len()
            );
            return Err(detailed(Code::ResourceExhausted, message, "LINKS_FULL", Vec::new()));
        }
        if grants.num_waiting() + specs.len() > MAX_WAITING_LINKS {
            let message =
                format!("{MAX_WAITING_LINKS} links wait for somebody to attach, which is the limit");
            return Err(detailed(Code::ResourceExhausted, message, "LINKS_FULL", Vec::new()));
        }
        specs
            .into_iter()
            .map(|(wire_kind, spec)| {
                let Grant { ticket, limits } = grants
                    .grant(spec, Arc::clone(session), now, &mut rng)
                    .map_err(|full| Status::resource_exhausted(full.to_string()))?;
                Ok(v1::LinkGrant {
                    kind: wire_kind.into(),
                    link_id: ticket.link_id.0,
                    epoch: limits.epoch.0,
                    secret: ticket.secret.expose().to_vec(),
                    credits: limits.credits,
                    max_rows: limits.max_rows,
                    attach_timeout_ms,
                    cuda_ipc: None,
                    nccl: None,
                })
            })
            .collect()
    }

    fn grant_spec(
        &self,
        session: &Session,
        link: &v1::LinkRequest,
    ) -> Result<(v1::LinkKind, GrantSpec), Status> {
        let wire_kind = link.kind();
        let kind = link_kind(wire_kind).filter(|_| session.agreement.link_kinds.contains(&wire_kind));
        let kind = kind.ok_or_else(|| not_agreed(session, link.kind))?;
        check_sizes(session, link)?;
        let max_body_bytes = Limits::body_bytes(link.max_rows, self.engine().spec().max_row_bytes())
            .ok_or_else(|| invalid("links.max_rows", format!("{} rows do not fit a frame", link.max_rows)))?;
        let v1::LinkRequest { credits, max_rows, .. } = *link;
        let checksum = features::checksum(kind, &session.agreement.features);
        let peer = session.place.to_string();
        Ok((wire_kind, GrantSpec { kind, peer, credits, max_rows, max_body_bytes, checksum }))
    }

    /// Uses up a grant: what was agreed, the engine's bell, and whose link it is. For the link's own handshake.
    ///
    /// # Errors
    /// [`AttachRefusal`], which says no more than it must.
    pub fn attach(
        &self,
        ticket: &Ticket,
        kinds: &[LinkKind],
    ) -> Result<(Limits, Doorbell, Arc<Session>), AttachRefusal> {
        let (limits, session) = self.lock_grants().attach(ticket, kinds, Instant::now())?;
        if session.end().is_some() || !self.engine().is_alive() {
            return Err(AttachRefusal::Unavailable);
        }
        Ok((limits, self.engine().bell(), session))
    }

    /// Gives an attached link to the engine.
    pub fn adopt(&self, link: Box<dyn HopLink>, session: &Session) {
        self.engine().adopt_for(link, Arc::clone(&session.accounts), session.tag, session.place.rank);
        // The session may have ended between attaching and adopting: the engine heard of that before it had the link.
        if let Some(why) = session.end() {
            self.engine().close_session(session.tag, why);
        }
    }
}

/// The kinds that go over a network or a host, as this process knows them. Loopback never leaves a process.
fn link_kind(kind: v1::LinkKind) -> Option<LinkKind> {
    match kind {
        v1::LinkKind::Tcp => Some(LinkKind::Tcp),
        v1::LinkKind::Inline => Some(LinkKind::Inline),
        v1::LinkKind::Shm => Some(LinkKind::Shm),
        _ => None,
    }
}

pub(super) fn not_agreed(session: &Session, kind: i32) -> Status {
    let agreed = spelling::links(session.agreement.link_kinds.iter().copied());
    invalid("links.kind", format!("{}; agreed were {agreed}", spelling::link(kind)))
}

pub(super) fn check_sizes(session: &Session, link: &v1::LinkRequest) -> Result<(), Status> {
    if link.credits == 0 || link.credits > MAX_CREDITS {
        return Err(invalid("links.credits", format!("{}; expected 1 to {MAX_CREDITS}", link.credits)));
    }
    let most = session.agreement.max_tokens_per_stage;
    if link.max_rows == 0 || link.max_rows > most {
        return Err(invalid("links.max_rows", format!("{}; agreed were 1 to {most}", link.max_rows)));
    }
    Ok(())
}

pub(super) fn invalid(field: &str, what: String) -> Status {
    detailed(
        Code::InvalidArgument,
        format!("`{field}`: {what}"),
        "LINKS_INVALID",
        vec![("field", field.into())],
    )
}

//! From an address to a rank with an open link: connect, join, agree on the shard, register a link and attach to it.
//! Every phase has its deadline, and every failure says which phase it was.
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use afd_common::ids::{Epoch, Shard};
use afd_common::link::attach::{self, AttachError};
use afd_common::link::grants::{LinkId, Secret, Ticket};
use afd_common::link::{HopLink, Limits, LinkKind, features, inline};
use afd_common::net::client::{self, NotConnected};
use afd_common::net::tls::PeerTls;
use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_common::proto::{PROTOCOL_MAJOR, PROTOCOL_MINOR};
use afd_common::spelling::{count, links};
use tonic::transport::Channel;

use super::session::{SessionError, Shared, late, wire_kind, within};
use super::stream_edge::StreamLink;
use super::stream_joining::{self, NotOpened};

/// Where a rank is, and how it proves who it is: in the clear it does not.
#[derive(Clone, Debug)]
pub(super) struct Target {
    address: SocketAddr,
    tls: Option<PeerTls>,
}

impl Target {
    /// `host` is what `--ffn` calls the address: its certificate must be for that.
    pub(super) fn new(address: SocketAddr, host: &str, shared: &Shared) -> Result<Self, SessionError> {
        let tls = shared.settings.tls.as_ref().map(|tls| tls.peer(host)).transpose();
        let tls = tls.map_err(|error| SessionError::Refused(format!("TLS: {error} (--ffn)")))?;
        Ok(Self { address, tls })
    }

    /// A connection to whatever listens there.
    pub(super) async fn connect(&self, peer: &str, limit: Duration) -> Result<Channel, SessionError> {
        let connected = client::connect(&self.address.to_string(), self.tls.as_ref(), limit).await;
        connected.map_err(|error| match error {
            NotConnected::Unreachable(what) => SessionError::Away(format!("connecting: {what}")),
            NotConnected::Late(_) => SessionError::Away(late(peer, "connecting", limit)),
            NotConnected::Silent(_) => {
                let late = late(peer, "connecting", limit);
                SessionError::Broken(format!("{late}: it listens; it may be loading, or stopped"))
            }
            NotConnected::WantsTls(what) => {
                SessionError::Refused(format!("connecting: {what} (--ffn-tls-ca)"))
            }
            there => SessionError::broken("connecting", there),
        })
    }
}

pub(super) async fn join(
    client: &mut FfnControlServiceClient<Channel>,
    peer: &str,
    shared: &Shared,
) -> Result<v1::JoinResponse, SessionError> {
    let settings = &shared.settings;
    let request = v1::JoinRequest {
        protocol_major: PROTOCOL_MAJOR,
        protocol_minor: PROTOCOL_MINOR,
        identity: Some(settings.identity.clone()),
        model: Some(settings.model.clone()),
        shard_count: shared.shard_count.load(Ordering::Acquire),
        link_kinds: settings.link_kinds.iter().map(|kind| wire_kind(*kind).into()).collect(),
        max_stages: settings.max_stages,
        max_tokens_per_stage: settings.max_tokens_per_stage,
        features: features::offered(),
        join_token: settings.join_token.clone(),
    };
    let joined = within(settings.link_timeout, peer, "join", client.join(request)).await?.into_inner();
    if joined.max_tokens_per_stage < settings.max_tokens_per_stage || joined.max_stages < settings.max_stages
    {
        return Err(SessionError::Refused(format!(
            "join: the rank serves {} of {}, this attention rank needs {} of {} (--stages and --max-num-batched-tokens \
             here, --max-stages and --max-tokens-per-stage there)",
            count(joined.max_stages, "stage"),
            count(joined.max_tokens_per_stage, "token"),
            settings.max_stages,
            settings.max_tokens_per_stage
        )));
    }
    Ok(joined)
}

/// Which shard the rank owns. The first rank decides how many there are, if nobody did.
pub(super) fn agreed_shard(joined: &v1::JoinResponse, shared: &Shared) -> Result<Shard, SessionError> {
    let spec = joined.shard.ok_or_else(|| SessionError::Refused("join: the answer names no shard".into()))?;
    let shard = Shard::new(spec.index, spec.count).ok_or_else(|| {
        SessionError::Refused(format!("join: shard {} of {} does not exist", spec.index, spec.count))
    })?;
    match shared.shard_count.compare_exchange(0, spec.count, Ordering::AcqRel, Ordering::Acquire) {
        Err(known) if known != spec.count => Err(SessionError::Refused(format!(
            "join: shard_count: the rank has {}, other ranks of this deployment have {known} (--shard of all FFN ranks)",
            spec.count
        ))),
        _ => Ok(shard),
    }
}

/// An open link, by who drives it.
pub(super) enum Opened {
    /// The host.
    Host(Box<dyn HopLink>),
    /// A CUDA stream.
    Stream(StreamLink),
}

/// The best link that both sides offer and that works between them: shared memory, on a host or a device, needs more than
/// an offer.
pub(super) async fn open_link(
    client: &mut FfnControlServiceClient<Channel>,
    channel: Channel,
    target: &Target,
    peer: &str,
    joined: &v1::JoinResponse,
    shared: &Shared,
) -> Result<Opened, SessionError> {
    let wanted = shared.settings.link_kinds.iter().copied();
    let mut common = wanted.filter(|kind| joined.link_kinds.contains(&wire_kind(*kind).into())).peekable();
    while let Some(kind) = common.next() {
        if kind.is_stream_driven() {
            match stream_joining::open(client, kind, peer, joined, shared).await {
                Ok(link) => return Ok(Opened::Stream(link)),
                Err(NotOpened::NextKind(what)) if common.peek().is_some() => {
                    tracing::info!(peer, %kind, what, "trying the next kind of link");
                    continue;
                }
                Err(NotOpened::NextKind(what)) => {
                    return Err(SessionError::Refused(format!("open links: {kind}: {what} (--link)")));
                }
                Err(NotOpened::Ends(error)) => return Err(error),
            }
        }
        let (ticket, limits) = grant(client, kind, peer, joined, shared).await?;
        match attach(kind, channel.clone(), target.clone(), ticket, limits, shared).await {
            Err(AttachError::NotShared { peer, what }) if common.peek().is_some() => {
                tracing::info!(
                    peer,
                    what,
                    "no memory is shared with this FFN rank: trying the next kind of link"
                );
            }
            attached => {
                let attached = attached.map(Opened::Host);
                return attached.map_err(|error| match error {
                    AttachError::Timeout { peer, after } => {
                        SessionError::Broken(late(&peer, "attaching a link", after))
                    }
                    error => SessionError::broken("attach", error),
                });
            }
        }
    }
    let ours = shared.settings.link_kinds.iter().map(|kind| wire_kind(*kind));
    let (theirs, ours) = (links(joined.link_kinds.iter().copied()), links(ours));
    let what = format!(
        "join: no link kind in common: the rank has {theirs}, this attention rank has {ours} (--link)"
    );
    Err(SessionError::Refused(what))
}

/// Registers a link of one kind: the right to attach to it, and what both ends hold to.
async fn grant(
    client: &mut FfnControlServiceClient<Channel>,
    kind: LinkKind,
    peer: &str,
    joined: &v1::JoinResponse,
    shared: &Shared,
) -> Result<(Ticket, Limits), SessionError> {
    let settings = &shared.settings;
    let link = v1::LinkRequest {
        kind: wire_kind(kind).into(),
        credits: settings.max_stages,
        max_rows: settings.max_tokens_per_stage,
        ..v1::LinkRequest::default()
    };
    let request = v1::OpenLinksRequest { session_id: joined.session_id.clone(), links: vec![link] };
    let opened = within(settings.link_timeout, peer, "open links", client.open_links(request)).await?;
    let opened = opened.into_inner();
    let refused = |what: String| SessionError::Refused(format!("open links: {what}"));
    let grant = opened.links.first().ok_or_else(|| refused("the answer has no link".into()))?;
    let secret = Secret::from_slice(&grant.secret)
        .ok_or_else(|| refused(format!("a secret of {} bytes", grant.secret.len())))?;
    let max_body_bytes = Limits::body_bytes(grant.max_rows, settings.max_row_bytes)
        .ok_or_else(|| refused(format!("{} rows do not fit a frame", grant.max_rows)))?;
    let limits = Limits {
        kind,
        peer: peer.to_owned(),
        epoch: Epoch(grant.epoch),
        credits: grant.credits,
        max_rows: grant.max_rows,
        max_body_bytes,
        checksum: features::checksum(kind, &joined.features),
    };
    Ok((Ticket { link_id: LinkId(grant.link_id), secret }, limits))
}

async fn attach(
    kind: LinkKind,
    channel: Channel,
    target: Target,
    ticket: Ticket,
    limits: Limits,
    shared: &Shared,
) -> Result<Box<dyn HopLink>, AttachError> {
    let (bell, timeout, peer) = (shared.bell.clone(), shared.settings.link_timeout, limits.peer.clone());
    if kind == LinkKind::Inline {
        return Ok(Box::new(inline::dial(channel, &ticket, limits, bell, timeout).await?));
    }
    let dial = move || attach::dial(target.address, target.tls.as_ref(), &ticket, limits, bell, timeout);
    let attached = tokio::task::spawn_blocking(dial).await;
    attached.unwrap_or_else(|error| Err(AttachError::Transport { peer, what: error.to_string() }))
}

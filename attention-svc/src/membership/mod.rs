//! `MembershipService`: FFN ranks say where they are ([`announced`]), attention ranks tell each other how busy they are
//! ([`peers`]), so that any of them is an address for all.
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use afd_common::ids::Shard;
use afd_common::net::Tokens;
use afd_common::proto::v1;
use afd_common::proto::v1::membership_service_server::{MembershipService, MembershipServiceServer};
use afd_common::spelling;
use tonic::{Request, Response, Status};

pub mod announced;
mod lease;
pub(crate) mod load;
pub mod peers;
mod refused;

use announced::{Announced, Caller, FORGOTTEN_AFTER, network};
use peers::Peers;
use refused::Refused;

/// Paths of this service: where there is a join token it guards them, and the API's tokens do not.
pub const PATHS: &[&str] = &[
    "/afd.v1.MembershipService/Announce",
    "/afd.v1.MembershipService/Leave",
    "/afd.v1.MembershipService/ListPeers",
];

/// Most characters of a caller's fingerprint in a message: more than a fingerprint has.
const MOST_SHOWN: usize = 100;

/// What the service is made of.
pub struct Membership {
    /// Where announcements go; `None` with the FFN in this process.
    pub announced: Option<Arc<Announced>>,
    /// The other attention ranks.
    pub peers: Arc<Peers>,
    /// Asked of every caller, if anything.
    pub join_token: Option<Tokens>,
    /// `ModelIdentity.fingerprint` of what is served.
    pub fingerprint: String,
    /// Whether requests can be served.
    pub is_ready: Box<dyn Fn() -> bool + Send + Sync>,
    /// FFN ranks in use.
    pub ffn_peers: Box<dyn Fn() -> Vec<v1::FfnPeer> + Send + Sync>,
    /// Names, as given or announced, whose FFN ranks are in use.
    pub used_names: Box<dyn Fn() -> BTreeSet<String> + Send + Sync>,
    /// Shards that the FFN ranks in use divide the layers into; 0 before the first has joined.
    pub shard_count: Box<dyn Fn() -> u32 + Send + Sync>,
}

/// Longest `host:port`: a DNS name has at most 253 characters, a port five.
const MAX_ADDRESS: usize = 253 + 6;

impl Membership {
    /// As a gRPC service.
    pub fn service(self) -> MembershipServiceServer<impl MembershipService> {
        MembershipServiceServer::new(Guarded { membership: self, refused: Refused::default() })
    }

    fn check_token<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let Some(token) = &self.join_token else { return Ok(()) };
        let presented = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        token.check(presented).map_err(|what| {
            Status::unauthenticated(format!(
                "`authorization` is {what}; expected `Bearer <join token>` (--join-token-file)"
            ))
        })
    }
}

fn invalid(field: &str, what: &str) -> Status {
    Status::invalid_argument(format!("`{field}`: {what}"))
}

fn differs(field: &str, caller: &str, own: &str, options: &str) -> Status {
    let message =
        format!("`{field}` differs: the caller has {caller}, this attention rank has {own} ({options})");
    Status::failed_precondition(message)
}

/// The service: what is refused is told to the operator too.
struct Guarded {
    membership: Membership,
    refused: Refused,
}

impl Guarded {
    /// A call of somebody at `from`.
    fn answered<T>(
        &self,
        call: &'static str,
        from: IpAddr,
        answer: Result<T, Status>,
    ) -> Result<Response<T>, Status> {
        if let Err(status) = &answer {
            let why = status.message();
            if self.refused.is_news((network(from), call, status.code()), Instant::now()) {
                tracing::warn!(%from, call, why, "refused a membership call");
            } else {
                tracing::debug!(%from, call, why, "refused a membership call");
            }
        }
        answer.map(Response::new)
    }
}

/// Always known behind a listener of ours.
fn caller<T>(request: &Request<T>) -> IpAddr {
    request.remote_addr().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |caller| caller.ip())
}

#[tonic::async_trait]
impl MembershipService for Guarded {
    async fn announce(
        &self,
        request: Request<v1::AnnounceRequest>,
    ) -> Result<Response<v1::AnnounceResponse>, Status> {
        self.answered("announce", caller(&request), self.membership.announce(request))
    }

    async fn leave(&self, request: Request<v1::LeaveRequest>) -> Result<Response<v1::LeaveResponse>, Status> {
        self.answered("leave", caller(&request), self.membership.leave(request))
    }

    async fn list_peers(
        &self,
        request: Request<v1::ListPeersRequest>,
    ) -> Result<Response<v1::ListPeersResponse>, Status> {
        self.answered("list peers", caller(&request), self.membership.list_peers(&request))
    }
}

impl Membership {
    fn announce(&self, request: Request<v1::AnnounceRequest>) -> Result<v1::AnnounceResponse, Status> {
        self.check_token(&request)?;
        let address = caller(&request);
        let caller = match self.join_token {
            Some(_) => Caller::Member,
            None => Caller::Stranger(address),
        };
        let announced = self.announced.as_ref().ok_or_else(|| {
            Status::failed_precondition("this attention rank has its FFN in its own process (--ffn local)")
        })?;
        let peer = self.checked(request.into_inner())?;
        let rank = peer.identity.as_ref().map_or(0, |identity| identity.rank);
        let address = peer.address.clone();
        match announced.handle_announce(peer, caller, &self.used_names, Instant::now()) {
            Err(full) => return Err(Status::resource_exhausted(full.to_string())),
            Ok(true) => tracing::info!(address, rank, "an FFN rank announces itself"),
            Ok(false) => {}
        }
        Ok(v1::AnnounceResponse {
            identity: Some(self.peers.identity().clone()),
            forgotten_after_ms: FORGOTTEN_AFTER.as_millis() as u32,
        })
    }

    /// The rank that announces itself, if it can be one of this deployment's.
    fn checked(&self, request: v1::AnnounceRequest) -> Result<v1::AnnouncedPeer, Status> {
        let v1::AnnounceRequest { identity, address, shard, fingerprint } = request;
        let identity = identity.ok_or_else(|| invalid("identity", "missing"))?;
        if identity.role() != v1::Role::Ffn {
            let role = spelling::role(identity.role);
            return Err(Status::failed_precondition(format!(
                "`identity.role` is {role}; only ffn ranks announce themselves (--announce)"
            )));
        }
        if address.len() > MAX_ADDRESS {
            let what = format!("has {} characters; expected at most {MAX_ADDRESS}", address.len());
            return Err(invalid("address", &what));
        }
        if !afd_common::net::is_address(&address) {
            let address = spelling::shown(&address);
            return Err(invalid("address", &format!("{address:?} is no address; expected host:port")));
        }
        let Some(own) = shard.and_then(|shard| Shard::new(shard.index, shard.count)) else {
            return Err(invalid("shard", "missing, or its index is not below its count"));
        };
        if fingerprint != self.fingerprint {
            return Err(differs(
                "model.fingerprint",
                &spelling::cut(&fingerprint, MOST_SHOWN),
                &self.fingerprint,
                "--model, or --load-format and --seed",
            ));
        }
        match (self.shard_count)() {
            0 => {}
            count if count == own.count() => {}
            count => {
                return Err(Status::failed_precondition(format!(
                    "`shard.count` differs: the caller has {}, the FFN ranks in use here have {count} (--shard)",
                    own.count()
                )));
            }
        }
        Ok(v1::AnnouncedPeer { identity: Some(identity), address, shard })
    }

    fn leave(&self, request: Request<v1::LeaveRequest>) -> Result<v1::LeaveResponse, Status> {
        self.check_token(&request)?;
        let v1::LeaveRequest { identity, address } = request.into_inner();
        let known = self.announced.as_ref();
        let was_known =
            known.is_some_and(|known| known.handle_leave(&address, identity.as_ref(), Instant::now()));
        if was_known {
            tracing::info!(address, "an FFN rank leaves");
        }
        Ok(v1::LeaveResponse { was_known })
    }

    fn list_peers(&self, request: &Request<v1::ListPeersRequest>) -> Result<v1::ListPeersResponse, Status> {
        self.check_token(request)?;
        let announced = self.announced.as_ref();
        Ok(v1::ListPeersResponse {
            identity: Some(self.peers.identity().clone()),
            fingerprint: self.fingerprint.clone(),
            ready: (self.is_ready)(),
            num_requests: self.peers.num_local(),
            announced: announced.map_or_else(Vec::new, |known| known.peers(Instant::now())),
            ffn_peers: (self.ffn_peers)(),
            attention_peers: self.peers.addresses(),
        })
    }
}

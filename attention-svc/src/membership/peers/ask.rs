//! What a peer says when it is asked: who it is and how busy, or why nothing can be forwarded to it.
use std::net::SocketAddr;

use afd_common::net::client::{self, NotConnected};
use afd_common::proto::v1;
use afd_common::proto::v1::membership_service_client::MembershipServiceClient;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::absent::Away;
use super::{PATIENCE, PeerSettings, State};

/// A peer's answer.
pub(super) struct Listed {
    pub(super) state: State,
    pub(super) rank: u32,
    pub(super) incarnation: u64,
    pub(super) num_requests: u32,
}

/// Asks the peer at `address`, one of those that `name` stands for, over the channel that there is or a new one.
///
/// # Errors
/// [`Away`].
pub(super) async fn listed(
    settings: &PeerSettings,
    address: SocketAddr,
    name: &str,
    channel: Option<Channel>,
) -> Result<Listed, Away> {
    let channel = match channel {
        Some(channel) => channel,
        None => {
            let host = name.rsplit_once(':').map_or(name, |(host, _)| host);
            let tls = settings.tls.as_ref().map(|tls| tls.peer(host)).transpose();
            let tls = tls.map_err(|error| Away::ForNow(error.to_string()))?;
            client::connect(&address.to_string(), tls.as_ref(), PATIENCE).await.map_err(unconnected)?
        }
    };
    let mut request = tonic::Request::new(v1::ListPeersRequest {});
    if let Some(token) = &settings.token {
        request.metadata_mut().insert("authorization", token.clone());
    }
    let answer = MembershipServiceClient::new(channel.clone()).list_peers(request).await;
    let answer = answer.map_err(|status| refused(&status))?.into_inner();
    let identity = answer.identity.unwrap_or_default();
    let (rank, incarnation) = (identity.rank, identity.incarnation);
    if identity == settings.identity {
        return Ok(Listed { state: State::Own, rank, incarnation, num_requests: 0 });
    }
    for (field, own, other, options) in [
        (
            "identity.deployment",
            &settings.identity.deployment,
            &identity.deployment,
            "--deployment, or --peers",
        ),
        ("fingerprint", &settings.fingerprint, &answer.fingerprint, "--model, or --load-format and --seed"),
    ] {
        if own != other {
            let why = format!("`{field}` of A{rank} there is {other}, and {own} here ({options})");
            return Err(Away::ForGood(why));
        }
    }
    let state = State::Here { channel, ready: answer.ready };
    Ok(Listed { state, rank, incarnation, num_requests: answer.num_requests })
}

fn unconnected(error: NotConnected) -> Away {
    match error {
        NotConnected::WantsTls(words) => Away::ForGood(format!("it wants TLS: {words} (--peers-tls-ca)")),
        NotConnected::Unreachable(why) => Away::ForNow(format!("it cannot be reached: {why}")),
        other => Away::ForNow(other.to_string()),
    }
}

/// An FFN rank says that it is one, with a typed detail.
fn refused(status: &Status) -> Away {
    let info = status.get_details_error_info();
    let words = client::words(status);
    match status.code() {
        _ if info.is_some_and(|info| info.reason == "WRONG_ROLE") => {
            Away::ForGood("it is an FFN rank: it belongs into --ffn".into())
        }
        Code::Unimplemented => Away::ForGood(format!("it is no attention rank: {words}")),
        Code::FailedPrecondition | Code::PermissionDenied | Code::Unauthenticated => Away::ForGood(words),
        _ => Away::ForNow(words),
    }
}

//! What an address says of itself.
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::net::client::NotConnected;
use afd_common::net::tls::ClientTls;
use afd_common::proto::v1;
use afd_common::proto::v1::inference_service_client::InferenceServiceClient;
use ffn_svc::probe::dial::{self, DialedChannel, Token};
use ffn_svc::probe::edge::{self, Edge};
use futures::future::join_all;
use tokio::time::timeout;
use tonic::{Code, Status};

/// How to look.
#[derive(Clone, Debug)]
pub(super) struct Look {
    /// To trust and to show; none in the clear.
    pub(super) tls: Option<ClientTls>,
    /// For attention ranks.
    pub(super) api_token: Token,
    /// For FFN ranks.
    pub(super) join_token: Token,
    /// For all answers of one address.
    pub(super) patience: Duration,
    /// Whether to measure it.
    pub(super) bandwidth: bool,
}

/// An address, what was asked for there, and what was found.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// host:port.
    pub(super) address: String,
    /// As which role it was given.
    pub(super) expected: v1::Role,
    /// What is there.
    pub(super) found: Found,
}

/// What is at an address.
#[derive(Clone, Debug)]
pub(super) enum Found {
    /// An attention rank.
    Attention(Box<AttentionRank>),
    /// An FFN rank.
    Ffn(Box<FfnRank>),
    /// Nobody who could be reached; why, in words.
    Nobody(String),
    /// Somebody who does not say who it is, or a stranger; why, in words.
    Stranger(String),
}

/// An attention rank from outside.
#[derive(Clone, Debug)]
pub(super) struct AttentionRank {
    pub(super) info: v1::GetModelInfoResponse,
    pub(super) round_trip: Duration,
    pub(super) clock: Clock,
}

/// An FFN rank from outside.
#[derive(Clone, Debug)]
pub(super) struct FfnRank {
    pub(super) edge: Edge,
}

/// How far a clock is ahead of ours, microseconds, and how well that is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    pub(super) ahead_us: i64,
    pub(super) within: Duration,
}

impl FfnRank {
    pub(super) fn clock(&self) -> Clock {
        Clock { ahead_us: self.edge.clock_ahead_us, within: self.edge.clock_within }
    }
}

impl Seen {
    /// FFN ranks that an attention rank says it uses.
    pub(super) fn peers(&self) -> &[v1::FfnPeer] {
        match &self.found {
            Found::Attention(rank) => &rank.info.ffn_peers,
            _ => &[],
        }
    }
}

impl Look {
    /// At addresses that should be attention ranks, all at once.
    pub(super) async fn at_attention(&self, addresses: &[String]) -> Vec<Seen> {
        join_all(addresses.iter().map(|address| self.at(address, v1::Role::Attention))).await
    }

    /// At addresses that should be FFN ranks, one by one: they would share the way that is measured.
    pub(super) async fn at_ffn(&self, addresses: &[String]) -> Vec<Seen> {
        let mut seen = Vec::with_capacity(addresses.len());
        for address in addresses {
            seen.push(self.at(address, v1::Role::Ffn).await);
        }
        seen
    }

    async fn at(&self, address: &str, expected: v1::Role) -> Seen {
        let found = match timeout(self.patience, self.ask(address, expected)).await {
            Ok(Ok(found)) => found,
            Ok(Err(why)) => Found::Stranger(why),
            Err(_) => Found::Stranger(format!("does not answer within {:?} (--timeout)", self.patience)),
        };
        Seen { address: address.to_owned(), expected, found }
    }

    /// Asks as the expected role first, then as the other one.
    async fn ask(&self, address: &str, expected: v1::Role) -> Result<Found, String> {
        let roles = match expected {
            v1::Role::Ffn => [v1::Role::Ffn, v1::Role::Attention],
            _ => [v1::Role::Attention, v1::Role::Ffn],
        };
        for role in roles {
            let token = if role == v1::Role::Ffn { &self.join_token } else { &self.api_token };
            let channel = dial::dial(address, self.tls.as_ref(), token, self.patience).await;
            let channel = match channel {
                Ok(channel) => channel,
                Err(why @ (NotConnected::Unreachable(_) | NotConnected::Late(_))) => {
                    return Ok(Found::Nobody(format!("cannot be reached: {why}")));
                }
                Err(why) => return Err(format!("cannot be asked: {why}")),
            };
            let asked = match role {
                v1::Role::Ffn => self.ask_ffn(channel).await,
                _ => self.ask_attention(channel).await,
            };
            match asked {
                Ok(found) => return Ok(found),
                Err(status) if is_other_role(&status) => {}
                Err(status) => {
                    let option = if role == v1::Role::Ffn { "--join-token-file" } else { "--api-key-file" };
                    return Err(dial::refusal(&status, option));
                }
            }
        }
        Err("is neither an attention nor an FFN rank: it knows none of their calls".into())
    }

    async fn ask_ffn(&self, channel: DialedChannel) -> Result<Found, Status> {
        let edge = edge::measure(channel, self.bandwidth).await?;
        if edge.answer.identity.is_none() {
            return Err(Status::internal(
                "the rank does not say who it is: its release is older than this doctor",
            ));
        }
        Ok(Found::Ffn(Box::new(FfnRank { edge })))
    }

    async fn ask_attention(&self, channel: DialedChannel) -> Result<Found, Status> {
        let mut client = InferenceServiceClient::new(channel);
        client.get_model_info(v1::GetModelInfoRequest {}).await?;
        // The first call pays for what the second finds ready.
        let (clock, begun) = (SystemTime::now(), Instant::now());
        let info = client.get_model_info(v1::GetModelInfoRequest {}).await?.into_inner();
        let round_trip = begun.elapsed();
        if info.identity.is_none() {
            return Err(too_old());
        }
        let middle = (clock + round_trip / 2).duration_since(UNIX_EPOCH).unwrap_or_default();
        let ahead_us = info.answered_at_us as i64 - middle.as_micros() as i64;
        let clock = Clock { ahead_us, within: round_trip / 2 };
        Ok(Found::Attention(Box::new(AttentionRank { info, round_trip, clock })))
    }
}

fn too_old() -> Status {
    Status::internal("the rank does not say who it is: its release is older than this doctor")
}

/// An FFN rank refuses an attention rank's calls by naming its role; whoever does not know a call says so. A server that
/// speaks no gRPC at all answers with something that is none.
fn is_other_role(status: &Status) -> bool {
    matches!(status.code(), Code::FailedPrecondition | Code::Unimplemented | Code::NotFound | Code::Unknown)
}

//! What an address says of itself.
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::net::client::endpoint;
use afd_common::proto::v1;
use afd_common::proto::v1::inference_service_client::InferenceServiceClient;
use ffn_svc::probe::edge::{self, Edge};
use futures::future::join_all;
use serde_json::Value;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// How to look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
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
    /// Nobody, or a stranger; why, in words.
    Nothing(String),
}

/// An attention rank from outside.
#[derive(Clone, Debug)]
pub(super) struct AttentionRank {
    pub(super) info: v1::GetModelInfoResponse,
    /// Of the software and of the protocol, as `/version` says.
    pub(super) version: String,
    pub(super) protocol: String,
    /// Why it is not, if it is not.
    pub(super) not_ready: Option<String>,
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
            Ok(Err(why)) => Found::Nothing(why),
            Err(_) => Found::Nothing(format!("does not answer within {:?} (--timeout)", self.patience)),
        };
        Seen { address: address.to_owned(), expected, found }
    }

    /// Asks as the expected role first, then as the other one.
    async fn ask(&self, address: &str, expected: v1::Role) -> Result<Found, String> {
        let endpoint = endpoint(address, self.patience).map_err(|error| error.to_string())?;
        let channel =
            endpoint.connect().await.map_err(|error| format!("is not there: {}", innermost(&error)))?;
        let roles = match expected {
            v1::Role::Ffn => [v1::Role::Ffn, v1::Role::Attention],
            _ => [v1::Role::Attention, v1::Role::Ffn],
        };
        for role in roles {
            let asked = match role {
                v1::Role::Ffn => self.ask_ffn(channel.clone()).await,
                _ => self.ask_attention(address, channel.clone()).await,
            };
            match asked {
                Ok(found) => return Ok(found),
                Err(status) if is_other_role(&status) => {}
                Err(status) => {
                    return Err(format!("answers with an error: {} ({:?})", status.message(), status.code()));
                }
            }
        }
        Err("is neither an attention nor an FFN rank: it knows none of their calls".into())
    }

    async fn ask_ffn(&self, channel: Channel) -> Result<Found, Status> {
        let edge = edge::measure(channel, self.bandwidth).await?;
        if edge.answer.identity.is_none() {
            return Err(Status::internal(
                "the rank does not say who it is: its release is older than this doctor",
            ));
        }
        Ok(Found::Ffn(Box::new(FfnRank { edge })))
    }

    async fn ask_attention(&self, address: &str, channel: Channel) -> Result<Found, Status> {
        let mut client = InferenceServiceClient::new(channel);
        client.get_model_info(v1::GetModelInfoRequest {}).await?;
        // The first call pays for what the second finds ready.
        let (clock, begun) = (SystemTime::now(), Instant::now());
        let info = client.get_model_info(v1::GetModelInfoRequest {}).await?.into_inner();
        let round_trip = begun.elapsed();
        let middle = (clock + round_trip / 2).duration_since(UNIX_EPOCH).unwrap_or_default();
        let ahead_us = info.answered_at_us as i64 - middle.as_micros() as i64;
        let (_, version) = self.page(address, "/version").await?;
        let (ready, health) = self.page(address, "/ready").await?;
        let word = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        let why = || health["reason"].as_str().map_or_else(|| word(&health["status"]), str::to_owned);
        Ok(Found::Attention(Box::new(AttentionRank {
            info,
            version: word(&version["version"]),
            protocol: word(&version["protocol"]),
            not_ready: (!ready).then(why),
            round_trip,
            clock: Clock { ahead_us, within: round_trip / 2 },
        })))
    }

    /// Whether the page is a good one, and its JSON.
    async fn page(&self, address: &str, path: &str) -> Result<(bool, Value), Status> {
        let failed = |error: reqwest::Error| Status::unavailable(format!("{path}: {}", innermost(&error)));
        let client = reqwest::Client::builder().no_proxy().timeout(self.patience).build().map_err(failed)?;
        let base = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
        let answer = client.get(format!("{base}{path}")).send().await.map_err(failed)?;
        Ok((answer.status().is_success(), answer.json().await.map_err(failed)?))
    }
}

/// An FFN rank refuses an attention rank's calls by naming its role; whoever does not know a call says so. A server that
/// speaks no gRPC at all answers with something that is none.
fn is_other_role(status: &Status) -> bool {
    matches!(status.code(), Code::FailedPrecondition | Code::Unimplemented | Code::NotFound | Code::Unknown)
}

/// "transport error" says nothing; what it was made of does.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

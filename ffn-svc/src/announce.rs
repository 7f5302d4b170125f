//! Tells attention ranks where this rank can be joined (`--announce`), again and again, and that it leaves.
use std::time::Duration;

use afd_common::net::client;
use afd_common::net::tls::ClientTls;
use afd_common::proto::v1;
use afd_common::proto::v1::membership_service_client::MembershipServiceClient;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

use crate::config::Config;
use crate::serve::Server;

/// For connecting, and for an answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// After a failure.
const RETRY: Duration = Duration::from_secs(1);
/// For all farewells together.
const FAREWELL: Duration = Duration::from_millis(500);

/// The tasks that announce, one per attention rank; they end when this is dropped.
pub struct Announcing {
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

/// What is said, and to whom.
#[derive(Clone)]
struct Announcer {
    to: String,
    tls: Option<ClientTls>,
    token: Option<MetadataValue<Ascii>>,
    request: v1::AnnounceRequest,
}

impl Announcing {
    /// Begins, if there is anybody to tell.
    pub fn start(config: &Config, server: &Server) -> Self {
        let (mut tasks, stop) = (JoinSet::new(), CancellationToken::new());
        let (spec, settings) = (server.sessions().engine().spec(), server.sessions().settings());
        let shard = v1::ShardSpec { index: spec.shard.index(), count: spec.shard.count() };
        let request = v1::AnnounceRequest {
            identity: Some(settings.identity.clone()),
            address: config.advertise.clone().unwrap_or_else(|| server.address().to_string()),
            shard: Some(shard),
            fingerprint: settings.offer.model.fingerprint.clone(),
        };
        for to in &config.announce.to {
            let announcer = Announcer {
                to: to.clone(),
                tls: config.announce.tls.clone(),
                token: config.join_token.as_ref().and_then(|token| token.header()),
                request: request.clone(),
            };
            tasks.spawn(announcer.run(stop.clone()));
        }
        Self { tasks, stop }
    }

    /// Says farewell to everybody who was told.
    pub async fn leave(mut self) {
        self.stop.cancel();
        let _ =
            tokio::time::timeout(FAREWELL, async { while self.tasks.join_next().await.is_some() {} }).await;
    }
}

impl Announcer {
    async fn run(self, stop: CancellationToken) {
        let (mut last, mut channel) = (None, None);
        loop {
            let outcome = tokio::select! {
                outcome = self.announce(&mut channel) => outcome,
                () = stop.cancelled() => break,
            };
            let pause = match &outcome {
                Ok(forgotten_after) => *forgotten_after / 4,
                Err(_) => RETRY,
            };
            let said = outcome.err();
            // Said when it changes: an attention rank that is not there yet is asked every second.
            if last.as_ref() != Some(&said) {
                match &said {
                    None => tracing::info!(to = self.to, address = self.request.address, "announced"),
                    Some(why) => tracing::warn!(to = self.to, why, "cannot announce this rank (--announce)"),
                }
                last = Some(said);
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => break,
            }
        }
        if let (Some(channel), Some(None)) = (channel, last) {
            let v1::AnnounceRequest { identity, address, .. } = self.request.clone();
            let leave = self.with_token(v1::LeaveRequest { identity, address });
            // It would be forgotten all the same, only later.
            let _ = MembershipServiceClient::new(channel).leave(leave).await;
        }
    }

    /// Announces once: after which time that is forgotten, or why it failed.
    async fn announce(&self, channel: &mut Option<Channel>) -> Result<Duration, String> {
        let connected = match channel.take() {
            Some(connected) => connected,
            None => {
                let host = self.to.rsplit_once(':').map_or(self.to.as_str(), |(host, _)| host);
                let tls = self.tls.as_ref().map(|tls| tls.peer(host)).transpose();
                let tls = tls.map_err(|error| error.to_string())?;
                client::connect(&self.to, tls.as_ref(), PATIENCE).await?
            }
        };
        let mut client = MembershipServiceClient::new(connected.clone());
        let announced = client.announce(self.with_token(self.request.clone()));
        match tokio::time::timeout(PATIENCE, announced).await {
            Err(_) => Err(format!("no answer within {PATIENCE:?}")),
            Ok(Err(status)) => Err(client::words(&status)),
            Ok(Ok(answer)) => {
                *channel = Some(connected);
                Ok(Duration::from_millis(answer.into_inner().forgotten_after_ms.max(1000).into()))
            }
        }
    }

    fn with_token<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        request
    }
}

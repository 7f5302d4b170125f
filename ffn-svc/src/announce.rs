//! Tells attention ranks where this rank can be joined (`--announce`), again and again, and that it leaves.
use std::time::{Duration, Instant};

use afd_common::net::client;
use afd_common::net::tls::ClientTls;
use afd_common::proto::v1;
use afd_common::proto::v1::membership_service_client::MembershipServiceClient;
use afd_common::spelling::span;
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
/// Between two warnings of the same failure: at first, and at most.
const FIRST_SILENCE: Duration = Duration::from_secs(10);
const LONGEST_SILENCE: Duration = Duration::from_secs(600);
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

/// What was said of announcing, so that it is said when it changes, and again and again, ever more seldom, while it
/// fails. Pure.
#[derive(Debug, Default)]
struct Said {
    announced: bool,
    failing: Option<Failing>,
}

#[derive(Debug)]
struct Failing {
    why: String,
    since: Instant,
    again_at: Instant,
    pause: Duration,
}

/// What is to be said.
#[derive(Debug, PartialEq, Eq)]
enum Saying {
    Announced,
    Failing { why: String, since: Duration },
}

impl Said {
    fn is_announced(&self) -> bool {
        self.announced
    }

    /// Announcing failed, for this reason, or did not.
    fn handle(&mut self, failed: Option<String>, now: Instant) -> Option<Saying> {
        let Some(why) = failed else {
            self.failing = None;
            return (!std::mem::replace(&mut self.announced, true)).then_some(Saying::Announced);
        };
        self.announced = false;
        let same = self.failing.as_ref().filter(|before| before.why == why);
        if same.is_some_and(|same| now < same.again_at) {
            return None;
        }
        let pause = same.map_or(FIRST_SILENCE, |same| (2 * same.pause).min(LONGEST_SILENCE));
        let since = self.failing.as_ref().map_or(now, |before| before.since);
        self.failing = Some(Failing { why: why.clone(), since, again_at: now + pause, pause });
        Some(Saying::Failing { why, since: now.saturating_duration_since(since) })
    }
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
        let (mut said, mut channel) = (Said::default(), None);
        loop {
            let outcome = tokio::select! {
                outcome = self.announce(&mut channel) => outcome,
                () = stop.cancelled() => break,
            };
            let pause = match &outcome {
                Ok(forgotten_after) => *forgotten_after / 4,
                Err(_) => RETRY,
            };
            match said.handle(outcome.err(), Instant::now()) {
                None => {}
                Some(Saying::Announced) => {
                    tracing::info!(to = self.to, address = self.request.address, "announced");
                }
                Some(Saying::Failing { why, since }) => {
                    let since = span(since);
                    tracing::warn!(to = self.to, why, since, "cannot announce this rank (--announce)");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => break,
            }
        }
        if let (Some(channel), true) = (channel, said.is_announced()) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_said_again_ever_more_seldom_and_a_success_once() {
        let (mut said, begun) = (Said::default(), Instant::now());
        let mut failing_at = |second: u64, why: &str| {
            let saying = said.handle(Some(why.into()), begun + Duration::from_secs(second))?;
            match saying {
                Saying::Failing { why, since } => Some((why, since.as_secs())),
                Saying::Announced => None,
            }
        };
        let told: Vec<_> = (0..2000).filter_map(|second| failing_at(second, "nobody")).collect();
        let seconds: Vec<_> = told.iter().map(|(_, since)| *since).collect();
        assert_eq!(seconds, [0, 10, 30, 70, 150, 310, 630, 1230, 1830]);
        assert_eq!(
            failing_at(2000, "refused"),
            Some(("refused".into(), 2000)),
            "what is new is said at once"
        );
        assert_eq!(failing_at(2009, "refused"), None);
        let later = begun + Duration::from_secs(2010);
        assert_eq!(said.handle(None, later), Some(Saying::Announced));
        assert_eq!(said.handle(None, later), None);
        assert!(said.is_announced());
        let failed = said.handle(Some("gone".into()), later);
        assert_eq!(failed, Some(Saying::Failing { why: "gone".into(), since: Duration::ZERO }));
        assert!(!said.is_announced());
    }
}

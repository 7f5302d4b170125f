//! A running FFN rank: its port, its sessions and its engine, from the bound listener to the drained end.
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afd_common::link::Limits;
use afd_common::net::{Access, Listener, Options};
use afd_common::process::stop::Told;
use afd_common::telemetry::metrics::ReadKind;
use afd_common::telemetry::{MetricError, Metrics};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::engine::{EngineEnd, EngineHandle};
use crate::service::{self, Health, Phase};
use crate::session::sessions::{Sessions, Settings};

/// Longest pause between two hops of a step under way, seen while draining.
const QUIET: Duration = Duration::from_millis(300);
/// How often a drain looks whether it is quiet: it has no event of its own.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Time for connections to take their last words.
const FAREWELL: Duration = Duration::from_millis(500);

/// Why a rank cannot be served, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A metric's name is taken: a mistake of this software.
    #[error(transparent)]
    Metric(#[from] MetricError),
    /// The descriptors for reflection are broken: a mistake of the build.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// Rows of a full stage do not fit a frame.
    #[error("{max_tokens} rows of {row_bytes} bytes do not fit a frame: lower --max-tokens-per-stage")]
    RowsTooLarge {
        /// As configured.
        max_tokens: u32,
        /// Bytes of a row with its side tensors.
        row_bytes: usize,
    },
    /// The engine thread died.
    #[error("the FFN engine died: {0}")]
    EngineDied(String),
}

/// A rank that is being served.
pub struct Server {
    address: SocketAddr,
    sessions: Arc<Sessions>,
    health: Health,
    stop: CancellationToken,
    port: JoinHandle<afd_common::net::Drained>,
}

impl Server {
    /// Serves `listener` from now on. `health` moves to ready.
    ///
    /// # Errors
    /// [`ServeError`]; nothing is served then.
    pub async fn start(
        listener: Listener,
        engine: EngineHandle,
        settings: Settings,
        metrics: &Metrics,
        health: Health,
        access: Access,
    ) -> Result<Self, ServeError> {
        let (max_tokens, row_bytes) = (settings.offer.max_tokens_per_stage, engine.spec().max_row_bytes());
        let max_body_bytes = Limits::body_bytes(max_tokens, row_bytes)
            .ok_or(ServeError::RowsTooLarge { max_tokens, row_bytes })?;
        let sessions = Sessions::new(settings, Arc::new(engine));
        count(metrics, &listener, &sessions)?;
        let router = service::router(&sessions, &health, metrics, max_body_bytes)?;
        let (address, stop) = (listener.address(), CancellationToken::new());
        access.warn(address);
        let options =
            Options { drain: FAREWELL, is_stream: service::is_stream, access, ..Options::default() };
        let links = service::link_acceptor(&sessions);
        let port = tokio::spawn(listener.serve(router, Some(links), options, stop.clone()));
        health.set(Phase::Ready);
        Ok(Self { address, sessions, health, stop, port })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Who has joined.
    pub fn sessions(&self) -> &Arc<Sessions> {
        &self.sessions
    }

    /// Serves until `stop` says to drain, then for at most `drain`; or until the engine dies.
    ///
    /// # Errors
    /// [`ServeError::EngineDied`].
    pub async fn run(self, stop: impl Future<Output = Told>, drain: Duration) -> Result<(), ServeError> {
        let engine = Arc::clone(self.sessions.engine());
        let mut asked_to_drain = self.sessions.draining();
        let draining = async {
            let _ = asked_to_drain.wait_for(Option::is_some).await;
            // A drain that a peer asked for does not end the process: that is for whoever started it.
            self.health.set(Phase::Closed);
            std::future::pending::<Infallible>().await
        };
        let ended = tokio::select! {
            told = stop => Ok(told),
            end = engine.ended() => Err(end),
            never = draining => match never {},
        };
        let begun = Instant::now();
        let died = match ended {
            Err(end) => Some(end),
            Ok(told) => {
                let deadline = Instant::now() + drain;
                self.health.set(Phase::Draining);
                self.sessions.drain(deadline);
                tracing::info!(why = told.by(), sessions = self.sessions.len(), limit = ?drain, "stopping");
                tokio::select! {
                    () = self.quiet(deadline) => None,
                    end = engine.ended() => Some(end),
                }
            }
        };
        let result = self.finish(died).await;
        tracing::info!(took_ms = begun.elapsed().as_millis() as u64, "stopped");
        result
    }

    /// Waits until everybody has left, or nothing has happened for a while, or the deadline.
    async fn quiet(&self, deadline: Instant) {
        let numbers = self.sessions.engine().metrics().clone();
        let (mut served, mut since) = (numbers.hops.get(), Instant::now());
        while !self.sessions.is_empty() && Instant::now() < deadline {
            let busy = numbers.unanswered.get() > 0 || self.sessions.any_step_under_way();
            if busy || numbers.hops.get() != served {
                (served, since) = (numbers.hops.get(), Instant::now());
            } else if since.elapsed() >= QUIET {
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn finish(self, died: Option<EngineEnd>) -> Result<(), ServeError> {
        let result = match died {
            None => Ok(()),
            Some(EngineEnd::Died(what)) => Err(ServeError::EngineDied(what)),
            Some(EngineEnd::Stopped) => {
                Err(ServeError::EngineDied("it stopped without being asked to".into()))
            }
        };
        let why = match &result {
            Ok(()) => "the FFN rank is stopping".to_owned(),
            Err(error) => error.to_string(),
        };
        if result.is_err() {
            self.health.set(Phase::Dead(why.clone()));
        }
        self.sessions.end_all(&why);
        self.sessions.tasks().close();
        let _ = tokio::time::timeout(FAREWELL, self.sessions.tasks().wait()).await;
        self.stop.cancel();
        if let Ok(drained) = self.port.await
            && drained.cut > 0
        {
            tracing::debug!(cut = drained.cut, "connections were cut");
        }
        let engine = Arc::clone(self.sessions.engine());
        // Joins a thread: not on a thread of tokio's.
        let _ = tokio::task::spawn_blocking(move || engine.stop(why)).await;
        result
    }
}

fn count(metrics: &Metrics, listener: &Listener, sessions: &Arc<Sessions>) -> Result<(), MetricError> {
    let live = Arc::downgrade(sessions);
    let help = "Attention ranks that have joined.";
    metrics.read_one_when_asked(ReadKind::Gauge, "afd_ffn_sessions", help, move || {
        live.upgrade().map_or(0, |sessions| sessions.len()) as f64
    })?;
    let port = listener.stats();
    port.count_access(metrics)?;
    let help = "Connections that are open.";
    let open = move || port.counts().open as f64;
    metrics.read_one_when_asked(ReadKind::Gauge, "afd_connections_open", help, open)
}

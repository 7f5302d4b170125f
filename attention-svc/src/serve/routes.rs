//! What answers on the port: the API of both faces, profiles, and membership, around the parts of a rank that run.
use std::sync::Arc;

use afd_common::net::Tokens;
use afd_common::telemetry::Metrics;
use axum::Router;
use tokio::sync::watch;

use super::{ServeError, ffn};
use crate::api::{self, Api, ApiLimits, ApiParts, Readiness, ServedBy, ServedModel};
use crate::config::ServeConfig;
use crate::engine::EngineHandle;
use crate::membership::Membership;
use crate::membership::peers::Peers;
use crate::profile;
use crate::remote_ffn::stats::FfnStats;
use crate::text::Text;

/// What they are made of.
pub(super) struct Parts<'a> {
    pub(super) config: &'a ServeConfig,
    pub(super) engine: &'a EngineHandle,
    pub(super) stats: &'a FfnStats,
    pub(super) ffn: &'a ffn::Running,
    pub(super) peers: &'a Arc<Peers>,
    pub(super) readiness: &'a watch::Sender<Readiness>,
    pub(super) metrics: Metrics,
    pub(super) by: ServedBy,
    pub(super) model: ServedModel,
    pub(super) text: Text,
}

impl Parts<'_> {
    /// All of them.
    ///
    /// # Errors
    /// Mistakes of this software: a metric's name that is taken, broken descriptors.
    pub(super) fn into_router(self) -> Result<Router, ServeError> {
        let grpc = tonic::service::Routes::new(self.membership().service());
        let max_body_bytes = self.config.capacity.max_body_bytes;
        let reports = Arc::clone(&self.stats.reports);
        let profile =
            profile::route::router(self.engine.clone(), reports, self.config.ffn.rank, max_body_bytes);
        let trace = &self.config.trace;
        let api = Api::new(ApiParts {
            engine: Arc::new(self.engine.clone()),
            model: self.model,
            by: self.by,
            text: self.text,
            limits: ApiLimits { max_body_bytes },
            readiness: self.readiness.subscribe(),
            ffn_peers: self.ffn.peers(),
            peers: Arc::clone(self.peers),
            metrics: self.metrics,
            tracing: api::RequestTracing { spans: trace.spans.clone(), sampling: trace.sampling },
        })?;
        Ok(api::router(api, grpc, profile)?)
    }

    fn membership(&self) -> Membership {
        let (is_ready, ffn_peers) = (self.readiness.subscribe(), self.ffn.peers());
        let join_token = &self.config.ffn.join_token;
        Membership {
            announced: self.ffn.announced(),
            peers: Arc::clone(self.peers),
            join_token: (!join_token.is_empty()).then(|| Tokens::one(join_token)),
            fingerprint: self.model.identity.fingerprint.clone(),
            is_ready: Box::new(move || is_ready.borrow().is_ready()),
            ffn_peers: Box::new(move || ffn_peers().in_use),
            used_names: self.ffn.used_names(),
            shard_count: self.ffn.shard_count(),
        }
    }
}

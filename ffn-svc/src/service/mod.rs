//! Everything that an FFN rank serves on its one port, beside the links: gRPC services, health, metrics.
use std::sync::Arc;

use afd_common::link::{LinkKind, attach, inline};
use afd_common::net::{LinkAcceptor, add_reflection, messages};
use afd_common::proto::v1::ffn_control_service_server::FfnControlServiceServer;
use afd_common::proto::v1::inference_service_server::InferenceServiceServer;
use afd_common::proto::v1::layer_stage_service_server::LayerStageServiceServer;
use afd_common::proto::v1::membership_service_server::MembershipServiceServer;
use afd_common::telemetry::Metrics;
use axum::Router;

mod health;
mod http;
mod layer_stage;
mod refuse;

pub use health::{Health, Phase};

use crate::session::control::{self, Control};
use crate::session::sessions::Sessions;
use layer_stage::LayerStages;
use refuse::WrongRole;

/// HTTP routes and gRPC services.
///
/// # Errors
/// When the descriptors for reflection cannot be read: a mistake of the build.
pub fn router(
    sessions: &Arc<Sessions>,
    health: &Health,
    metrics: &Metrics,
    max_body_bytes: u32,
) -> Result<Router, tonic_reflection::server::Error> {
    let control = FfnControlServiceServer::new(Control::new(Arc::clone(sessions)))
        .max_decoding_message_size(control::MAX_MESSAGE_BYTES);
    let stages = LayerStageServiceServer::new(LayerStages::new(Arc::clone(sessions)))
        .max_decoding_message_size(inline::max_message_bytes(max_body_bytes));
    let refused = WrongRole::new(&sessions.settings().identity);
    let grpc = tonic::service::Routes::new(control)
        .add_service(stages)
        .add_service(InferenceServiceServer::new(refused.clone()))
        .add_service(MembershipServiceServer::new(refused))
        .add_service(health.service());
    // What is refused here is not listed.
    let grpc = add_reflection(grpc, &["afd.v1.FfnControlService", "afd.v1.LayerStageService"])?
        .into_axum_router()
        .reset_fallback();
    let identity = &sessions.settings().identity;
    let http = http::routes(health.clone(), refuse::sentence(identity), Arc::clone(sessions), metrics);
    Ok(http.merge(messages::guard(grpc, None)))
}

/// Whether a call's requests are a stream that lasts as long as the call.
pub fn is_stream(path: &str) -> bool {
    matches!(path, "/afd.v1.FfnControlService/Steps" | "/afd.v1.LayerStageService/StreamStages")
}

/// Attaches connections to the links that were granted to sessions.
pub fn link_acceptor(sessions: &Arc<Sessions>) -> LinkAcceptor {
    let sessions = Arc::clone(sessions);
    Arc::new(move |stream, peer| {
        let patience = sessions.settings().attach_timeout;
        let granted = |ticket: &_| sessions.attach(ticket, &[LinkKind::Tcp, LinkKind::Shm]);
        match attach::answer(stream, patience, granted) {
            Ok((link, session)) => sessions.adopt(link, &session),
            Err(error) => tracing::warn!(%peer, %error, "a connection was not attached to a link"),
        }
    })
}

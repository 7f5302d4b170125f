//! Whether a rank is ready, as everybody may ask, and whether it is of the role that it was taken for: health knows the
//! service of each role by its name.
use afd_common::net::client::words;
use afd_common::proto::v1;
use anyhow::{anyhow, bail};
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::dial::DialedChannel;

/// What a rank of the role serves, what it is called, and the program that probes it.
fn known_as(role: v1::Role) -> [&'static str; 3] {
    match role {
        v1::Role::Ffn => ["afd.v1.FfnControlService", "an FFN rank (ffn-svc)", "ffn-svc probe"],
        _ => ["afd.v1.InferenceService", "an attention rank (attention-svc)", "attention-svc probe"],
    }
}

/// Asks a rank of `role` for its health.
///
/// # Errors
/// When it is not ready, or says what is there instead.
pub async fn check_ready(channel: DialedChannel, role: v1::Role) -> anyhow::Result<()> {
    let other = if role == v1::Role::Ffn { v1::Role::Attention } else { v1::Role::Ffn };
    let ([service, name, _], [other_service, other_name, probe]) = (known_as(role), known_as(other));
    let mut client = HealthClient::new(channel);
    match serves(&mut client, service).await? {
        Some(true) => return Ok(()),
        Some(false) => bail!("is not ready (GET /ready says why)"),
        None => {}
    }
    match serves(&mut client, other_service).await? {
        Some(_) => bail!("is {other_name}, not {name}: `{probe}` asks it"),
        None => bail!("speaks gRPC, and is neither {name} nor {other_name}"),
    }
}

/// Whether a service of this name serves there; `None` where there is none.
async fn serves(client: &mut HealthClient<DialedChannel>, service: &str) -> anyhow::Result<Option<bool>> {
    match client.check(HealthCheckRequest { service: service.into() }).await {
        Ok(answer) => Ok(Some(answer.into_inner().status() == ServingStatus::Serving)),
        Err(status) if matches!(status.code(), Code::NotFound | Code::Unimplemented) => Ok(None),
        Err(status) => Err(anyhow!("does not say how it is: {}", words(&status))),
    }
}

//! `FfnControlService`: the face of [`Sessions`] over gRPC.
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::proto::v1::ffn_control_service_server::FfnControlService;
use afd_common::proto::{PROTOCOL_MAJOR, PROTOCOL_MINOR, v1};
use afd_common::spelling::count;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::registry::Place;
use super::sessions::Sessions;
use super::steps;
use super::stream_links::is_stream_driven;

/// Most bytes of a probe's payload.
const MAX_PROBE_BYTES: usize = 4 << 20;
/// Largest message of this service: a probe, and what surrounds its payload.
pub const MAX_MESSAGE_BYTES: usize = MAX_PROBE_BYTES + 1024;

/// Callers whose refusal is remembered, so that whoever tries on is warned about once.
const MAX_REFUSED: usize = 64;
/// Of a caller's place, before it is known to be anything.
const MAX_PLACE_CHARS: usize = 200;

/// See the module's head.
pub struct Control {
    sessions: Arc<Sessions>,
    /// Who was refused and why, or let in with a remark (`Ok`), the oldest first, until somebody of that place is let in
    /// without one.
    refused: Mutex<VecDeque<(String, Code)>>,
}

impl Control {
    /// Over these sessions.
    pub fn new(sessions: Arc<Sessions>) -> Self {
        Self { sessions, refused: Mutex::default() }
    }

    /// Whether this is new: the caller was not refused so already.
    fn note_refused(&self, place: &str, code: Code) -> bool {
        let mut refused = self.lock_refused();
        let is_new = !refused.iter().any(|(who, why)| (who.as_str(), *why) == (place, code));
        if is_new {
            if refused.len() == MAX_REFUSED {
                refused.pop_front();
            }
            refused.push_back((place.to_owned(), code));
        }
        is_new
    }

    /// What an operator should know of a caller that was let in.
    fn remark(&self, request: &v1::JoinRequest, joined: &v1::JoinResponse) -> Option<String> {
        let asks_for_token = self.sessions.settings().offer.join_token.is_some();
        let unasked = (!asks_for_token && !request.join_token.is_empty()).then(|| {
            "it shows a join token, and this FFN rank asks for none: anybody may join (--join-token-file)"
                .into()
        });
        let (stages, tokens) = (joined.max_stages, joined.max_tokens_per_stage);
        let too_few = (stages < request.max_stages || tokens < request.max_tokens_per_stage).then(|| {
            let [wants, has] = [(request.max_stages, request.max_tokens_per_stage), (stages, tokens)]
                .map(|(stages, tokens)| format!("{} of {}", count(stages, "stage"), count(tokens, "token")));
            format!("it asks for {wants}, gets {has}, and may not use this rank (--max-stages, --max-tokens-per-stage)")
        });
        [unasked, too_few].into_iter().flatten().reduce(|all: String, one| format!("{all}; {one}"))
    }

    fn lock_refused(&self) -> MutexGuard<'_, VecDeque<(String, Code)>> {
        self.refused.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[tonic::async_trait]
impl FfnControlService for Control {
    async fn join(&self, request: Request<v1::JoinRequest>) -> Result<Response<v1::JoinResponse>, Status> {
        let peer = request.remote_addr();
        let request = request.into_inner();
        let place = request.identity.as_ref().map(|identity| Place::of(identity).to_string());
        let place: String = place.unwrap_or_default().chars().take(MAX_PLACE_CHARS).collect();
        let joined = self.sessions.join(&request, peer.map(|peer| peer.ip()));
        match &joined {
            Ok(joined) => {
                let remark = self.remark(&request, joined);
                // One that was remarked on already stays so.
                let stays = |why: Code| why == Code::Ok && remark.is_some();
                self.lock_refused().retain(|(who, why)| *who != place || stays(*why));
                if let Some(remark) = remark
                    && self.note_refused(&place, Code::Ok)
                {
                    tracing::warn!(from = peer.map(|peer| peer.to_string()), peer = place, "{remark}");
                }
            }
            Err(status) => {
                let (from, why) = (peer.map(|peer| peer.to_string()), status.message());
                if self.note_refused(&place, status.code()) {
                    tracing::warn!(from, peer = place, why, "join refused");
                } else {
                    tracing::debug!(from, peer = place, why, "join refused");
                }
            }
        }
        joined.map(Response::new)
    }

    async fn open_links(
        &self,
        request: Request<v1::OpenLinksRequest>,
    ) -> Result<Response<v1::OpenLinksResponse>, Status> {
        let request = request.into_inner();
        let session = self.sessions.find(&request.session_id)?;
        let links = match request.links.as_slice() {
            [link] if is_stream_driven(link.kind()) => {
                vec![self.sessions.open_stream_link(&session, link).await?]
            }
            links => self.sessions.open_links(&session, links)?,
        };
        Ok(Response::new(v1::OpenLinksResponse { links }))
    }

    type StepsStream = ReceiverStream<Result<v1::StepsResponse, Status>>;

    async fn steps(
        &self,
        request: Request<Streaming<v1::StepsRequest>>,
    ) -> Result<Response<Self::StepsStream>, Status> {
        let mut requests = request.into_inner();
        let (session, first) = steps::open(&self.sessions, &mut requests).await?;
        let (out, responses) = mpsc::channel(steps::OUT_QUEUE);
        let serve = steps::serve(Arc::clone(&self.sessions), session, first, requests, out);
        self.sessions.tasks().spawn(serve);
        Ok(Response::new(ReceiverStream::new(responses)))
    }

    async fn probe(&self, request: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        let payload = request.into_inner().payload;
        if payload.len() > MAX_PROBE_BYTES {
            let message = format!("`payload`: {} bytes, at most {MAX_PROBE_BYTES}", payload.len());
            return Err(Status::invalid_argument(message));
        }
        let settings = self.sessions.settings();
        let shard = self.sessions.engine().spec().shard;
        Ok(Response::new(v1::ProbeResponse {
            payload,
            answered_at_us: steps::now_us(),
            identity: Some(settings.identity.clone()),
            shard: Some(v1::ShardSpec { index: shard.index(), count: shard.count() }),
            model: Some(settings.offer.model.clone()),
            link_kinds: settings.offer.link_kinds.iter().map(|kind| (*kind).into()).collect(),
            protocol_major: PROTOCOL_MAJOR,
            protocol_minor: PROTOCOL_MINOR,
            software_version: env!("CARGO_PKG_VERSION").into(),
            draining: self.sessions.draining().borrow().is_some(),
        }))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        let timeout = Duration::from_millis(request.get_ref().timeout_ms.into());
        tracing::info!(?timeout, "draining: asked to by a peer");
        self.sessions.drain(Instant::now() + timeout);
        Ok(Response::new(v1::DrainResponse { open_sessions: self.sessions.len() as u32 }))
    }
}

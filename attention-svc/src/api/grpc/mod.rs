//! `InferenceService`, health and reflection: the gRPC face of the same engine.
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afd_common::net::{add_reflection, health};
use afd_common::proto::v1::inference_service_server::{InferenceService, InferenceServiceServer};
use afd_common::proto::{PROTOCOL_MAJOR, PROTOCOL_MINOR, v1};
use afd_common::spelling::shown;
use afd_common::telemetry::RequestId;
use futures::{Stream, stream};
use serde_json::Map;
use tonic::metadata::MetadataMap;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::error::ApiError;
use super::forward::Arrived;
use super::generation::{Generation, Update};
use super::openai::chat::check_role;
use super::plan::{Incoming, Plan};
use super::prompt::PromptSource;
use super::validate::{FieldError, FieldNames, GenerationSpec, SamplingSpec, StopSpec};
use super::{Api, Readiness, forward, ids};
use crate::request::{FinishReason, TokenLogprobs};
use crate::text::tokenizer::SpecialTokens;
use crate::text::{ChatMessage, Tokenizer};

/// Every gRPC service of this process; `extra` are those that are not about requests.
pub(super) fn services(api: Arc<Api>, extra: Routes) -> Result<Routes, tonic_reflection::server::Error> {
    let limit = api.limits.max_body_bytes;
    let health = health::service(api.readiness.clone(), serves);
    let inference = InferenceServiceServer::new(Face { api }).max_decoding_message_size(limit);
    let listed = ["afd.v1.InferenceService", "afd.v1.MembershipService"];
    add_reflection(extra.add_service(inference).add_service(health), &listed)
}

/// `grpc.health.v1`: the empty name and every service of this process answer whether it is ready; `live` and `ready` are
/// names of their own, so that a probe can ask for either.
fn serves(readiness: &Readiness, service: &str) -> Option<bool> {
    match service {
        "live" => Some(readiness.is_live()),
        "" | "ready" | "afd.v1.InferenceService" | "afd.v1.MembershipService" => Some(readiness.is_ready()),
        _ => None,
    }
}

struct Face {
    api: Arc<Api>,
}

type GenerateStream = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl InferenceService for Face {
    type GenerateStream = GenerateStream;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let arrived = Arrived::of(request.extensions());
        let deadline = timeout(request.metadata()).map_err(ApiError::from)?.map(|timeout| arrived + timeout);
        let headers = request.metadata().clone().into_headers();
        let plan = plan(&self.api, request.into_inner(), deadline, Incoming::read(&headers))?;
        let n = plan.checked.n;
        let generation = Generation::start(Arc::clone(&self.api), plan).await?;
        let streaming = Streaming { generation, api: Arc::clone(&self.api), n, ended: false };
        let responses = stream::unfold(streaming, |mut streaming| async move {
            let response = streaming.next().await?;
            Some((response, streaming))
        });
        Ok(Response::new(Box::pin(responses)))
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        let request = request.into_inner();
        let add = request.add_special_tokens.unwrap_or(true);
        let special = if add { SpecialTokens::Add } else { SpecialTokens::AsWritten };
        let ids = self.api.tokenize(PromptSource::Text(request.text), special, "text").await?;
        Ok(Response::new(v1::TokenizeResponse { ids }))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        let request = request.into_inner();
        let ids: Vec<i64> = request.ids.into_iter().map(i64::from).collect();
        let skip = request.skip_special_tokens.unwrap_or(false);
        let text = self.api.detokenize(&ids, skip, "ids").await?;
        Ok(Response::new(v1::DetokenizeResponse { text }))
    }

    async fn get_model_info(
        &self,
        _: Request<v1::GetModelInfoRequest>,
    ) -> Result<Response<v1::GetModelInfoResponse>, Status> {
        let (model, by, ffn) = (&self.api.model, &self.api.by, (self.api.ffn_peers)());
        Ok(Response::new(v1::GetModelInfoResponse {
            name: model.name.clone(),
            model: Some(model.identity.clone()),
            max_model_len: model.limits.max_model_len,
            vocab_size: model.limits.vocab_size,
            eos_token_ids: model.limits.eos_token_ids.clone(),
            ffn_peers: ffn.in_use,
            ffn_absent: ffn.absent,
            attention_absent: self.api.peers.absent(),
            identity: Some(by.identity.clone()),
            link_kinds: by.link_kinds.iter().map(ToString::to_string).collect(),
            answered_at_us: crate::api::unix_time().as_micros() as u64,
            protocol_major: PROTOCOL_MAJOR,
            protocol_minor: PROTOCOL_MINOR,
            software_version: env!("CARGO_PKG_VERSION").into(),
            not_ready: match self.api.readiness.borrow().clone() {
                state if state.is_ready() => String::new(),
                state => state.reason().unwrap_or_else(|| state.word().to_owned()),
            },
        }))
    }

    async fn abort(&self, request: Request<v1::AbortRequest>) -> Result<Response<v1::AbortResponse>, Status> {
        let sequences = self.api.running.sequences(&request.get_ref().request_id);
        let aborted = sequences.is_some();
        sequences.into_iter().flatten().for_each(|id| self.api.engine.abort(id));
        let aborted = aborted || forward::abort_elsewhere(&self.api, request).await;
        Ok(Response::new(v1::AbortResponse { aborted }))
    }
}

/// Reads and checks a request.
fn plan(
    api: &Api,
    request: v1::GenerateRequest,
    deadline: Option<Instant>,
    trace: Incoming,
) -> Result<Plan, ApiError> {
    api.check_model(Some(request.model.as_str()).filter(|name| !name.is_empty()))?;
    let request_id = match request.request_id.as_str() {
        "" => ids::new_id("gen"),
        name => {
            let name: RequestId = name.parse().map_err(|_| {
                let what = format!(
                    "must be at most {} printable ASCII characters without spaces",
                    RequestId::MAX_LEN
                );
                FieldError::new("request_id", what)
            })?;
            name.to_string()
        }
    };
    let spec = GenerationSpec {
        sampling: sampling(request.sampling.unwrap_or_default()),
        stop: stop(request.stop.unwrap_or_default()),
        n: request.n.map(i64::from),
        logprobs: request.logprobs.map(i64::from),
        prompt_logprobs: request.prompt_logprobs.map(i64::from),
    };
    let checked = spec.check(&api.model.limits, FieldNames::GRPC)?;
    let (prompt, prompt_param) = prompt(request.prompt)?;
    let operation = if prompt_param == "conversation" { "chat" } else { "text_completion" };
    Ok(Plan { request_id, prompts: vec![prompt], prompt_param, checked, deadline, trace, operation })
}

fn prompt(prompt: Option<v1::generate_request::Prompt>) -> Result<(PromptSource, &'static str), FieldError> {
    use v1::generate_request::Prompt;
    match prompt {
        None => Err(FieldError::new("prompt", "is missing: set text, token_ids or conversation")),
        Some(Prompt::Text(text)) => Ok((PromptSource::Text(text), "text")),
        Some(Prompt::TokenIds(ids)) => Ok((PromptSource::Ids(ids.ids), "token_ids")),
        Some(Prompt::Conversation(conversation)) => {
            let add_generation_prompt = conversation.add_generation_prompt.unwrap_or(true);
            if conversation.messages.is_empty() {
                return Err(FieldError::new("conversation.messages", "must not be empty"));
            }
            let messages = conversation
                .messages
                .into_iter()
                .enumerate()
                .map(|(i, message)| {
                    let role = check_role(message.role, &format!("conversation.messages[{i}].role"))?;
                    Ok(ChatMessage { role, content: message.content, name: None })
                })
                .collect::<Result<_, FieldError>>()?;
            Ok((PromptSource::Chat { messages, add_generation_prompt, extra: Map::new() }, "conversation"))
        }
    }
}

fn sampling(sampling: v1::SamplingParams) -> SamplingSpec {
    let mut logit_bias: Vec<(u64, f64)> =
        sampling.logit_bias.iter().map(|(id, bias)| (u64::from(*id), f64::from(*bias))).collect();
    logit_bias.sort_unstable_by_key(|(id, _)| *id);
    SamplingSpec {
        temperature: sampling.temperature.map(f64::from),
        top_p: sampling.top_p.map(f64::from),
        top_k: sampling.top_k.map(i64::from),
        min_p: sampling.min_p.map(f64::from),
        repetition_penalty: sampling.repetition_penalty.map(f64::from),
        presence_penalty: sampling.presence_penalty.map(f64::from),
        frequency_penalty: sampling.frequency_penalty.map(f64::from),
        seed: sampling.seed,
        logit_bias,
    }
}

fn stop(stop: v1::StopConditions) -> StopSpec {
    StopSpec {
        max_tokens: stop.max_tokens.map(i64::from),
        default_max_tokens: None,
        min_tokens: stop.min_tokens.map(i64::from),
        stop: stop.stop,
        stop_token_ids: stop.stop_token_ids.into_iter().map(i64::from).collect(),
        ignore_eos: stop.ignore_eos,
        include_stop: stop.include_stop_in_output,
        skip_special_tokens: stop.skip_special_tokens,
    }
}

struct Streaming {
    generation: Generation,
    api: Arc<Api>,
    n: usize,
    ended: bool,
}

impl Streaming {
    async fn next(&mut self) -> Option<Result<v1::GenerateResponse, Status>> {
        if self.ended {
            return None;
        }
        match self.generation.next().await? {
            Ok(update) => Some(Ok(self.response(update))),
            Err(error) => {
                self.ended = true;
                Some(Err(error.into()))
            }
        }
    }

    fn response(&self, update: Update) -> v1::GenerateResponse {
        let tokenizer = &self.api.text.tokenizer;
        let prompt = &self.generation.prompts()[update.index / self.n];
        let mut response = v1::GenerateResponse {
            request_id: self.generation.name().to_string(),
            index: u32::try_from(update.index).unwrap_or(u32::MAX),
            text: update.text,
            ..v1::GenerateResponse::default()
        };
        if let Some(token) = update.token {
            response.token_ids.push(token.id);
            response.logprobs.extend(token.logprobs.map(|l| logprobs(tokenizer, token.id, &l)));
        }
        if let Some(known) = update.prompt_logprobs {
            response.prompt_logprobs = prompt
                .iter()
                .zip(&known)
                .map(|(id, l)| l.as_ref().map_or_else(Default::default, |l| logprobs(tokenizer, *id, l)))
                .collect();
        }
        if let Some((reason, usage)) = update.finished {
            response.finish_reason = match reason {
                FinishReason::Stop => v1::FinishReason::Stop,
                FinishReason::Length => v1::FinishReason::Length,
                FinishReason::Cancelled => v1::FinishReason::Cancelled,
            }
            .into();
            response.usage = Some(v1::Usage {
                prompt_tokens: usage.prompt_tokens,
                completion_tokens: usage.completion_tokens,
                cached_tokens: usage.cached_tokens,
            });
        }
        response
    }
}

fn logprobs(tokenizer: &Tokenizer, id: u32, known: &TokenLogprobs) -> v1::TokenLogprobs {
    let entry = |token_id: u32, logprob: f32| v1::TokenLogprob {
        token_id,
        logprob,
        text: String::from_utf8_lossy(&tokenizer.token_bytes(token_id)).into_owned(),
    };
    v1::TokenLogprobs {
        chosen: Some(entry(id, known.chosen)),
        top: known.top.iter().map(|(id, logprob)| entry(*id, *logprob)).collect(),
    }
}

/// `grpc-timeout` of a request: at most eight digits and a unit.
fn timeout(metadata: &MetadataMap) -> Result<Option<Duration>, FieldError> {
    let Some(value) = metadata.get("grpc-timeout") else { return Ok(None) };
    let parse = || {
        let text = value.to_str().ok()?;
        let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let amount = digits.parse::<u32>().ok().filter(|_| digits.len() <= 8)?;
        match unit {
            "H" => Some(Duration::from_secs(u64::from(amount) * 3600)),
            "M" => Some(Duration::from_secs(u64::from(amount) * 60)),
            "S" => Some(Duration::from_secs(amount.into())),
            "m" => Some(Duration::from_millis(amount.into())),
            "u" => Some(Duration::from_micros(amount.into())),
            "n" => Some(Duration::from_nanos(amount.into())),
            _ => None,
        }
    };
    // More than a day is as good as none, and an instant so far away may not exist.
    match parse() {
        Some(timeout) => Ok(Some(timeout).filter(|t| *t <= Duration::from_secs(24 * 3600))),
        None => Err(FieldError::new(
            "grpc-timeout",
            format!("is not a timeout: {}", shown(&format!("{value:?}"))),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        let of = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            timeout(&metadata)
        };
        assert_eq!(of("1m"), Ok(Some(Duration::from_millis(1))));
        assert_eq!(of("2S"), Ok(Some(Duration::from_secs(2))));
        assert_eq!(of("99999999H"), Ok(None));
        assert!(of("S").is_err() && of("-1S").is_err() && of("999999999S").is_err());
    }
}

//! An engine without a model: it says the prompt again, and a server around it.
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use afd_common::net::{Listener, Options};
use afd_common::proto::v1;
use afd_common::telemetry::Metrics;
use attention_svc::api::validate::{ModelLimits, SamplingDefaults};
use attention_svc::api::{
    self, Api, ApiLimits, ApiParts, Engine, FfnRanks, Readiness, RequestTracing, ServedBy, ServedModel,
};
use attention_svc::membership::peers::{PeerSettings, Peers};
use attention_svc::request::{
    ChosenToken, FinishReason, SequenceError, SequenceEvent, SequenceId, SequenceRequest, TokenLogprobs,
    Usage,
};
use attention_svc::text::{Text, TokenizerFile};
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

/// How the engine behaves; chosen per test.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    /// Fail after so many tokens.
    pub(crate) fail_after: Option<(u32, String)>,
    /// Refuse further sequences while so many run.
    pub(crate) max_running: Option<usize>,
    /// Close the channel without a last word after so many tokens.
    pub(crate) drop_after: Option<u32>,
    /// Prompt tokens that were found in a cache.
    pub(crate) cached_tokens: u32,
    /// Between tokens.
    pub(crate) pause: Duration,
}

/// Echoes the prompt, over and over.
#[derive(Default)]
pub(crate) struct FakeEngine {
    script: Mutex<Script>,
    next: AtomicU64,
    running: Arc<AtomicUsize>,
    /// Sequences that were aborted while they ran.
    pub(crate) aborted: Arc<AtomicUsize>,
    aborts: Mutex<Vec<(SequenceId, Arc<Notify>)>>,
    /// What was submitted last, for a look at it.
    pub(crate) last: Mutex<Option<String>>,
}

impl FakeEngine {
    pub(crate) fn script(&self, script: Script) {
        *self.script.lock().unwrap() = script;
    }

    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// Waits until nothing runs.
    pub(crate) async fn idle(&self) {
        tokio::time::timeout(Duration::from_secs(5), async {
            while self.running() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await
        .expect("sequences run on");
    }
}

impl Engine for FakeEngine {
    fn submit(&self, request: SequenceRequest) -> Result<SequenceId, SequenceError> {
        let script = self.script.lock().unwrap().clone();
        let waiting = self.running();
        if script.max_running.is_some_and(|max| waiting >= max) {
            return Err(SequenceError::QueueFull { waiting });
        }
        *self.last.lock().unwrap() = Some(format!("{request:?}"));
        let id = SequenceId(self.next.fetch_add(1, Ordering::SeqCst));
        let abort = Arc::new(Notify::new());
        self.aborts.lock().unwrap().push((id, Arc::clone(&abort)));
        self.running.fetch_add(1, Ordering::SeqCst);
        let (running, aborted) = (Arc::clone(&self.running), Arc::clone(&self.aborted));
        tokio::spawn(async move {
            let ended_early = tokio::select! {
                () = echo(&request, &script) => false,
                () = abort.notified() => true,
                () = request.events.closed() => true,
            };
            if ended_early {
                aborted.fetch_add(1, Ordering::SeqCst);
                let _ = request.events.send(finished(FinishReason::Cancelled, &request, 0, &script));
            }
            running.fetch_sub(1, Ordering::SeqCst);
        });
        Ok(id)
    }

    fn abort(&self, id: SequenceId) {
        let mut aborts = self.aborts.lock().unwrap();
        if let Some(at) = aborts.iter().position(|(other, _)| *other == id) {
            aborts.swap_remove(at).1.notify_one();
        }
    }
}

fn finished(
    reason: FinishReason,
    request: &SequenceRequest,
    completion_tokens: u32,
    script: &Script,
) -> SequenceEvent {
    let prompt_tokens = request.prompt.len() as u32;
    let usage = Usage { prompt_tokens, completion_tokens, cached_tokens: script.cached_tokens };
    SequenceEvent::Finished { reason, usage }
}

fn known(id: u32, best: Option<u8>) -> Option<TokenLogprobs> {
    let top = (0..u32::from(best?)).map(|i| (id ^ i, -0.25 - i as f32)).collect();
    Some(TokenLogprobs { chosen: -0.25, rank: 1, top })
}

async fn echo(request: &SequenceRequest, script: &Script) {
    let tell = |event| drop(request.events.send(event));
    if request.deadline.is_some_and(|d| d <= std::time::Instant::now()) {
        return tell(SequenceEvent::Failed(SequenceError::DeadlineExceeded { waited_ms: 0 }));
    }
    if let Some(best) = request.prompt_logprobs {
        let first = std::iter::once(None);
        let rest = request.prompt.iter().skip(1).map(|id| known(*id, Some(best)));
        tell(SequenceEvent::PromptLogprobs(first.chain(rest).collect()));
    }
    // Stop tokens of a real model come after the text, not with its first token.
    let said: Vec<u32> = request.prompt.iter().copied().collect();
    let mut count = 0;
    for id in said.iter().cycle() {
        if let Some((after, why)) = &script.fail_after
            && count == *after
        {
            return tell(SequenceEvent::Failed(SequenceError::FfnUnavailable(why.clone())));
        }
        if script.drop_after == Some(count) {
            return;
        }
        if script.pause.is_zero() {
            tokio::task::yield_now().await
        } else {
            tokio::time::sleep(script.pause).await
        }
        count += 1;
        tell(SequenceEvent::Token(ChosenToken { id: *id, logprobs: known(*id, request.logprobs) }));
        if request.stop.stop_token_ids.contains(id) && count > request.stop.min_tokens {
            return tell(finished(FinishReason::Stop, request, count, script));
        }
        if count >= request.stop.max_tokens {
            return tell(finished(FinishReason::Length, request, count, script));
        }
    }
}

pub(crate) const VOCAB_SIZE: u32 = 832;
pub(crate) const MAX_MODEL_LEN: u32 = 512;

/// A server around the fake engine with a real tokenizer.
pub(crate) struct Server {
    pub(crate) engine: Arc<FakeEngine>,
    pub(crate) address: SocketAddr,
    pub(crate) readiness: watch::Sender<Readiness>,
    pub(crate) http: reqwest::Client,
    stop: CancellationToken,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Server {
    pub(crate) async fn start(model: &str) -> Self {
        Self::start_with(model, Options::default()).await
    }

    pub(crate) async fn start_with(model: &str, options: Options) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny").join(model);
        let engine = Arc::new(FakeEngine::default());
        let (readiness, readiness_receiver) = watch::channel(Readiness::Ready);
        let limits = ModelLimits {
            vocab_size: VOCAB_SIZE,
            max_model_len: MAX_MODEL_LEN,
            eos_token_ids: vec![764, 767],
            defaults: SamplingDefaults::default(),
        };
        let identity = v1::ModelIdentity { fingerprint: "0123456789abcdef".into(), ..Default::default() };
        let api = Api::new(ApiParts {
            engine: Arc::clone(&engine) as Arc<dyn Engine>,
            model: ServedModel { name: "tiny".into(), limits, identity },
            by: ServedBy::default(),
            text: Text::load(&folder, TokenizerFile::Required).unwrap(),
            limits: ApiLimits::default(),
            readiness: readiness_receiver,
            ffn_peers: Arc::new(FfnRanks::default),
            peers: Arc::new(Peers::new(PeerSettings::default())),
            metrics: Metrics::new(),
            tracing: RequestTracing::default(),
        })
        .unwrap();
        let router = api::router(api, tonic::service::Routes::default(), axum::Router::new()).unwrap();
        let listener = Listener::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
        let (address, stop) = (listener.address(), CancellationToken::new());
        let http = reqwest::Client::builder().timeout(Duration::from_secs(20)).build().unwrap();
        tokio::spawn(listener.serve(router, None, options, stop.clone()));
        Self { engine, address, readiness, http, stop }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Status and body of a POST.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.post_text(path, body.to_string()).await
    }

    pub(crate) async fn post_text(&self, path: &str, body: impl Into<reqwest::Body>) -> (u16, Value) {
        let answer = self.http.post(self.url(path)).body(body).send().await.unwrap();
        let status = answer.status().as_u16();
        let text = answer.text().await.unwrap();
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// Events of a stream, `[DONE]` as a string.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let answer = self.http.post(self.url(path)).body(body.to_string()).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["content-type"], "text/event-stream; charset=utf-8");
        events(&answer.text().await.unwrap())
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        let answer = self.http.get(self.url(path)).send().await.unwrap();
        let status = answer.status().as_u16();
        let text = answer.text().await.unwrap();
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }
}

pub(crate) fn events(text: &str) -> Vec<Value> {
    text.split("\n\n")
        .filter(|event| !event.is_empty())
        .map(|event| {
            let data = event.split('\n').find_map(|line| line.strip_prefix("data: ")).expect(event);
            serde_json::from_str(data).unwrap_or(Value::String(data.into()))
        })
        .collect()
}

//! One request while it runs: its sequences in the engine, and their events as text. Both the streaming and the unary
//! answers of both faces are made of the [`Update`]s of this one type.
use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt;
use futures::stream::SelectAll;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::Api;
use super::error::ApiError;
use super::plan::Plan;
use super::request_span::RequestSpan;
use super::running::Registered;
use crate::request::{
    ChosenToken, FinishReason, SequenceError, SequenceEvent, SequenceId, SequenceRequest, TokenLogprobs,
    Usage,
};
use crate::text::OutputText;

/// What one event of one sequence adds to the answer.
#[derive(Clone, Debug)]
pub struct Update {
    /// Which sequence: prompt index × n + continuation.
    pub index: usize,
    /// Text that became final.
    pub text: String,
    /// The token behind it, if any.
    pub token: Option<ChosenToken>,
    /// Of the prompt; at most once, before the first token.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    /// Set in the last update of a sequence.
    pub finished: Option<(FinishReason, Usage)>,
}

/// A request that runs. Dropping it aborts what is left of it.
pub struct Generation {
    api: Arc<Api>,
    name: Arc<str>,
    /// Token ids of every prompt.
    prompts: Vec<Arc<[u32]>>,
    sequences: Vec<Sequence>,
    events: SelectAll<futures::stream::BoxStream<'static, (usize, Option<SequenceEvent>)>>,
    deadline: Option<Instant>,
    started: Instant,
    registered: Registered,
    /// When the request is recorded.
    span: Option<RequestSpan>,
    /// Continuations per prompt.
    n: usize,
    /// The caller was told an error: what is left ends because of it.
    failed: bool,
}

struct Sequence {
    id: SequenceId,
    output: OutputText,
    prompt_tokens: u32,
    last_token: Option<Instant>,
    /// A stop text is complete: the caller has everything but the engine's last word, which says what it cost.
    stopped: bool,
    done: bool,
}

impl Generation {
    /// Tokenizes the prompts, checks what could not be checked before and submits every sequence.
    ///
    /// # Errors
    /// [`ApiError`]; nothing runs then.
    pub async fn start(api: Arc<Api>, plan: Plan) -> Result<Self, ApiError> {
        let started = Instant::now();
        let mut span = RequestSpan::begin(&api.tracing, &plan, &api.model.name, started);
        let outcome = Self::start_recorded(api, plan, started, &mut span).await;
        match outcome {
            Ok(mut generation) => {
                generation.span = span;
                Ok(generation)
            }
            Err(error) => {
                if let Some(span) = &mut span {
                    span.handle_failed(&error);
                }
                Err(error)
            }
        }
    }

    async fn start_recorded(
        api: Arc<Api>,
        plan: Plan,
        started: Instant,
        span: &mut Option<RequestSpan>,
    ) -> Result<Self, ApiError> {
        let name: Arc<str> = plan.request_id.into();
        if let super::Readiness::Draining | super::Readiness::Dead(_) = *api.readiness.borrow() {
            return Err(SequenceError::ShuttingDown.into());
        }
        let registered =
            api.running.register(Arc::clone(&name)).ok_or_else(|| ApiError::Duplicate(name.to_string()))?;
        let mut prompts = Vec::with_capacity(plan.prompts.len());
        for prompt in plan.prompts {
            prompts.push(api.prompt_ids(prompt, plan.prompt_param).await?);
        }
        if let Some(span) = span {
            span.handle_tokenized();
        }
        let stops: Vec<_> = prompts
            .iter()
            .map(|prompt| plan.checked.stop_rules(prompt.len(), &api.model.limits))
            .collect::<Result<_, _>>()?;

        let mut generation = Self {
            prompts,
            sequences: Vec::new(),
            events: SelectAll::new(),
            deadline: plan.deadline,
            started,
            registered,
            span: None,
            n: plan.checked.n,
            failed: false,
            name,
            api,
        };
        for (prompt, stop) in stops.into_iter().enumerate() {
            for continuation in 0..plan.checked.n {
                let (events, receiver) = mpsc::unbounded_channel();
                let request = SequenceRequest {
                    request_id: Arc::clone(&generation.name),
                    prompt: Arc::clone(&generation.prompts[prompt]),
                    sampling: plan.checked.sampling_of(continuation),
                    stop: stop.clone(),
                    logprobs: plan.checked.logprobs,
                    prompt_logprobs: plan.checked.prompt_logprobs,
                    deadline: plan.deadline,
                    trace: span.as_ref().map(|span| Box::new(span.of_sequence())),
                    events,
                };
                // On an error, dropping what was submitted before aborts it.
                let output =
                    OutputText::new(Arc::clone(&generation.api.text.tokenizer), plan.checked.output.clone());
                generation.submit(request, output, receiver)?;
                if let Some(span) = span {
                    span.handle_submitted();
                }
            }
        }
        Ok(generation)
    }

    fn submit(
        &mut self,
        request: SequenceRequest,
        output: OutputText,
        receiver: mpsc::UnboundedReceiver<SequenceEvent>,
    ) -> Result<(), ApiError> {
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        let id = self.api.engine.submit(request).inspect_err(|_| {
            self.failed = true;
            self.api.counts.rejected.inc();
        })?;
        self.registered.add(id);
        let index = self.sequences.len();
        // The end of a channel is an event too: an engine that is gone must not look like silence.
        let ended = futures::stream::once(async { None });
        let events =
            UnboundedReceiverStream::new(receiver).map(Some).chain(ended).map(move |event| (index, event));
        self.events.push(events.boxed());
        self.sequences.push(Sequence {
            id,
            output,
            prompt_tokens,
            last_token: None,
            stopped: false,
            done: false,
        });
        Ok(())
    }

    /// Token ids of each prompt.
    pub fn prompts(&self) -> &[Arc<[u32]>] {
        &self.prompts
    }

    /// Name of the request.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The next update; `None` once every sequence has finished.
    ///
    /// # Errors
    /// The first sequence that fails ends the request.
    pub async fn next(&mut self) -> Option<Result<Update, ApiError>> {
        loop {
            if self.sequences.iter().all(|s| s.done) {
                return None;
            }
            let next = self.events.next();
            let event = match self.deadline {
                None => next.await,
                // The engine watches the deadline too; this is for when it is waiting itself.
                Some(deadline) => match tokio::time::timeout_at(deadline.into(), next).await {
                    Ok(event) => event,
                    Err(_) => return Some(self.handle_deadline()),
                },
            };
            let (index, event) = event?;
            if self.sequences[index].done {
                continue;
            }
            let update = if self.sequences[index].stopped {
                match event {
                    // What the engine chose before it heard of the stop is nobody's.
                    Some(SequenceEvent::Token(_) | SequenceEvent::PromptLogprobs(_)) => continue,
                    last => Ok(self.last_of_stopped(index, last)),
                }
            } else {
                match event {
                    Some(event) => self.update(index, event),
                    None => Err(ApiError::internal("the engine dropped the sequence")),
                }
            };
            if let Err(error) = &update {
                self.failed = true;
                self.api.counts.failed(error.code());
                tracing::warn!(request_id = %self.name, %error, "request failed");
                if let Some(span) = &mut self.span {
                    span.handle_failed(error);
                }
            }
            return Some(update);
        }
    }

    /// The deadline has passed: an error, unless all that is missing is the engine's last word on stopped sequences.
    fn handle_deadline(&mut self) -> Result<Update, ApiError> {
        let waits_for_text = self.sequences.iter().any(|s| !s.done && !s.stopped);
        let stopped = self.sequences.iter().position(|s| !s.done && s.stopped);
        if let Some(index) = stopped.filter(|_| !waits_for_text) {
            return Ok(self.last_of_stopped(index, None));
        }
        self.failed = true;
        self.api.counts.failed("deadline_exceeded");
        let waited_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let late = SequenceError::DeadlineExceeded { waited_ms }.into();
        if let Some(span) = &mut self.span {
            span.handle_failed(&late);
        }
        Err(late)
    }

    fn update(&mut self, index: usize, event: SequenceEvent) -> Result<Update, ApiError> {
        let mut update =
            Update { index, text: String::new(), token: None, prompt_logprobs: None, finished: None };
        let sequence = &mut self.sequences[index];
        match event {
            SequenceEvent::PromptLogprobs(logprobs) => update.prompt_logprobs = Some(logprobs),
            SequenceEvent::Token(token) => {
                let piece = sequence.output.push(token.id).map_err(ApiError::internal)?;
                update.text = piece.text;
                update.token = Some(token);
                let now = Instant::now();
                self.api.counts.token(now - sequence.last_token.unwrap_or(self.started), sequence.last_token);
                sequence.last_token = Some(now);
                if piece.stopped {
                    sequence.stopped = true;
                    self.api.engine.abort(sequence.id);
                }
            }
            SequenceEvent::Finished { reason, usage } => {
                let piece = sequence.output.finish().map_err(ApiError::internal)?;
                update.text = piece.text;
                let reason = if piece.stopped { FinishReason::Stop } else { reason };
                update.finished = Some((reason, usage));
            }
            SequenceEvent::Failed(error) => return Err(error.into()),
        }
        if let Some((reason, usage)) = update.finished {
            sequence.done = true;
            self.handle_end(index, reason, usage);
        }
        Ok(update)
    }

    /// The engine's last word on a sequence that a stop text ended: whatever it is, the answer is complete.
    fn last_of_stopped(&mut self, index: usize, last: Option<SequenceEvent>) -> Update {
        let sequence = &mut self.sequences[index];
        let cached_tokens = match last {
            Some(SequenceEvent::Finished { usage, .. }) => usage.cached_tokens,
            _ => 0,
        };
        let usage = Usage {
            prompt_tokens: sequence.prompt_tokens,
            completion_tokens: sequence.output.num_tokens(),
            cached_tokens,
        };
        sequence.done = true;
        self.handle_end(index, FinishReason::Stop, usage);
        let finished = Some((FinishReason::Stop, usage));
        Update { index, text: String::new(), token: None, prompt_logprobs: None, finished }
    }

    /// A sequence has ended well: counts it, and ends the request's span with the last one.
    fn handle_end(&mut self, index: usize, reason: FinishReason, usage: Usage) {
        if let Some(span) = &mut self.span {
            span.handle_finished(reason_name(reason), usage, index.is_multiple_of(self.n));
        }
        if self.sequences.iter().all(|s| s.done) {
            self.span = None;
        }
        self.count_end(index, reason, usage);
    }

    /// Counts and logs a sequence that has ended otherwise than by an error.
    fn count_end(&self, index: usize, reason: FinishReason, usage: Usage) {
        let elapsed = self.started.elapsed();
        self.api.counts.finished(reason_name(reason));
        self.api.counts.usage(usage, elapsed);
        tracing::info!(
            request_id = %self.name,
            index,
            reason = reason_name(reason),
            prompt_tokens = usage.prompt_tokens,
            completion_tokens = usage.completion_tokens,
            cached_tokens = usage.cached_tokens,
            elapsed_ms = elapsed.as_millis() as u64,
            "sequence finished"
        );
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        for (index, sequence) in self.sequences.iter().enumerate().filter(|(_, s)| !s.done) {
            self.api.engine.abort(sequence.id);
            // The caller left: nobody else will hear how this sequence ended.
            if !self.failed {
                let usage = Usage {
                    prompt_tokens: sequence.prompt_tokens,
                    completion_tokens: sequence.output.num_tokens(),
                    cached_tokens: 0,
                };
                self.count_end(index, FinishReason::Cancelled, usage);
            }
        }
    }
}

/// As in OpenAI's `finish_reason`.
pub fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
    }
}

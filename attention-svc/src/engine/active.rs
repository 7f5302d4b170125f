//! What the engine's thread keeps of a sequence, besides what the scheduler knows.
use std::time::Instant;

use afd_gpu::ops::DrawRule;
use tokio::sync::mpsc;

use super::handle::Queued;
use super::trace::SequenceSpans;
use crate::request::{SequenceEvent, SequenceRequest, TokenLogprobs};
use crate::sampler::SequenceSampler;

/// Events on their way to the API, in order. Waking whoever waits for one costs more than choosing a token: it is done while
/// the device works on the next step.
#[derive(Default)]
pub(super) struct News(Vec<(mpsc::UnboundedSender<SequenceEvent>, SequenceEvent)>);

impl News {
    /// Hands everything over.
    pub(super) fn deliver(&mut self) {
        for (events, event) in self.0.drain(..) {
            // A caller that is gone needs none.
            let _ = events.send(event);
        }
    }
}

pub(super) struct Active {
    pub(super) request: SequenceRequest,
    pub(super) sampler: SequenceSampler,
    pub(super) submitted: Instant,
    /// When the request is recorded.
    pub(super) spans: Option<Box<SequenceSpans>>,
    /// Its place in the queue, until it first runs.
    queued: Option<Queued>,
    /// One entry per prompt token, when asked for and not told yet.
    prompt_logprobs: Vec<Option<TokenLogprobs>>,
}

impl Active {
    pub(super) fn new(request: SequenceRequest, queued: Queued, now: Instant) -> Self {
        let params = request.sampling.clone();
        let sampler = SequenceSampler::new(params, request.stop.clone(), &request.prompt, rand::random());
        let num_prompt_logprobs = if request.prompt_logprobs.is_some() { request.prompt.len() } else { 0 };
        let prompt_logprobs = vec![None; num_prompt_logprobs];
        let spans = request.trace.as_deref().map(|trace| Box::new(SequenceSpans::new(*trace, now)));
        Self { request, sampler, submitted: now, spans, queued: Some(queued), prompt_logprobs }
    }

    /// It runs for the first time.
    pub(super) fn handle_admitted(&mut self, now: Instant) {
        self.leave_queue();
        if let Some(spans) = &mut self.spans {
            spans.handle_admitted(now);
        }
    }

    /// Whether it has not run yet.
    pub(super) fn is_queued(&self) -> bool {
        self.queued.is_some()
    }

    /// It runs for the first time, or ends: its place in the queue is free again.
    pub(super) fn leave_queue(&mut self) {
        self.queued = None;
    }

    /// Tells the API, when `news` is delivered. A receiver that is gone is noticed before the next step.
    pub(super) fn tell(&self, news: &mut News, event: SequenceEvent) {
        news.0.push((self.request.events.clone(), event));
    }

    /// How a device may choose its next token; the best, which the host does not take, where only the host can choose.
    pub(super) fn rule(&self) -> DrawRule {
        self.device_rule().unwrap_or(DrawRule::Best)
    }

    /// The same, where the device's choice is all that is asked for.
    pub(super) fn device_rule(&self) -> Option<DrawRule> {
        if self.request.logprobs.is_some() { None } else { self.sampler.rule() }
    }

    /// The same for the token behind the next one.
    pub(super) fn device_rule_ahead(&self) -> Option<DrawRule> {
        if self.request.logprobs.is_some() { None } else { self.sampler.rule_ahead() }
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.request.events.is_closed()
    }

    /// Of the prompt token at `position`. May be told twice when a prompt is computed again.
    pub(super) fn set_prompt_logprobs(&mut self, position: usize, logprobs: TokenLogprobs) {
        if let Some(entry) = self.prompt_logprobs.get_mut(position) {
            *entry = Some(logprobs);
        }
    }

    /// The prompt is computed: tells its log probabilities, once.
    pub(super) fn tell_prompt_logprobs(&mut self, news: &mut News) {
        if !self.prompt_logprobs.is_empty() {
            let logprobs = std::mem::take(&mut self.prompt_logprobs);
            self.tell(news, SequenceEvent::PromptLogprobs(logprobs));
        }
    }
}

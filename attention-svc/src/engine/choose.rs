//! The end of a step: logits of the rows that are wanted, a token for each sequence that gets one, commit, tell.
use afd_gpu::ops::DrawRule;

use super::active::{Active, News};
use super::run::Engine;
use super::{AttentionPort, DeviceChoice, StageOutput};
use crate::request::{ChosenToken, SequenceError, SequenceEvent};
use crate::sampler::{Draw, SampleError, Sampled, Scratch, logprobs};
use crate::scheduler::{LogitRows, Stage, StepItem};

/// Rows of logits that are in memory at a time: a long prompt whose log probabilities are wanted has many.
const MAX_LOGIT_ROWS: usize = 256;

/// A row whose logits are wanted.
struct Wanted {
    /// Index of the item in the stage.
    item: usize,
    /// Row in the stage.
    row: usize,
    purpose: Purpose,
}

enum Purpose {
    /// The log probability of the prompt token at this position.
    Prompt(usize),
    /// The sequence's next token.
    Choose,
}

/// Chosen tokens of a stage's items, or why there is none.
type Chosen = Vec<Option<Result<u32, SequenceError>>>;

impl<A: AttentionPort> Engine<A> {
    /// Chooses, commits and tells for every item of a stage whose layers are done.
    pub(super) fn finish_stage(&mut self, stage: &Stage, output: &StageOutput) {
        let chosen = self.choose(stage, output).unwrap_or_else(|error| {
            // Without logits nobody of the stage can go on.
            vec![Some(Err(error)); stage.items.len()]
        });
        for (item, chosen) in stage.items.iter().zip(chosen) {
            match chosen.transpose() {
                Ok(token) => self.commit(item, token),
                Err(error) => self.fail(item.sequence, error),
            }
        }
    }

    fn choose(&mut self, stage: &Stage, output: &StageOutput) -> Result<Chosen, SequenceError> {
        let internal = |what: String| SequenceError::Internal(what);
        let mut chosen: Chosen = vec![None; stage.items.len()];
        let mut wanted = self.wanted(stage);
        match &output.chosen {
            Some(choices) => {
                wanted.retain(|wanted| !self.take_choice(stage, wanted, choices.get(wanted.row), &mut chosen))
            }
            None => self.choose_on_device(stage, output, &mut wanted, &mut chosen)?,
        }
        let x = &output.x;
        for wanted in wanted.chunks(MAX_LOGIT_ROWS) {
            let rows: Vec<usize> = wanted.iter().map(|wanted| wanted.row).collect();
            let logits = self.attention.logits(x, &rows).map_err(|error| internal(error.0))?;
            let values = afd_ffi::memory::f32s(&logits).map_err(|error| internal(error.to_string()))?;
            let vocab_size = values.len() / rows.len();
            for (wanted, row) in wanted.iter().zip(values.chunks_exact(vocab_size.max(1))) {
                let Some(active) = self.sequences.get_mut(&stage.items[wanted.item].sequence) else {
                    continue;
                };
                let entry = &mut chosen[wanted.item];
                if matches!(entry, Some(Err(_))) {
                    continue;
                }
                match use_row(active, &wanted.purpose, row, &mut self.scratch, &mut self.news) {
                    Ok(None) => {}
                    Ok(Some(token)) => *entry = Some(Ok(token)),
                    Err(error) => {
                        *entry = Some(Err(internal(format!("the model's logits cannot be used: {error}"))))
                    }
                }
            }
        }
        Ok(chosen)
    }

    /// Has the device choose where its choice is all that is asked for, and takes those out of `wanted`: rows of logits
    /// need not come to the host then.
    fn choose_on_device(
        &mut self,
        stage: &Stage,
        output: &StageOutput,
        wanted: &mut Vec<Wanted>,
        chosen: &mut Chosen,
    ) -> Result<(), SequenceError> {
        let rows: Vec<usize> =
            wanted.iter().filter(|wanted| self.wants_best(stage, wanted)).map(|wanted| wanted.row).collect();
        let best = self.attention.best(&output.x, &rows);
        let Some(best) = best.map_err(|error| SequenceError::Internal(error.0))? else { return Ok(()) };
        let chosen_there = |&token: &u32| DeviceChoice {
            token: (token != u32::MAX).then_some(token),
            below: 0.0,
            upto: 0.0,
        };
        let mut best = best.iter().map(chosen_there);
        wanted.retain(|wanted| {
            let choice = if self.wants_best(stage, wanted) { best.next() } else { None };
            !self.take_choice(stage, wanted, choice.as_ref(), chosen)
        });
        Ok(())
    }

    /// Whether the token with the largest logit is all that is asked for. What is told of a prompt is told before its first
    /// token, so the two stay together.
    fn wants_best(&self, stage: &Stage, wanted: &Wanted) -> bool {
        let active = self.sequences.get(&stage.items[wanted.item].sequence);
        let takes_best = |active: &Active| {
            active.request.prompt_logprobs.is_none() && active.device_rule() == Some(DrawRule::Best)
        };
        matches!(wanted.purpose, Purpose::Choose) && active.is_some_and(takes_best)
    }

    /// Takes the token that the device has chosen, where its choice is all that is asked for. Returns whether it was.
    fn take_choice(
        &mut self,
        stage: &Stage,
        wanted: &Wanted,
        choice: Option<&DeviceChoice>,
        chosen: &mut Chosen,
    ) -> bool {
        let active = self.sequences.get_mut(&stage.items[wanted.item].sequence);
        let (Some(active), Purpose::Choose, Some(choice)) = (active, &wanted.purpose, choice) else {
            return false;
        };
        // Where there is no token the row itself says what is wrong with it.
        let (Some(token), Some(rule)) = (choice.token, active.device_rule()) else { return false };
        if let DrawRule::Draw { uniform, .. } = rule {
            tell_draw(active, token, Draw { uniform, below: choice.below, upto: choice.upto });
        }
        self.metrics.tokens_chosen_on_device.add(1);
        tell_token(active, &mut self.news, ChosenToken { id: token, logprobs: None });
        chosen[wanted.item] = Some(Ok(token));
        true
    }

    fn wanted(&self, stage: &Stage) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        // Not of those that have ended since the step was launched.
        let present = |(_, (item, _)): &(_, (&StepItem, _))| self.sequences.contains_key(&item.sequence);
        for (index, (item, rows)) in
            stage.items.iter().zip(&stage.batch.sequences).enumerate().filter(present)
        {
            if matches!(item.logits, LogitRows::All { .. }) {
                let num_prompt = self.scheduler.view(item.sequence).map_or(0, |view| view.num_prompt);
                for position in item.tokens.clone().filter(|position| position + 1 < num_prompt) {
                    let row = rows.start + position - item.tokens.start;
                    wanted.push(Wanted { item: index, row, purpose: Purpose::Prompt(position + 1) });
                }
            }
            if item.logits.choose() {
                wanted.push(Wanted { item: index, row: rows.start + rows.len - 1, purpose: Purpose::Choose });
            }
        }
        wanted
    }

    fn commit(&mut self, item: &StepItem, token: Option<u32>) {
        let num_prompt = self.scheduler.view(item.sequence).map_or(0, |view| view.num_prompt);
        if item.tokens.len() > 1 || item.tokens.start < num_prompt {
            self.metrics.tokens_prefilled.add(item.tokens.len() as u64);
        }
        if token.is_some() {
            self.metrics.tokens_generated.add(1);
        }
        if let Some(reason) = self.scheduler.commit(item, token) {
            self.finish(item.sequence, reason);
        }
    }
}

/// Uses one row of logits for its purpose; the token, if one was chosen. Tells the API.
fn use_row(
    active: &mut Active,
    purpose: &Purpose,
    row: &[f32],
    scratch: &mut Scratch,
    news: &mut News,
) -> Result<Option<u32>, SampleError> {
    if let Purpose::Prompt(position) = *purpose {
        let num_top = active.request.prompt_logprobs.map_or(0, usize::from);
        let told = logprobs(row, active.request.prompt[position], num_top, scratch)?;
        active.set_prompt_logprobs(position, told);
        return Ok(None);
    }
    let Sampled { token, draw } = active.sampler.sample(row, scratch)?;
    let told = active
        .request
        .logprobs
        .map(|num_top| logprobs(row, token, usize::from(num_top), scratch))
        .transpose()?;
    if let Some(draw) = draw {
        tell_draw(active, token, draw);
    }
    tell_token(active, news, ChosenToken { id: token, logprobs: told });
    Ok(Some(token))
}

/// What makes a random choice checkable from outside.
fn tell_draw(active: &Active, token: u32, Draw { uniform, below, upto }: Draw) {
    let index = active.sampler.num_output();
    tracing::debug!(request_id = %active.request.request_id, index, token, uniform, below, upto, "drawn");
}

fn tell_token(active: &mut Active, news: &mut News, token: ChosenToken) {
    active.sampler.commit(token.id);
    active.tell_prompt_logprobs(news);
    if let Some(spans) = &mut active.spans {
        spans.handle_token();
    }
    active.tell(news, SequenceEvent::Token(token));
}

//! What runs before the first step that serves somebody, so that none of them pays for what happens once: FFN ranks that
//! have answered nothing yet, graphs of decode steps, and on a device prompts of many sizes, whose operations are loaded and
//! whose memory is taken when they first run.
//!
//! No sequence has run yet, so the blocks of the cache are free; what is written there is overwritten before it is read.
use std::time::Instant;

use afd_common::ids::StepId;

use super::forward::{ForwardTimes, StageOutcomes, forward};
use super::run::Engine;
use super::{AttentionPort, EngineDeath, EngineState, FfnLoss, StepOutline};
use crate::model::{BlockId, SequenceRows, StageBatch};
use crate::request::SequenceError;
use crate::scheduler::{Phase, Stage};

/// More than any warm-up has.
const MAX_WARM_UP_STEPS: u64 = 1000;
/// Rows of a stage of the two steps that warm an FFN rank up: one as in decode, some as in a prompt.
const RANK_ROWS: [usize; 2] = [1, 8];
/// Their tokens are below this, which is within any vocabulary, and differ, so that they reach more experts than one row does.
const RANK_TOKENS: usize = 64;
/// Tokens of a made-up prompt, at most.
const PROMPT_TOKENS: usize = 1024;
/// Fewest rows of a step of prompts; what is smaller takes the same operations.
const FEWEST_ROWS: usize = 16;
/// Tokens of the prompt beside sequences that decode.
const BESIDE: usize = 64;

/// Why a warm-up stopped.
enum Stop {
    /// The FFN was lost: once more when it is back.
    CutShort,
    Death(EngineDeath),
}

impl<A: AttentionPort> Engine<A> {
    /// Warms up, once, what needs it: FFN ranks, whole decode steps on the device, prompts. Whether that is done, or there is
    /// nothing to do.
    pub(super) fn warm_up(&mut self) -> Result<bool, EngineDeath> {
        match self.warm_all() {
            Ok(()) => {
                self.change_state(&EngineState::Warming, EngineState::Running);
                Ok(true)
            }
            Err(Stop::CutShort) => Ok(false),
            Err(Stop::Death(death)) => Err(death),
        }
    }

    fn warm_all(&mut self) -> Result<(), Stop> {
        if !self.ranks_are_warm {
            self.warm_ranks()?;
            self.ranks_are_warm = true;
        }
        if !self.attention.is_warm(&mut *self.ffn) {
            self.change_state(&EngineState::Running, EngineState::Warming);
            self.warm_decode_steps()?;
        }
        if !self.prompts_are_warm {
            if let Some(vocabulary) = self.attention.warms_prompts() {
                self.warm_prompts(vocabulary)?;
            }
            self.prompts_are_warm = true;
        }
        Ok(())
    }

    fn warm_decode_steps(&mut self) -> Result<(), Stop> {
        let first = StepId(self.last_step.0 + 1);
        let steps = self.attention.warm_up(&mut *self.ffn, first).map_err(|loss| {
            // Ids of steps that were begun are not used again.
            self.last_step = StepId(self.last_step.0 + MAX_WARM_UP_STEPS);
            stop(loss)
        })?;
        self.last_step = StepId(self.last_step.0 + steps);
        Ok(())
    }

    /// Runs steps until every rank that is there has had all stages of all shapes.
    fn warm_ranks(&mut self) -> Result<(), Stop> {
        if !self.ffn.begin_warm_up() {
            return Ok(());
        }
        let (begun, mut steps) = (Instant::now(), 0);
        loop {
            for rows in RANK_ROWS {
                let stages = self.one_sequence_each(rows);
                self.run_made_up(if rows == 1 { Phase::Decode } else { Phase::Prefill }, &stages)?;
                steps += 1;
            }
            if !self.ffn.handle_warm() {
                break;
            }
        }
        tracing::info!(steps, took_ms = begun.elapsed().as_millis() as u64, "FFN ranks are warm");
        Ok(())
    }

    /// Runs prompts of ever fewer rows, the most that a step may have first: what later ones need is then there. Then a short
    /// one beside ever more sequences that decode.
    fn warm_prompts(&mut self, vocabulary: usize) -> Result<(), Stop> {
        let (begun, mut steps) = (Instant::now(), 0);
        let config = &self.config;
        let most = config.max_num_batched_tokens.min(config.pool_tokens());
        let sizes = std::iter::successors(Some(most), |rows| (rows / 2 >= FEWEST_ROWS).then_some(rows / 2));
        let prompts = sizes.map(|rows| (rows, 0)).collect::<Vec<_>>();
        let singles = std::iter::successors(Some(config.max_num_seqs - 1), |singles| Some(singles / 2));
        let beside = |singles: usize| (BESIDE.min(most.saturating_sub(singles)), singles);
        let mixed = singles.take_while(|&singles| singles > 0).map(beside).filter(|(rows, _)| *rows > 1);
        for (rows, singles) in prompts.into_iter().chain(mixed.collect::<Vec<_>>()) {
            let mut made_up = MadeUp::new(self.config.block_size, self.config.num_blocks, vocabulary);
            let len = PROMPT_TOKENS.min(self.config.max_model_len);
            let lens =
                std::iter::repeat_n(1, singles).chain((0..rows).step_by(len).map(|at| len.min(rows - at)));
            let lens: Vec<usize> = lens.collect();
            let phase = if singles > 0 { Phase::Mixed } else { Phase::Prefill };
            let num_rows = lens.iter().sum();
            let splittable = self.config.stages.splittable(phase, lens.len(), num_rows);
            let stages = made_up.stages(&lens, splittable.min(self.ffn.max_stages()));
            let at = Instant::now();
            let outcomes = self.run_made_up(phase, &stages)?;
            for (stage, outcome) in stages.iter().zip(outcomes) {
                let Ok(output) = outcome else { continue };
                let ends = stage.batch.sequences.iter().map(|rows| rows.start + rows.len - 1);
                let chosen = self.attention.best(&output.x, &ends.collect::<Vec<_>>());
                if let Err(error) = chosen.and_then(|_| self.attention.logits(&output.x, &[0])) {
                    tracing::error!(%error, "the choice of tokens failed in the warm-up");
                }
            }
            steps += 1;
            let took_us = at.elapsed().as_micros() as u64;
            tracing::debug!(rows = num_rows, singles, stages = stages.len(), took_us, "made-up prompts");
        }
        tracing::info!(steps, took_ms = begun.elapsed().as_millis() as u64, "prompts are warm");
        Ok(())
    }

    /// Stages of a warm-up step, as many as a step may have, each with one made-up sequence of at most `rows` tokens.
    fn one_sequence_each(&self, rows: usize) -> Vec<Stage> {
        let config = &self.config;
        let num_stages = config.stages.max_stages.min(self.ffn.max_stages());
        let most =
            config.pool_tokens().min(config.max_model_len).min(config.max_num_batched_tokens / num_stages);
        let one = || {
            MadeUp::new(config.block_size, config.num_blocks, RANK_TOKENS).stages(&[rows.min(most).max(1)], 1)
        };
        (0..num_stages).flat_map(|_| one()).collect()
    }

    /// Runs a step whose results nobody wants.
    fn run_made_up(&mut self, phase: Phase, stages: &[Stage]) -> Result<StageOutcomes, Stop> {
        self.last_step = StepId(self.last_step.0 + 1);
        let step = self.last_step;
        let outline = StepOutline {
            step,
            phase,
            stage_rows: stages.iter().map(|stage| stage.batch.input_ids.len()).collect(),
            profile: false,
            warmup: true,
            trace: None,
        };
        let (attention, ffn, mut times) = (&mut self.attention, &mut *self.ffn, ForwardTimes::default());
        let outcomes =
            ffn.begin_step(&outline).and_then(|()| forward(attention, ffn, step, stages, &mut times, None));
        ffn.end_step(step);
        let outcomes = outcomes.map_err(stop)?;
        // The rank has answered, so it is there; a request that it refuses too says so itself.
        let failed = outcomes.iter().filter_map(|outcome: &Result<_, SequenceError>| outcome.as_ref().err());
        failed.for_each(|error| tracing::error!(%error, "a stage of the warm-up failed"));
        Ok(outcomes)
    }
}

fn stop(loss: FfnLoss) -> Stop {
    match loss {
        FfnLoss::Fatal { what } => Stop::Death(EngineDeath(what)),
        loss => {
            tracing::warn!(loss = %loss, "warming up was cut short");
            Stop::CutShort
        }
    }
}

/// Sequences that nobody asked for, in blocks of the cache from the first one on.
struct MadeUp {
    block_size: usize,
    num_blocks: u32,
    vocabulary: usize,
    next_block: u32,
    next_token: usize,
}

impl MadeUp {
    fn new(block_size: usize, num_blocks: u32, vocabulary: usize) -> Self {
        Self { block_size, num_blocks, vocabulary, next_block: 0, next_token: 0 }
    }

    /// Sequences of these lengths, dealt out to stages.
    fn stages(&mut self, lens: &[usize], num_stages: usize) -> Vec<Stage> {
        let mut stages = vec![StageBatch::default(); num_stages.clamp(1, lens.len().max(1))];
        let count = stages.len();
        for (index, &len) in lens.iter().enumerate() {
            self.push(&mut stages[index % count], len);
        }
        stages.into_iter().map(|batch| Stage { items: Vec::new(), batch }).collect()
    }

    fn push(&mut self, batch: &mut StageBatch, len: usize) {
        let count = len.div_ceil(self.block_size) as u32;
        // Where there are too few blocks, from the first one on again: nobody reads what is there.
        if self.next_block + count > self.num_blocks {
            self.next_block = 0;
        }
        let block_table: Vec<_> = (self.next_block..self.next_block + count).map(BlockId).collect();
        let first = i64::from(self.next_block) * self.block_size as i64;
        self.next_block += count;
        let start = batch.input_ids.len();
        // All over the vocabulary, so that rows differ and go to experts of all kinds.
        let (next, vocabulary) = (self.next_token, self.vocabulary.max(1));
        batch.input_ids.extend((next..next + len).map(|at| (at.wrapping_mul(7919) % vocabulary) as u32));
        self.next_token += len;
        batch.positions.extend(0..len as u32);
        batch.slot_mapping.extend(first..first + len as i64);
        batch.sequences.push(SequenceRows { start, len, context_len: len, block_table });
    }
}

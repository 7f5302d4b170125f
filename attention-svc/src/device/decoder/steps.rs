//! Steps on their way: launched, perhaps one behind another, and waited for.
use std::time::{Duration, Instant};

use afd_common::ids::StepId;
use afd_gpu::{Completion, GpuError, Graph, Stream};

use super::{Decoder, Failure, STEP_DEADLINE, Stage, StepRun, StreamFfn};
use crate::engine::{DecodeEnd, DecodeStage, DecodeTurn, DeviceChoice, FfnLoss, StageOutput};

/// A step that the device has.
pub(super) struct Launched {
    key: Vec<usize>,
    /// Of the FFN's links.
    generation: u64,
    /// In front of what it computes and behind it, timed.
    first: Completion,
    last: Completion,
    /// Behind all of it.
    end: Completion,
    at: Instant,
    turn: usize,
    /// Whether it was launched as soon as a decode step had ended, or before.
    follows: bool,
}

impl Decoder {
    /// Launches a step for which there is a [`key`](Self::key); without a graph when its times are wanted (`profile`). `false`:
    /// nothing was done, because it cannot come behind another.
    ///
    /// # Errors
    /// [`FfnLoss`]: nothing of the step may be used.
    pub fn launch(
        &mut self,
        stream: &Stream,
        ffn: &mut dyn StreamFfn,
        (step, profile): (StepId, bool),
        (key, stages): (&[usize], &[DecodeStage<'_>]),
        turn: DecodeTurn,
    ) -> Result<bool, FfnLoss> {
        let is_captured = self.graphs.contains_key(key);
        let is_behind = turn == DecodeTurn::Behind;
        if is_behind && (profile || !is_captured || !ffn.runs_ahead() || self.launched.len() != 1) {
            return Ok(false);
        }
        let Self { stages: own, kernels, .. } = self;
        let upload = |(own, (stage, &padded)): (&mut Stage, (&DecodeStage<'_>, &usize))| {
            own.rows.upload(kernels, stream, *stage, padded, is_behind)
        };
        let uploads = own.iter_mut().zip(stages.iter().zip(key)).try_for_each(upload);
        uploads.map_err(|error| FfnLoss::from(Failure::from(error)))?;
        let run = match profile {
            true => StepRun::Profiled,
            false if is_captured => StepRun::Replay,
            false => StepRun::Eager,
        };
        self.begin(stream, ffn, step, (key, run), turn != DecodeTurn::First).map_err(FfnLoss::from)?;
        Ok(true)
    }

    /// Whether the oldest step under way is over.
    pub fn is_over(&self) -> bool {
        self.launched.front().is_none_or(|launched| launched.end.is_done().unwrap_or(true))
    }

    /// Waits for the oldest step under way, of stages of so many real rows.
    ///
    /// # Errors
    /// [`FfnLoss`]: nothing of it may be used, nor of the one behind it, which is over too then.
    pub fn finish(&mut self, ffn: &mut dyn StreamFfn, num_rows: &[usize]) -> Result<DecodeEnd, FfnLoss> {
        let (chosen, on_device, idle) = self.end(ffn).map_err(FfnLoss::from)?;
        let outputs = self.stages.iter().zip(num_rows).zip(chosen);
        let output = |((own, &rows), mut chosen): ((&Stage, &usize), Vec<DeviceChoice>)| {
            let x = own.residual.f_narrow(0, 0, rows as i64);
            let x = x.map_err(|error| FfnLoss::Fatal { what: error.to_string() })?;
            chosen.truncate(rows);
            Ok(StageOutput { x, chosen: Some(chosen) })
        };
        let outputs = outputs.map(output).collect::<Result<_, FfnLoss>>()?;
        Ok(DecodeEnd { outputs, on_device, idle })
    }

    /// One step of a warm-up, to its end.
    pub(super) fn run(
        &mut self,
        stream: &Stream,
        ffn: &mut dyn StreamFfn,
        step: StepId,
        (key, run): (&[usize], StepRun),
    ) -> Result<(), Failure> {
        for (stage, &padded) in self.stages.iter_mut().zip(key) {
            stage.rows.upload_padding(&self.kernels, stream, padded)?;
        }
        if run == StepRun::Capture {
            let mut failed = None;
            let graph = Graph::capture(stream, || {
                self.enqueue(stream, ffn, key).map_err(|failure| match failure {
                    Failure::Gpu(error) => error,
                    Failure::Loss(loss) => {
                        failed = Some(loss);
                        GpuError::Unsupported { what: "the FFN was lost in a capture".into() }
                    }
                })
            });
            match (graph, failed) {
                (_, Some(loss)) => return Err(loss.into()),
                (graph, None) => self.graphs.insert(key.to_vec(), graph?),
            };
        }
        self.begin(stream, ffn, step, (key, run), false)?;
        self.end(ffn).map(drop)
    }

    /// Launches a step whose inputs are there, or are about to be.
    fn begin(
        &mut self,
        stream: &Stream,
        ffn: &mut dyn StreamFfn,
        step: StepId,
        (key, run): (&[usize], StepRun),
        follows: bool,
    ) -> Result<(), Failure> {
        let generation = ffn.generation();
        ffn.announce(step, key, run)?;
        let first = stream.mark(true)?;
        match self.graphs.get_mut(key) {
            Some(graph) if !matches!(run, StepRun::Warmup | StepRun::Profiled) => graph.launch()?,
            _ => self.enqueue(stream, ffn, key)?,
        }
        let (last, turn) = (stream.mark(true)?, self.turns);
        for (index, &padded) in key.iter().enumerate() {
            self.stages[index].rows.fetch(&self.kernels, stream, padded, turn)?;
        }
        let (end, at, key) = (stream.mark(false)?, Instant::now(), key.to_vec());
        self.launched.push_back(Launched { key, generation, first, last, end, at, turn, follows });
        self.turns += 1;
        Ok(())
    }

    /// Waits for the oldest step: the chosen token of every padded row, how long the device had it, and for how long it had had
    /// nothing before.
    fn end(&mut self, ffn: &mut dyn StreamFfn) -> Result<Ended, Failure> {
        let none = || FfnLoss::Fatal { what: "no decode step is under way".into() };
        let step = self.launched.pop_front().ok_or_else(none)?;
        let ended = self.end_of(ffn, &step);
        if ended.is_err() {
            // What is behind it computes garbage, and ends by itself: its ranks are given up.
            self.ended = None;
            while let Some(behind) = self.launched.pop_front() {
                ffn.watch(&behind.end, STEP_DEADLINE)?;
            }
        }
        if let Some(behind) = self.launched.front_mut() {
            behind.at = Instant::now();
        }
        ended.map(|(chosen, on_device, idle)| {
            self.ended = Some(step.last);
            (chosen, on_device, idle)
        })
    }

    fn end_of(&mut self, ffn: &mut dyn StreamFfn, step: &Launched) -> Result<Ended, Failure> {
        ffn.watch(&step.end, STEP_DEADLINE)?;
        let on_device = step.at.elapsed();
        let mut chosen = Vec::with_capacity(step.key.len());
        for (index, &padded) in step.key.iter().enumerate() {
            chosen.push(self.stages[index].rows.chosen(padded, step.turn, STEP_DEADLINE)?);
        }
        if !ffn.is_sound() {
            // Nothing may run over links that are given up next.
            for behind in &self.launched {
                ffn.watch(&behind.end, STEP_DEADLINE)?;
            }
        }
        ffn.check()?;
        if ffn.generation() != step.generation {
            let (peer, what) = ("the FFN".into(), "a rank came or went while a step was under way".into());
            return Err(FfnLoss::Unavailable { peer, what }.into());
        }
        let idle = match self.ended.as_ref().filter(|_| step.follows) {
            Some(ended) => Some(Duration::from_secs_f64(step.first.us_since(ended)?.max(0.0) / 1e6)),
            None => None,
        };
        Ok((chosen, on_device, idle))
    }
}

type Ended = (Vec<Vec<DeviceChoice>>, Duration, Option<Duration>);

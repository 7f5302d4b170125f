//! How a rank becomes warm that joins while others serve: it gets the steps by which the first ranks were warmed up, over its
//! own link and beside the steps that serve somebody, so that no request waits for it.
//!
//! What attention made up for those first steps is kept ([`Script`]), and every later edge goes through it ([`WarmUp`]): the
//! first layer of all stages, then a stage's next layer whenever an answer comes, then the next step. Their ids are lower than
//! those of all steps that serve somebody, and no other plan is told before they are over. A rank that is needed earlier,
//! because nobody else serves its shard, leaves the rest out.
use std::time::Instant;

use afd_common::frame::{FrameKind, RowType};
use afd_common::ids::{HopKey, LayerIdx, StageIdx};
use afd_common::link::InFrame;
use afd_common::proto::v1;
use v1::steps_request::Message;

use super::announce::{say, say_over, step_plan};
use super::edge::Edge;
use super::kept::Kept;
use super::outstanding::{Refusal, refusal};
use super::settings::PortSettings;
use super::stats::FfnStats;
use super::warm_up::WarmUp;
use crate::engine::StepOutline;

/// Steps of made-up rows, as they were run before the first request.
#[derive(Default)]
pub struct Script {
    steps: Vec<ScriptedStep>,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Progress {
    /// No warm-up has begun: nobody is late.
    #[default]
    Blank,
    /// Its steps are being run.
    Noted,
    /// They have been.
    Complete,
}

struct ScriptedStep {
    outline: StepOutline,
    /// What its first stage sent, by layer. All stages send the same.
    layers: Vec<Kept>,
}

/// What frames are made with.
pub struct Wire<'a> {
    /// Element type of dispatched rows.
    pub rows: RowType,
    /// Width of a row, elements.
    pub hidden_size: u32,
    /// Memory to put rows together in.
    pub gathered: &'a mut Vec<u8>,
    /// Where hops are counted.
    pub stats: &'a FfnStats,
    /// Now.
    pub now: Instant,
}

impl<'a> Wire<'a> {
    /// Of a port with these settings.
    pub fn new(
        settings: &PortSettings,
        gathered: &'a mut Vec<u8>,
        stats: &'a FfnStats,
        now: Instant,
    ) -> Self {
        Self { rows: settings.rows, hidden_size: settings.hidden_size, gathered, stats, now }
    }
}

impl Script {
    /// Steps of a warm-up are about to be run.
    pub fn handle_begin(&mut self) {
        self.steps.clear();
        self.progress = Progress::Noted;
    }

    /// One of them begins; the last one of its shape counts. Made-up steps for other ends come later and change nothing.
    pub fn handle_step(&mut self, outline: &StepOutline) {
        if self.progress != Progress::Noted {
            return;
        }
        self.steps.retain(|step| step.outline.stage_rows != outline.stage_rows);
        self.steps.push(ScriptedStep { outline: outline.clone(), layers: Vec::new() });
    }

    /// One of their hops is sent.
    pub fn handle_dispatch(&mut self, kept: &Kept) {
        if self.progress == Progress::Noted
            && let Some(step) = self.steps.last_mut()
            && kept.key.stage == StageIdx(0)
            && usize::from(kept.key.layer.0) == step.layers.len()
        {
            step.layers.push(kept.clone());
        }
    }

    /// All have been run.
    pub fn handle_complete(&mut self) {
        self.steps.retain(|step| !step.layers.is_empty());
        self.progress = Progress::Complete;
    }

    /// Whether an edge that joins now has missed the warm-up.
    pub fn is_late(&self) -> bool {
        self.progress != Progress::Blank
    }

    /// Sends an edge that is cold the first step, once there is one.
    ///
    /// # Errors
    /// Why the edge is of no use.
    pub fn begin(&self, edge: &mut Edge, wire: &mut Wire<'_>) -> Result<(), String> {
        match &mut edge.warm_up {
            Some(warm_up) if self.progress == Progress::Complete && warm_up.begun.is_none() => {
                warm_up.begun = Some(wire.now);
            }
            _ => return Ok(()),
        }
        self.send_step(edge, wire)
    }

    /// Whether a frame answers a hop of the edge's warm-up.
    pub fn is_answer(&self, edge: &Edge, frame: &InFrame) -> bool {
        edge.warm_up.as_ref().is_some_and(|warm_up| self.awaits(warm_up, frame.header.hop))
    }

    /// Whether a stage of the present step waits for this layer.
    fn awaits(&self, warm_up: &WarmUp, hop: HopKey) -> bool {
        let step = self.steps.get(warm_up.step);
        step.is_some_and(|step| step.outline.step == hop.step)
            && warm_up.awaited.get(usize::from(hop.stage.0)) == Some(&Some(hop.layer))
    }

    /// Takes such an answer in and sends what is next.
    ///
    /// # Errors
    /// Why the edge is of no use.
    pub fn handle_answer(&self, edge: &mut Edge, frame: InFrame, wire: &mut Wire<'_>) -> Result<(), String> {
        let (hop, peer) = (frame.header.hop, &edge.peer);
        match frame.header.kind {
            FrameKind::Combine => {}
            FrameKind::Error => match refusal(&frame) {
                Refusal::OfLink(what) => return Err(format!("{hop}: {what}")),
                // A request that it refuses too says so itself.
                Refusal::OfRows(what) => tracing::error!(%peer, %hop, what, "a hop of the warm-up failed"),
            },
            kind => return Err(format!("{hop}: an FFN rank sent a {kind:?} frame")),
        }
        // Its place on the link is free before the next one is sent.
        drop(frame);
        let Some(warm_up) = &mut edge.warm_up else { return Ok(()) };
        let stage = usize::from(hop.stage.0);
        warm_up.moved = wire.now;
        let next = LayerIdx(hop.layer.0 + 1);
        let goes_on = warm_up.needed.is_none() && self.layer(warm_up.step, next).is_some();
        warm_up.awaited[stage] = goes_on.then_some(next);
        if goes_on {
            return self.send(edge, HopKey { layer: next, ..hop }, wire);
        }
        if warm_up.owes() {
            return Ok(());
        }
        if warm_up.needed.is_some() {
            edge.warm_up = None;
            say_over(edge, hop.step.0, wire.stats);
            return Ok(());
        }
        warm_up.step += 1;
        self.send_step(edge, wire)
    }

    fn layer(&self, step: usize, layer: LayerIdx) -> Option<&Kept> {
        self.steps.get(step)?.layers.get(usize::from(layer.0))
    }

    /// Sends the first layer of the edge's present step, or finds that it has had all of them.
    fn send_step(&self, edge: &mut Edge, wire: &mut Wire<'_>) -> Result<(), String> {
        let Some(warm_up) = &mut edge.warm_up else { return Ok(()) };
        let Some(step) = self.steps.get(warm_up.step) else {
            let took_ms = warm_up.begun.map_or(0, |begun| (wire.now - begun).as_millis() as u64);
            tracing::info!(peer = %edge.peer, shard = %edge.shard, steps = warm_up.step, took_ms, "FFN rank is warm");
            edge.warm_up = None;
            return Ok(());
        };
        let stages = step.outline.stage_rows.len();
        warm_up.moved = wire.now;
        warm_up.awaited = vec![Some(LayerIdx(0)); stages];
        say(edge, Message::Plan(step_plan(&step.outline)), wire.stats);
        for stage in 0..stages {
            let hop = HopKey { step: step.outline.step, layer: LayerIdx(0), stage: StageIdx(stage as u8) };
            self.send(edge, hop, wire)?;
        }
        Ok(())
    }

    fn send(&self, edge: &mut Edge, hop: HopKey, wire: &mut Wire<'_>) -> Result<(), String> {
        let step = self.steps.iter().position(|step| step.outline.step == hop.step);
        let Some(kept) = step.and_then(|step| self.layer(step, hop.layer)) else { return Ok(()) };
        let shard = edge.shard.index() as usize;
        wire.stats.handle_dispatch(kept.num_rows);
        wire.stats.handle_sent(shard, kept.num_rows);
        let sent = kept.send_as(hop, edge.link.as_mut(), shard, wire.rows, wire.hidden_size, wire.gathered);
        sent.map_err(|error| error.to_string())
    }
}

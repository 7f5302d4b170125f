//! The engine's part in steps of links that a stream drives: it opens the links, hands plans to the model's
//! [`StepRunner`](super::StepRunner), and accounts for steps that are over. All hops of such a step are given the times of
//! the step, because the host does not see one from the other, nor how long the device waited; of a profiled step the
//! device itself says when it was where.
use std::collections::VecDeque;

use afd_common::ids::{HopKey, LayerIdx, StageIdx};
use tonic::Code;

use super::accounts::HopTimes;
use super::stream_links::{
    OpenStream, OpenStreamError, OwnEnd, PlannedStep, StepEnd, StreamCommand, StreamLinkId, StreamOwner,
    StreamSource,
};
use super::worker::{Worker, seconds};
use super::{SessionTag, StageModel};

type Reply = tokio::sync::oneshot::Sender<Result<OwnEnd, OpenStreamError>>;

impl<M: StageModel> Worker<M> {
    pub(super) fn handle_stream(&mut self, command: StreamCommand) {
        match command {
            StreamCommand::Open { request, owner, reply } => self.open_stream(&request, owner, reply),
            StreamCommand::Plan { session, plan } => self.begin_steps(session, &plan),
        }
    }

    fn open_stream(&mut self, request: &OpenStream, owner: StreamOwner, reply: Reply) {
        let mut reply = Some(reply);
        let mut answer = |answer: Result<OwnEnd, OpenStreamError>| {
            // A caller that has gone away is no error: its session ends, and with it the link.
            reply.take().into_iter().for_each(|reply| drop(reply.send(answer.clone())));
        };
        let id = StreamLinkId(self.next_stream);
        self.next_stream += 1;
        let opened = match self.model.steps() {
            None => Err(OpenStreamError::NoDevice),
            Some(steps) => steps.open(id, request, &mut |own| answer(Ok(own))),
        };
        let (kind, epoch) = (request.peer.kind(), request.epoch);
        match opened {
            Ok(give_up) => {
                tracing::info!(peer = owner.peer, %kind, epoch = epoch.0, "link up");
                give_up.into_iter().for_each(|give_up| self.give_ups.add(owner.session, id, give_up));
                self.metrics().links.with_label_values(&[&kind.to_string()]).inc();
                let stats = self.metrics().book.handle_stream_up(kind, &owner.peer, epoch);
                self.streams.push(StreamSource { id, kind, epoch, owner, stats, begun: VecDeque::new() });
            }
            Err(error) => {
                tracing::warn!(peer = owner.peer, %kind, %error, "link not opened");
                answer(Err(error));
            }
        }
    }

    pub(super) fn drop_stream(&mut self, at: usize, why: &str) {
        let source = self.streams.swap_remove(at);
        self.give_ups.remove(source.id);
        if let Some(steps) = self.model.steps() {
            steps.close(source.id);
        }
        let (kind, peer, epoch) = (source.kind, &source.owner.peer, source.epoch.0);
        tracing::info!(peer, %kind, epoch, dropped_steps = source.begun.len(), why, "link down");
        self.metrics().book.handle_stream_down(&source.stats);
        self.metrics().links.with_label_values(&[&kind.to_string()]).dec();
    }

    fn begin_steps(&mut self, session: SessionTag, plan: &PlannedStep) {
        let links: Vec<_> = self.streams.iter().filter(|source| source.owner.session == session).collect();
        for id in links.into_iter().map(|source| source.id).collect::<Vec<_>>() {
            let now_us = self.clock.now_us();
            let Some(steps) = self.model.steps() else { return };
            let mode = steps.begin(id, plan);
            let Some(at) = self.streams.iter().position(|source| source.id == id) else { continue };
            let first = HopKey { step: plan.step, layer: LayerIdx(0), stage: StageIdx(0) };
            self.streams[at].owner.accounts.handle_begin(first);
            match mode {
                Ok(mode) => {
                    self.streams[at].begun.push_back((plan.step, now_us));
                    self.metrics().stream_steps.with_label_values(&mode.labels()).inc();
                }
                Err(why) => self.lose_stream(at, plan, &why),
            }
        }
    }

    fn lose_stream(&mut self, at: usize, plan: &PlannedStep, why: &str) {
        let source = &self.streams[at];
        tracing::warn!(peer = source.owner.peer, step = plan.step.0, why, "step failed");
        source.owner.accounts.handle_lost(plan.step, Code::Unavailable as i32, why);
        self.metrics().stream_steps.with_label_values(&["lost", ""]).inc();
        self.drop_stream(at, why);
    }

    /// Whether no step is on the device.
    pub(super) fn no_step_begun(&mut self) -> bool {
        self.streams.is_empty() || self.model.steps().is_none_or(|steps| steps.num_begun() == 0)
    }

    /// Accounts for the steps that are over.
    pub(super) fn poll_steps(&mut self) {
        if self.streams.is_empty() {
            return;
        }
        while let Some(end) = self.model.steps().and_then(|steps| steps.poll()) {
            let Some(at) = self.streams.iter().position(|source| source.id == end.link) else { continue };
            match &end.failure {
                None => self.note_step(at, &end),
                Some(why) => {
                    let plan = PlannedStep {
                        step: end.step,
                        stage_rows: end.stage_rows.clone(),
                        phase: 0,
                        graph: super::GraphUse::None,
                        profile: false,
                    };
                    self.lose_stream(at, &plan, why);
                }
            }
        }
    }

    fn note_step(&mut self, at: usize, end: &StepEnd) {
        let finished_us = self.clock.now_us();
        let (num_layers, hidden) = (self.spec.layers.len() as u16, self.spec.hidden_size as u64);
        let (row_in, row_out) = (self.spec.activations.bytes() as u64, self.spec.combine().bytes() as u64);
        let source = &mut self.streams[at];
        let begun = source.begun.iter().position(|(step, _)| *step == end.step);
        let started_us = begun.and_then(|at| source.begun.remove(at)).map_or(finished_us, |(_, us)| us);
        let (mut hops, mut rows) = (0, 0);
        let clock = &self.clock;
        let mut moments = end.hops.iter();
        for layer in (0..num_layers).map(LayerIdx) {
            for (stage, &stage_rows) in end.stage_rows.iter().enumerate() {
                (hops, rows) = (hops + 1, rows + u64::from(stage_rows));
                let own =
                    moments.next().map(|hop| [hop.arrived, hop.computed, hop.sent].map(|at| clock.us(at)));
                let [started_us, finished_us, sent_us] =
                    own.unwrap_or([started_us, finished_us, finished_us]);
                source.owner.accounts.handle_served(&HopTimes {
                    key: HopKey { step: end.step, layer, stage: StageIdx(stage as u8) },
                    rows: stage_rows,
                    batch_rows: stage_rows,
                    batch_hops: 1,
                    epoch: source.epoch,
                    arrived_us: started_us,
                    started_us,
                    finished_us,
                    sent_us,
                });
            }
        }
        source.stats.handle_step((hops, rows * hidden * row_out), (hops, rows * hidden * row_in));
        let metrics = self.metrics();
        metrics.hops.inc_by(hops);
        metrics.rows.inc_by(rows);
        metrics.stream_step_seconds.observe(seconds(started_us, finished_us));
    }
}

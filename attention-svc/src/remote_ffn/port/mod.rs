//! The engine thread's end of every edge: sends rows to the shards that serve them, waits for their partial sums, adds them
//! up in shard order, and sends the rows of a lost edge again to whoever serves its shard next.
//!
//! The FFN holds no request state, so nothing is lost with it: the rows of every outstanding hop are kept here until
//! the hop is combined. In reading order: `members` (edges come and go), `late` (those that come late are warmed up),
//! `rows` (what is sent and what is added up), `hops` (out and back), `stream` (whole steps, where a stream drives the
//! links).
use std::sync::Arc;
use std::time::Instant;

use afd_common::ids::{HopKey, StepId};
use afd_common::link::Doorbell;
use afd_common::placement::Placement;
use crossbeam_channel::Receiver;
use tch::Tensor;

use super::announce::{Announcements, step_plan};
use super::clock::Clock;
use super::edge::EdgeEvent;
use super::edges::Edges;
use super::kept::row_kind;
use super::outstanding::Outstanding;
use super::recorder::HopRecorder;
use super::rehearsal::Script;
use super::settings::PortSettings;
use super::stats::FfnStats;
use super::streams::Streams;
use crate::device::StreamFfn;
use crate::engine::{DeviceTimes, Ending, FfnLoss, FfnPort, HopRecord, SideTensors, StepOutline};

mod hops;
mod late;
mod members;
mod rows;
mod stream;

/// The way to every FFN shard over registered links.
pub struct RemoteFfn {
    settings: PortSettings,
    bell: Doorbell,
    events: Receiver<EdgeEvent>,
    edges: Edges,
    /// Ranks whose links a stream drives; where every shard has one, steps go that way.
    streams: Option<Streams>,
    hops: Outstanding,
    /// The present step only warms ranks up.
    is_warming: bool,
    /// The steps that warmed ranks up, for those that join later.
    script: Script,
    /// Of the hop that is being added up; empty otherwise.
    parts: Vec<(usize, Tensor)>,
    /// Where experts are, once it is known how many shards there are.
    placement: Option<Arc<Placement>>,
    /// Memory to put the rows of one shard together in.
    gathered: Vec<u8>,
    announced: Announcements,
    recorder: HopRecorder,
    clock: Box<dyn Clock>,
    started: Instant,
    /// Since when some shard has had no rank.
    bereft_since: Option<Instant>,
    stats: Arc<FfnStats>,
    standing: Sentence,
    ending: Option<Ending>,
}

/// Says how the FFN ranks stand, whenever it is asked.
pub type Sentence = Arc<dyn Fn() -> String + Send + Sync>;

/// What a port is joined to.
pub struct PortParts {
    /// Whoever sends an event rings it, as every link of an edge does.
    pub bell: Doorbell,
    /// Edges come through it.
    pub events: Receiver<EdgeEvent>,
    /// The wall's, but in a simulation.
    pub clock: Box<dyn Clock>,
    /// Read by metrics and readiness.
    pub stats: Arc<FfnStats>,
    /// For errors.
    pub standing: Sentence,
}

impl RemoteFfn {
    /// Without an edge yet.
    pub fn new(settings: PortSettings, parts: PortParts) -> Self {
        let PortParts { bell, events, clock, stats, standing } = parts;
        let started = clock.now();
        Self {
            edges: Edges::new(settings.rank),
            streams: settings.place.clone().map(|place| Streams::new(place, settings.rank)),
            settings,
            bell,
            events,
            hops: Outstanding::default(),
            is_warming: false,
            script: Script::default(),
            parts: Vec::new(),
            placement: None,
            gathered: Vec::new(),
            announced: Announcements::default(),
            recorder: HopRecorder::default(),
            clock,
            started,
            bereft_since: Some(started),
            stats,
            standing,
            ending: None,
        }
    }

    /// Hops whose rows are kept: 0 between steps.
    pub fn num_outstanding(&self) -> usize {
        self.hops.num_outstanding()
    }

    /// Microseconds since the port began.
    fn now_us(&self) -> u64 {
        (self.clock.now() - self.started).as_micros() as u64
    }
}

impl FfnPort for RemoteFfn {
    fn begin_step(&mut self, outline: &StepOutline) -> Result<(), FfnLoss> {
        self.idle();
        if self.by_stream()
            && let Some(streams) = &mut self.streams
        {
            let plan = step_plan(outline);
            streams.announce(&plan, &self.stats, self.clock.now())?;
            self.recorder.begin_step(false);
            return streams.begin_step(&outline.stage_rows);
        }
        if let Some(shard) = self.edges.first_bereft() {
            return Err(self.unavailable(shard));
        }
        self.is_warming = outline.warmup;
        self.edges.set_warming(outline.warmup);
        if outline.warmup {
            self.script.handle_step(outline);
        }
        self.announced.begin(outline, self.edges.warm(), &self.stats);
        self.recorder.begin_step(outline.trace.is_some() || outline.profile);
        Ok(())
    }

    fn end_with(&mut self, ending: Ending) {
        self.streams.iter_mut().for_each(|streams| streams.end_with(ending.clone()));
        self.ending = Some(ending);
    }

    fn max_stages(&self) -> usize {
        self.streams.as_ref().filter(|_| self.by_stream()).map_or(usize::MAX, Streams::max_stages)
    }

    fn dispatch(&mut self, hop: HopKey, rows: &Tensor, side: &SideTensors) -> Result<(), FfnLoss> {
        if let Some(streams) = self.streams.as_mut().filter(|streams| streams.in_step()) {
            self.stats.handle_dispatch(rows.size().first().map_or(0, |&rows| rows as u32));
            return streams.dispatch(hop, rows);
        }
        self.recorder.handle_dispatch();
        let kept =
            self.keep(hop, rows, side).map_err(|what| FfnLoss::Fatal { what: format!("{hop}: {what}") })?;
        self.stats.handle_dispatch(kept.num_rows);
        if self.is_warming {
            self.script.handle_dispatch(&kept);
        }
        self.hops.keep(kept, self.edges.num_shards());
        self.send_unsent()
    }

    fn combine(&mut self, hop: HopKey) -> Result<Tensor, FfnLoss> {
        let begun = self.clock.now();
        if let Some(streams) = self.streams.as_mut().filter(|streams| streams.in_step()) {
            let (hidden_size, kind) = (self.settings.hidden_size, row_kind(self.settings.rows));
            let sum = streams.combine(hop, hidden_size, kind, &self.stats, begun);
            self.stats.handle_combine(self.clock.now() - begun);
            return sum;
        }
        self.recorder.handle_wait(hop, begun);
        loop {
            let seen = self.bell.count();
            self.handle_events();
            self.poll_links();
            if let Some(loss) = self.hops.take_rejected() {
                return Err(loss);
            }
            if let Some(kept) = self.hops.take(hop, &mut self.parts) {
                self.stats.handle_combine(self.clock.now() - begun);
                self.recorder.handle_complete(hop);
                let fatal = |error| FfnLoss::Fatal { what: format!("sum of the shards: {error}") };
                return self.add_up(&kept).map_err(fatal);
            }
            self.send_unsent()?;
            let (overdue, late) = (self.expire_overdue(), self.expire_late());
            let bereft = self.bereft();
            if let Some((shard, until)) = bereft
                && (self.is_warming || self.clock.now() >= until)
            {
                return Err(self.unavailable(shard));
            }
            let ending = self.ending.as_ref().and_then(|ending| Some((ending.deadline()?, ending.why())));
            if let Some((_, why)) = ending.filter(|(deadline, _)| self.clock.now() >= *deadline) {
                return Err(FfnLoss::Unavailable { peer: hop.to_string(), what: why.into() });
            }
            match [overdue, late, bereft.map(|(_, until)| until)].into_iter().flatten().min() {
                Some(deadline) => {
                    let deadline = ending.map_or(deadline, |(ending, _)| deadline.min(ending));
                    self.clock.wait(&self.bell, seen, deadline);
                }
                None if self.hops.table.is_empty() => {
                    return Err(FfnLoss::Fatal { what: format!("{hop} was never dispatched") });
                }
                None => {}
            }
        }
    }

    fn end_step(&mut self, _step: StepId) {
        self.announced.end(self.edges.iter(), &self.stats);
        self.hops.clear();
        self.is_warming = false;
        self.edges.set_warming(false);
        let now = self.clock.now();
        if let Some(streams) = &mut self.streams {
            streams.end_step(&self.stats, now);
        }
        self.note_readiness();
        self.count_cold();
    }

    fn stream(&mut self) -> Option<&mut dyn StreamFfn> {
        // Looked at first: what was captured may be of no more use.
        self.idle();
        if self.by_stream() { Some(self) } else { None }
    }

    fn stream_under_way(&mut self) -> Option<&mut dyn StreamFfn> {
        // Also without a rank: the step has to be waited for.
        if self.streams.is_some() { Some(self) } else { None }
    }

    // Never over links that a stream drives: there a plan is what starts its step.
    fn announce_ahead(&mut self, next: &StepOutline) {
        self.announced.tell_ahead(next, self.edges.warm(), &self.stats);
    }

    fn withdraw(&mut self) -> bool {
        self.announced.withdraw(self.edges.iter(), &self.stats)
    }

    fn hop_records(&self) -> &[HopRecord] {
        self.recorder.hops()
    }

    fn device_times(&self) -> Option<&DeviceTimes> {
        self.streams.as_ref().and_then(Streams::times)
    }

    fn warms_up(&self) -> bool {
        true
    }

    // Links that a stream drives are warmed up with its graphs.
    fn begin_warm_up(&mut self) -> bool {
        self.idle();
        let is_of_use = !self.by_stream();
        if is_of_use {
            self.edges.begin_warm_up();
            self.edges.iter_mut().for_each(|edge| edge.warm_up = None);
            self.script.handle_begin();
        }
        is_of_use
    }

    fn handle_warm(&mut self) -> bool {
        let are_others_cold = self.edges.handle_warm();
        if !are_others_cold {
            self.warm_late();
        }
        are_others_cold
    }

    fn ready(&self) -> bool {
        self.is_complete()
    }

    fn has_news(&self) -> bool {
        !self.events.is_empty()
    }

    fn is_leaving(&self) -> bool {
        self.is_leaving()
    }

    fn standing(&self) -> String {
        (self.standing)()
    }

    fn wake_at(&self) -> Option<Instant> {
        self.first_late().map(|(overdue, ..)| overdue)
    }

    fn idle(&mut self) {
        self.handle_events();
        self.poll_links();
        self.expire_late();
        self.count_cold();
    }
}

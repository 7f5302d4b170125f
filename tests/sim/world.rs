//! Everything around the attention engine's port, in virtual time: FFN processes, the control plane's tasks as state
//! machines, the network between them. Nothing happens but what is in the queue of events, in the order of their times.
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use afd_common::ids::{Epoch, Shard, StepId};
use afd_common::link::Doorbell;
use afd_common::link::bare;
use attention_svc::remote_ffn::edge::EdgeEvent;
use attention_svc::remote_ffn::roster::Roster;

use crate::dice::Dice;
use crate::faults::Faults;
use crate::ffn::Process;
use crate::neighbour::{Neighbour, Wants};
use crate::network::{Arrival, Link, Network, To};

mod control;
mod event;
mod processes;

use control::{Control, limits};
use event::Event;

pub(crate) const LEASE: Duration = Duration::from_millis(300);

/// Sizes of a deployment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) num_shards: u32,
    pub(crate) replicas: u32,
    pub(crate) num_layers: u16,
    pub(crate) num_stages: u8,
    /// Rows go to the shards of their experts only.
    pub(crate) is_routed: bool,
}

struct Rank {
    address: SocketAddr,
    shard: Shard,
    process: Option<Process>,
    next_incarnation: u64,
    control: Option<Control>,
    neighbour: Option<Neighbour>,
    /// Cut directions.
    to_ffn_cut: bool,
    to_attention_cut: bool,
}

/// See the module's head.
pub(crate) struct World {
    pub(crate) now_us: u64,
    pub(crate) violations: Vec<String>,
    /// Printed as things happen, when a seed is replayed.
    pub(crate) is_told: bool,
    base: Instant,
    shape: Shape,
    dice: Dice,
    queue: BTreeMap<(u64, u64), Event>,
    num_events: u64,
    network: Network,
    ranks: Vec<Rank>,
    roster: Roster,
    events: crossbeam_channel::Sender<EdgeEvent>,
    bell: Doorbell,
    next_edge: u64,
    /// The attention rank's rows are on their way, or were until now.
    busy_until_us: u64,
    is_over: bool,
}

impl World {
    pub(crate) fn new(
        shape: Shape,
        faults: Faults,
        in_order: bool,
        dice: Dice,
        base: Instant,
        events: crossbeam_channel::Sender<EdgeEvent>,
        bell: Doorbell,
    ) -> Self {
        let mishaps = faults.mishaps.clone();
        let ranks = (0..shape.num_shards * shape.replicas).map(|rank| Rank {
            address: ([10, 0, 0, 1], 7000 + rank as u16).into(),
            shard: Shard::new(rank / shape.replicas, shape.num_shards).expect("an index below the count"),
            process: None,
            next_incarnation: 1,
            control: None,
            neighbour: None,
            to_ffn_cut: false,
            to_attention_cut: false,
        });
        let mut world = Self {
            now_us: 0,
            violations: Vec::new(),
            is_told: false,
            base,
            shape,
            dice,
            queue: BTreeMap::new(),
            num_events: 0,
            network: Network::new(faults, in_order),
            ranks: ranks.collect(),
            roster: Roster::default(),
            events,
            bell,
            next_edge: 1,
            busy_until_us: 0,
            is_over: false,
        };
        for rank in 0..world.ranks.len() {
            world.start(rank);
            let after = world.dice.between(0, 3000);
            world.after(after, Event::Connect { rank });
        }
        mishaps.into_iter().for_each(|(at, mishap)| world.after(at, Event::Mishap(mishap)));
        world
    }

    pub(crate) fn now(&self) -> Instant {
        self.base + Duration::from_micros(self.now_us)
    }

    pub(crate) fn num_harmed(&self) -> u64 {
        self.network.num_harmed
    }

    pub(crate) fn most_sends(&self, warm_up: StepId) -> u8 {
        self.network.most_sends(warm_up)
    }

    pub(crate) fn num_neighbour_answers(&self) -> u64 {
        self.ranks
            .iter()
            .filter_map(|rank| rank.neighbour.as_ref())
            .map(|neighbour| neighbour.num_answers)
            .sum()
    }

    /// When something happens next.
    pub(crate) fn next_at(&self) -> Option<u64> {
        self.queue.first_key_value().map(|((at, _), _)| *at)
    }

    /// Lets the next thing happen.
    pub(crate) fn step(&mut self) {
        let Some(((at, _), event)) = self.queue.pop_first() else { return };
        self.now_us = self.now_us.max(at);
        self.handle(event);
        self.pump();
    }

    /// From now on nothing goes wrong any more, and whoever was gone comes back.
    pub(crate) fn heal(&mut self) {
        self.tell("all is well from here on");
        self.network.faults = Faults::none();
        let bad = |event: &Event| {
            matches!(
                event,
                Event::Mishap(_)
                    | Event::Continue { .. }
                    | Event::Heal { .. }
                    | Event::Leave { .. }
                    | Event::Restart { .. }
            )
        };
        self.queue.retain(|_, event| !bad(event));
        for rank in 0..self.ranks.len() {
            (self.ranks[rank].to_ffn_cut, self.ranks[rank].to_attention_cut) = (false, false);
            if self.ranks[rank].process.as_ref().is_some_and(|process| process.is_draining) {
                self.crash(rank);
            }
            match &mut self.ranks[rank].process {
                Some(process) => process.is_stopped = false,
                None => self.start(rank),
            }
            self.after(0, Event::Turn { rank });
        }
    }

    /// The attention rank is gone: nobody joins again.
    pub(crate) fn end(&mut self) {
        self.is_over = true;
        for rank in 0..self.ranks.len() {
            self.hang_up(rank, "the attention rank has ended");
            self.ranks[rank].neighbour = None;
        }
    }

    /// What is left that should not be, once everything has ended: frames that nobody has let go, and sessions.
    pub(crate) fn leftovers(&mut self) -> Vec<String> {
        let mut left = Vec::new();
        for (at, link) in self.network.links.drain(..).enumerate() {
            for (side, wire) in [("attention", link.attention), ("FFN", link.ffn)] {
                let stats = wire.stats();
                // What arrived and was never looked at ends with the link.
                drop(wire);
                let held = stats.counts().frames_held;
                if held != 0 {
                    left.push(format!("link {at}: {held} frames are held at the {side} end"));
                }
            }
        }
        for (at, rank) in self.ranks.iter().enumerate() {
            let sessions = rank.process.as_ref().map_or(0, Process::num_sessions);
            if sessions != 0 {
                left.push(format!("F{at} still has {sessions} sessions"));
            }
        }
        left
    }

    fn tell(&self, what: impl std::fmt::Display) {
        if self.is_told {
            println!("{:>9} us  {what}", self.now_us);
        }
    }

    fn after(&mut self, us: u64, event: Event) {
        self.num_events += 1;
        self.queue.insert((self.now_us + us, self.num_events), event);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive { link, to, bytes } => {
                let at = &self.network.links[link];
                at.wire(to).deliver(&bytes);
                if to == To::Ffn {
                    let (rank, after) = (at.rank, self.dice.between(5, 60));
                    self.after(after, Event::Turn { rank });
                }
            }
            Event::Turn { rank } => {
                let running = self.ranks[rank].process.as_mut().filter(|process| !process.is_stopped);
                if running.is_some_and(Process::turn) {
                    let after = self.dice.between(10, 300);
                    self.after(after, Event::Turn { rank });
                }
            }
            Event::Connect { rank } => self.connect(rank),
            Event::Plan { rank, incarnation, tag, plan } => {
                let refused =
                    self.process(rank, incarnation).and_then(|process| process.plan(tag, &plan).err());
                if let Some(refused) = refused {
                    self.violations.push(format!("F{rank} refused a plan: {refused}"));
                }
            }
            Event::Beat { rank, edge } => self.beat(rank, edge),
            Event::Expire { rank, incarnation } => {
                let now = self.now();
                let running = self.process(rank, incarnation).map(|process| process.expire(now)).is_some();
                if running || self.is_stopped(rank, incarnation) {
                    self.after(LEASE.as_micros() as u64 / 4, Event::Expire { rank, incarnation });
                    self.after(0, Event::Turn { rank });
                }
            }
            Event::Hangup { rank, incarnation, tag } => {
                if let Some(process) = self.process(rank, incarnation) {
                    process.end(tag, "the attention rank closed its control stream");
                    self.after(0, Event::Turn { rank });
                }
            }
            Event::Reset { link } => {
                let Link { rank, attention, .. } = &self.network.links[link];
                attention.cut("connection reset by peer");
                let rank = *rank;
                if self.ranks[rank].control.as_ref().is_some_and(|control| control.link == link) {
                    self.hang_up(rank, "control stream failed");
                }
            }
            Event::Neighbour { rank, incarnation } => self.visit_neighbour(rank, incarnation),
            Event::Mishap(mishap) => self.befall(mishap),
            Event::Continue { rank } => {
                self.tell(format_args!("F{rank} continues"));
                self.ranks[rank].process.iter_mut().for_each(|process| process.is_stopped = false);
                self.after(0, Event::Turn { rank });
            }
            Event::Heal { rank } => {
                self.tell(format_args!("F{rank} can be reached again"));
                (self.ranks[rank].to_ffn_cut, self.ranks[rank].to_attention_cut) = (false, false);
            }
            Event::Leave { rank, down_us } => {
                if self.ranks[rank].process.as_ref().is_some_and(|process| process.is_draining) {
                    self.crash(rank);
                    self.after(down_us, Event::Restart { rank });
                }
            }
            Event::Restart { rank } => {
                if self.ranks[rank].process.is_none() {
                    self.start(rank);
                }
            }
        }
    }

    /// A process that runs and is the one that was meant.
    fn process(&mut self, rank: usize, incarnation: u64) -> Option<&mut Process> {
        let process = self.ranks[rank].process.as_mut()?;
        (process.incarnation == incarnation && !process.is_stopped).then_some(process)
    }

    fn is_stopped(&self, rank: usize, incarnation: u64) -> bool {
        let process = self.ranks[rank].process.as_ref();
        process.is_some_and(|process| process.incarnation == incarnation && process.is_stopped)
    }

    fn is_reachable(&self, rank: usize) -> bool {
        let Rank { process, to_ffn_cut, to_attention_cut, .. } = &self.ranks[rank];
        !to_ffn_cut && !to_attention_cut && process.as_ref().is_some_and(|process| !process.is_stopped)
    }

    fn visit_neighbour(&mut self, rank: usize, incarnation: u64) {
        let (now_us, num_layers, is_over) = (self.now_us, self.shape.num_layers, self.is_over);
        let at = &mut self.ranks[rank];
        let alive = at.process.as_mut().filter(|process| process.incarnation == incarnation);
        let Some(process) = alive.filter(|_| !is_over) else { return };
        let visited =
            at.neighbour.as_mut().map(|neighbour| neighbour.turn(now_us, num_layers, &mut self.dice));
        match visited {
            Some(Ok(Wants::Nothing)) => {}
            Some(Err(what)) => self.violations.push(what),
            Some(Ok(Wants::NewLink)) | None => {
                let limits = limits(rank, Epoch(process.mint_epoch()), 1);
                let (near, attention) = bare::end(limits.clone(), Doorbell::default());
                let (far, ffn) = bare::end(limits, process.bell());
                process.adopt(Box::new(far), None);
                self.network.links.push(Link { rank, shard: None, attention, ffn, is_orphan: false });
                let step = at.neighbour.take().map_or(0, |neighbour| neighbour.step());
                at.neighbour = Some(Neighbour::new(near, at.shard, self.shape.is_routed, step));
            }
        }
        // Where nothing is going on a neighbour meets nobody.
        let (least, most) = if now_us < self.busy_until_us { (300, 4_000) } else { (50_000, 150_000) };
        let after = self.dice.between(least, most);
        self.after(after, Event::Neighbour { rank, incarnation });
    }

    // ---- after every event

    fn pump(&mut self) {
        for rank in 0..self.ranks.len() {
            while let Some(control) = &mut self.ranks[rank].control {
                if let Ok(why) = control.abandoned.try_recv() {
                    self.hang_up(rank, &why);
                    break;
                }
                let Ok(plan) = control.plans.try_recv() else { break };
                let (incarnation, tag) = (control.incarnation, control.tag);
                // The stream is reliable: what is cut off is heard never, with everything after it.
                if !self.ranks[rank].to_ffn_cut {
                    self.after(40, Event::Plan { rank, incarnation, tag, plan });
                }
            }
        }
        let ranks = &self.ranks;
        let is_cut = |rank: usize, to| match to {
            To::Ffn => ranks[rank].to_ffn_cut,
            To::Attention => ranks[rank].to_attention_cut,
        };
        let arrivals = self.network.pump(self.now_us, &mut self.dice, is_cut);
        for Arrival { link, to, bytes, after_us } in arrivals {
            let rank = &self.ranks[self.network.links[link].rank];
            if rank.control.as_ref().is_some_and(|control| control.link == link) {
                self.busy_until_us = self.now_us + 5_000;
            }
            self.after(after_us, Event::Arrive { link, to, bytes });
        }
    }

    /// What the port has done since the last event is taken up.
    pub(crate) fn look(&mut self) {
        self.pump();
    }
}

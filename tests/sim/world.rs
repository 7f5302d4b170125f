//! Everything around the attention engine's port, in virtual time: FFN processes, the control plane's tasks as state
//! machines, the network between them. Nothing happens but what is in the queue of events, in the order of their times.
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use afd_common::ids::{Epoch, Shard};
use afd_common::link::Doorbell;
use afd_common::link::bare;
use attention_svc::remote_ffn::edge::EdgeEvent;
use attention_svc::remote_ffn::roster::Roster;

use crate::dice::Dice;
use crate::faults::Faults;
use crate::ffn::Process;
use crate::neighbour::{Neighbour, Wants};
use crate::network::{Arrival, Link, Network, To};

mod attention;
mod control;
mod event;
mod left;
mod processes;

use control::{Control, limits};
use event::Event;

pub(crate) const LEASE: Duration = Duration::from_millis(300);

/// What is told of what happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Telling {
    Nothing,
    /// In words, as it happens.
    Printed,
    /// All of it, as a number.
    Hashed,
}

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
    telling: Telling,
    story: DefaultHasher,
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
    attention_incarnation: u64,
    /// Heard on control streams.
    num_ends_told: u64,
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
        telling: Telling,
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
            telling,
            story: DefaultHasher::new(),
            base,
            shape,
            dice,
            queue: BTreeMap::new(),
            num_events: 0,
            network: Network::new(faults, in_order),
            ranks: ranks.collect(),
            roster: Roster::default(),
            // Nobody listens yet.
            events: crossbeam_channel::unbounded().0,
            bell: Doorbell::default(),
            next_edge: 1,
            attention_incarnation: 0,
            num_ends_told: 0,
            busy_until_us: 0,
            is_over: false,
        };
        for rank in 0..world.ranks.len() {
            world.start(rank);
        }
        mishaps.into_iter().for_each(|(at, mishap)| world.after(at, Event::Mishap(mishap)));
        world
    }

    pub(crate) fn now(&self) -> Instant {
        self.base + Duration::from_micros(self.now_us)
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// When something happens next.
    pub(crate) fn next_at(&self) -> Option<u64> {
        self.queue.first_key_value().map(|((at, _), _)| *at)
    }

    /// Lets the next thing happen.
    pub(crate) fn step(&mut self) {
        let Some(((at, _), event)) = self.queue.pop_first() else { return };
        self.now_us = self.now_us.max(at);
        if self.telling == Telling::Hashed {
            format!("{at} {event:?}").hash(&mut self.story);
        }
        self.handle(event);
        self.pump();
    }

    fn tell(&self, what: impl std::fmt::Display) {
        if self.telling == Telling::Printed {
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
            Event::Hear { rank, edge } => self.hear(rank, edge),
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
            Event::Forsaken { link } => {
                let Link { rank, ffn, .. } = &self.network.links[link];
                ffn.cut("connection reset by peer");
                let rank = *rank;
                self.after(0, Event::Turn { rank });
            }
            Event::Neighbour { rank, incarnation } => self.visit_neighbour(rank, incarnation),
            Event::Mishap(mishap) => self.befall(mishap),
            Event::Continue { rank } => {
                self.tell(format_args!("F{rank} continues"));
                self.ranks[rank].process.iter_mut().for_each(|process| process.is_stopped = false);
                self.after(0, Event::Turn { rank });
                self.hear_all(rank);
            }
            Event::Heal { rank } => {
                self.tell(format_args!("F{rank} can be reached again"));
                (self.ranks[rank].to_ffn_cut, self.ranks[rank].to_attention_cut) = (false, false);
                self.hear_all(rank);
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
                self.network.links.push(Link::new(rank, None, attention, ffn));
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
                let Ok(message) = control.plans.try_recv() else { break };
                control.unheard.push_back(message);
                let edge = control.edge;
                self.after(40, Event::Hear { rank, edge });
            }
        }
        let ranks = &self.ranks;
        let is_cut = |rank: usize, to| match to {
            To::Ffn => ranks[rank].to_ffn_cut,
            To::Attention => ranks[rank].to_attention_cut,
        };
        let arrivals = self.network.pump(self.now_us, &mut self.dice, is_cut);
        if let Some((link, hop)) = self.network.answered_twice.take() {
            self.violations.push(format!("{hop} was answered twice on link {link}"));
        }
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

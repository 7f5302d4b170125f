//! The control plane between the attention rank and FFN processes: who joins, by which link, and how a session ends.
use std::collections::VecDeque;
use std::sync::Arc;

use afd_common::frame::{Checksum, RowType};
use afd_common::ids::{Epoch, HopKey};
use afd_common::link::bare;
use afd_common::link::{Limits, LinkKind};
use afd_common::proto::v1;
use attention_svc::remote_ffn::edge::{Edge, EdgeEvent};
use attention_svc::remote_ffn::hop_table::EdgeId;
use attention_svc::remote_ffn::life::{EdgeControl, Life};
use attention_svc::remote_ffn::roster;
use tokio::sync::mpsc;

use super::{Event, LEASE, World};
use crate::ffn::{MAX_ROWS, Process};
use crate::model::{HIDDEN, TOP_K};
use crate::network::Link;

const PLAN_QUEUE: usize = 16;

/// A session as the control task holds it.
pub(super) struct Control {
    pub(super) edge: EdgeId,
    pub(super) link: usize,
    pub(super) tag: u64,
    pub(super) process: roster::Process,
    pub(super) incarnation: u64,
    pub(super) plans: mpsc::Receiver<v1::steps_request::Message>,
    /// What was said and not heard yet.
    pub(super) unheard: VecDeque<v1::steps_request::Message>,
    pub(super) abandoned: mpsc::Receiver<String>,
    pub(super) life: Arc<Life>,
    pub(super) heard_us: u64,
    pub(super) last_begun: Option<HopKey>,
}

impl World {
    pub(super) fn send_event(&self, event: EdgeEvent) {
        // The port may have ended already.
        let _ = self.events.send(event);
        self.bell.ring();
    }

    pub(super) fn connect(&mut self, rank: usize) {
        if self.is_over || self.ranks[rank].control.is_some() {
            return;
        }
        let joined = if self.is_reachable(rank) { self.join(rank) } else { Err("not there".to_owned()) };
        if let Err(why) = joined {
            self.tell(format_args!("F{rank} is not joined: {why}"));
            let after = self.dice.between(1_000, 20_000);
            self.after(after, Event::Connect { rank });
        }
    }

    fn join(&mut self, rank: usize) -> Result<(), String> {
        let role = v1::Role::Attention.into();
        let incarnation = self.attention_incarnation;
        let identity = v1::Identity { deployment: "sim".into(), role, rank: 0, incarnation };
        let (now, now_us, credits) = (self.now(), self.now_us, self.shape.num_stages.into());
        let at = &mut self.ranks[rank];
        let process = at.process.as_mut().filter(|process| !process.is_draining).ok_or("it drains")?;
        let tag = process.join(&identity, now, LEASE).map_err(|error| error.to_string())?;
        let incarnation = process.incarnation;
        let own = v1::Identity {
            deployment: "sim".into(),
            role: v1::Role::Ffn.into(),
            rank: rank as u32,
            incarnation,
        };
        let seat = roster::Process::of(&own);
        self.roster.seat(&seat, at.address).map_err(|error| error.to_string())?;
        let limits = limits(rank, Epoch(process.mint_epoch()), credits);
        let (near, attention) = bare::end(limits.clone(), self.bell.clone());
        let (far, ffn) = bare::end(limits, process.bell());
        process.adopt(Box::new(far), Some(tag));
        let link = self.network.links.len();
        self.network.links.push(Link::new(rank, Some(at.shard), attention, ffn));
        let edge = EdgeId(self.next_edge);
        self.next_edge += 1;
        let (plan_sender, plans) = mpsc::channel(PLAN_QUEUE);
        let (abandon, abandoned) = mpsc::channel(1);
        let life = Arc::new(Life::new(self.base));
        let up = Edge {
            id: edge,
            peer: format!("F{rank}.{incarnation}").into(),
            shard: at.shard,
            combine_dtype: RowType::F32,
            link: Box::new(near),
            control: Some(EdgeControl { plans: plan_sender, abandon, life: Arc::clone(&life) }),
            hop_seconds: None,
            warm_up: None,
            draining: false,
        };
        at.control = Some(Control {
            edge,
            link,
            tag,
            process: seat,
            incarnation,
            plans,
            unheard: VecDeque::new(),
            abandoned,
            life,
            heard_us: now_us,
            last_begun: None,
        });
        self.tell(format_args!("F{rank}.{incarnation} is joined by link {link}"));
        self.send_event(EdgeEvent::Up(up));
        self.after(0, Event::Turn { rank });
        self.after(LEASE.as_micros() as u64 / 3, Event::Beat { rank, edge });
        Ok(())
    }

    /// The control task's end of a session, whatever the reason.
    pub(super) fn hang_up(&mut self, rank: usize, why: &str) {
        let Some(control) = self.ranks[rank].control.take() else { return };
        self.tell(format_args!("the session with F{rank}.{} ends: {why}", control.incarnation));
        self.roster.vacate(&control.process, self.ranks[rank].address);
        self.send_event(EdgeEvent::Down { id: control.edge, why: why.to_owned() });
        if !self.ranks[rank].to_ffn_cut {
            let (incarnation, tag) = (control.incarnation, control.tag);
            let after = self.dice.between(20, 400);
            self.after(after, Event::Hangup { rank, incarnation, tag });
        }
        let after = self.dice.between(1_000, 10_000);
        self.after(after, Event::Connect { rank });
    }

    /// The rank hears one thing that was said to it, unless nothing gets through: then it waits on the way.
    pub(super) fn hear(&mut self, rank: usize, edge: EdgeId) {
        let at = &mut self.ranks[rank];
        let Some(control) = at.control.as_mut().filter(|control| control.edge == edge) else { return };
        let listens =
            |process: &&mut Process| process.incarnation == control.incarnation && !process.is_stopped;
        let Some(process) = at.process.as_mut().filter(|_| !at.to_ffn_cut).filter(listens) else { return };
        let Some(message) = control.unheard.pop_front() else { return };
        self.num_ends_told += u64::from(matches!(message, v1::steps_request::Message::Cancel(_)));
        if let Err(refused) = process.plan(control.tag, &message) {
            self.violations.push(format!("F{rank} refused a plan: {refused}"));
        }
    }

    /// Whatever waits on the way to a rank gets through from here on.
    pub(super) fn hear_all(&mut self, rank: usize) {
        if let Some(control) = &self.ranks[rank].control {
            let (edge, count) = (control.edge, control.unheard.len());
            (0..count).for_each(|_| self.after(0, Event::Hear { rank, edge }));
        }
    }

    pub(super) fn beat(&mut self, rank: usize, edge: EdgeId) {
        let (is_reachable, now, now_us) = (self.is_reachable(rank), self.now(), self.now_us);
        let at = &mut self.ranks[rank];
        let Some(control) = at.control.as_mut().filter(|control| control.edge == edge) else { return };
        let lease_us = LEASE.as_micros() as u64;
        let meant = at.process.as_mut().filter(|process| process.incarnation == control.incarnation);
        match meant.filter(|_| is_reachable) {
            Some(process) => {
                if !process.renew(control.tag, now + LEASE) {
                    return self.hang_up(rank, "ended the control stream");
                }
                control.heard_us = now_us;
                let begun = process.last_begun(control.tag);
                if begun != control.last_begun {
                    control.last_begun = begun;
                    control.life.handle_moved(now);
                }
            }
            None if now_us - control.heard_us >= lease_us => {
                return self.hang_up(rank, "said nothing for its lease");
            }
            None => {}
        }
        self.after(lease_us / 3, Event::Beat { rank, edge });
    }
}

/// Of a link to a rank.
pub(super) fn limits(rank: usize, epoch: Epoch, credits: u32) -> Limits {
    Limits {
        kind: LinkKind::Tcp,
        peer: format!("F{rank}"),
        epoch,
        credits,
        max_rows: MAX_ROWS,
        max_body_bytes: MAX_ROWS * (HIDDEN * 4 + TOP_K * 8) as u32,
        // As if every other process were of an earlier version.
        checksum: if epoch.0.is_multiple_of(2) { Checksum::Crc32c } else { Checksum::Sum64 },
    }
}

//! FFN processes come, go, stop, and are cut off.
use attention_svc::remote_ffn::edge::EdgeEvent;

use super::{Event, LEASE, Shape, World};
use crate::faults::Mishap;
use crate::ffn::Process;
use crate::model::SimModel;

impl World {
    pub(super) fn start(&mut self, rank: usize) {
        let Shape { num_layers, num_stages, is_routed, .. } = self.shape;
        let at = &mut self.ranks[rank];
        let incarnation = at.next_incarnation;
        at.next_incarnation += 1;
        at.process = Some(Process::start(
            SimModel { shard: at.shard, num_layers, is_routed },
            num_stages.into(),
            incarnation,
        ));
        self.tell(format_args!("F{rank} starts, incarnation {incarnation}"));
        self.after(LEASE.as_micros() as u64 / 4, Event::Expire { rank, incarnation });
        let after = self.dice.between(0, 2000);
        self.after(after, Event::Neighbour { rank, incarnation });
    }

    /// The process is gone from one moment to the next; its peers hear of it when the network lets them.
    pub(super) fn crash(&mut self, rank: usize) {
        self.ranks[rank].process = None;
        self.ranks[rank].neighbour = None;
        let mut orphans = Vec::new();
        for (at, link) in self.network.links.iter_mut().enumerate() {
            if link.rank == rank && !link.is_orphan {
                link.is_orphan = true;
                orphans.push(at);
            }
        }
        let is_cut = self.ranks[rank].to_attention_cut;
        for link in orphans {
            if !is_cut {
                let after = self.dice.between(20, 400);
                self.after(after, Event::Reset { link });
            }
        }
    }

    pub(super) fn befall(&mut self, mishap: Mishap) {
        self.tell(format_args!("{mishap:?}"));
        match mishap {
            Mishap::Crash { rank, down_us } => {
                if self.ranks[rank].process.is_some() {
                    self.crash(rank);
                    self.after(down_us, Event::Restart { rank });
                }
            }
            Mishap::Stop { rank, for_us } => {
                if let Some(process) = &mut self.ranks[rank].process {
                    process.is_stopped = true;
                    self.after(for_us, Event::Continue { rank });
                }
            }
            Mishap::Cut { rank } => {
                if let Some(control) = &self.ranks[rank].control {
                    let link = &self.network.links[control.link];
                    link.attention.cut("the connection broke");
                    link.ffn.cut("the connection broke");
                    self.after(10, Event::Turn { rank });
                }
            }
            Mishap::Partition { rank, to_ffn, to_attention, for_us } => {
                self.ranks[rank].to_ffn_cut |= to_ffn;
                self.ranks[rank].to_attention_cut |= to_attention;
                self.after(for_us, Event::Heal { rank });
            }
            Mishap::Drain { rank, grace_us, down_us } => {
                if let Some(process) = &mut self.ranks[rank].process {
                    process.is_draining = true;
                    self.after(grace_us, Event::Leave { rank, down_us });
                    if let Some(control) = self.ranks[rank].control.as_ref()
                        && self.is_reachable(rank)
                    {
                        let id = control.edge;
                        self.send_event(EdgeEvent::Draining { id });
                    }
                }
            }
        }
    }
}

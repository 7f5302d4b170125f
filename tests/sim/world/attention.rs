//! The attention rank begins, and is gone: with a word, as when its process ends, or without one, as when its host does.
use afd_common::ids::StepId;
use afd_common::link::Doorbell;
use attention_svc::remote_ffn::edge::EdgeEvent;
use attention_svc::remote_ffn::roster::Roster;

use super::{Event, World};

impl World {
    /// A process of it begins, which knows of nobody and is told of whoever joins by `events` and `bell`.
    pub(crate) fn begin_life(&mut self, events: crossbeam_channel::Sender<EdgeEvent>, bell: Doorbell) {
        self.attention_incarnation += 1;
        (self.events, self.bell, self.roster) = (events, bell, Roster::default());
        self.tell(format_args!("the attention rank starts, incarnation {}", self.attention_incarnation));
        for rank in 0..self.ranks.len() {
            let after = self.dice.between(0, 3000);
            self.after(after, Event::Connect { rank });
        }
    }

    /// The process is gone from one moment to the next. Its steps up to `warm_up` were made up. Its port is still there, and what
    /// that says from here on is said by nobody.
    pub(crate) fn end_life(&mut self, is_silent: bool, warm_up: StepId) {
        self.tell(format_args!("the attention rank is gone, its host too: {is_silent}"));
        self.look();
        self.network.end_life(warm_up);
        for rank in 0..self.ranks.len() {
            let Some(control) = self.ranks[rank].control.take() else { continue };
            if !is_silent && !self.ranks[rank].to_ffn_cut {
                let after = self.dice.between(20, 400);
                self.after(after, Event::Hangup { rank, incarnation: control.incarnation, tag: control.tag });
            }
        }
        for at in 0..self.network.links.len() {
            let link = &mut self.network.links[at];
            if link.shard.is_none() || std::mem::replace(&mut link.is_forsaken, true) {
                continue;
            }
            let is_heard = !is_silent && !link.is_orphan && !self.ranks[link.rank].to_ffn_cut;
            if is_heard {
                let after = self.dice.between(20, 400);
                self.after(after, Event::Forsaken { link: at });
            }
        }
    }

    /// Nobody joins again.
    pub(crate) fn end(&mut self) {
        self.is_over = true;
        self.ranks.iter_mut().for_each(|rank| rank.neighbour = None);
    }
}

//! The world comes to rest, and what should not be left of what happened is looked for.
use std::hash::Hasher;

use super::{Event, World};
use crate::faults::Faults;
use crate::ffn::Process;
use crate::run::Summary;

impl World {
    /// From now on nothing goes wrong any more. Whoever is gone or about to stop stays so.
    pub(crate) fn calm(&mut self) {
        self.tell("nothing goes wrong from here on");
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
            let at = &mut self.ranks[rank];
            (at.to_ffn_cut, at.to_attention_cut) = (false, false);
            at.process.iter_mut().for_each(|process| process.is_stopped = false);
            self.after(0, Event::Turn { rank });
            self.hear_all(rank);
        }
    }

    /// Whoever was gone comes back.
    pub(crate) fn heal(&mut self) {
        self.tell("all is well from here on");
        for rank in 0..self.ranks.len() {
            if self.ranks[rank].process.as_ref().is_some_and(|process| process.is_draining) {
                self.crash(rank);
            }
            if self.ranks[rank].process.is_none() {
                self.start(rank);
            }
        }
    }

    /// What is still there of steps and hops though no step is under way and everything that was said has been heard.
    pub(crate) fn lingering(&self) -> Option<String> {
        for (at, rank) in self.ranks.iter().enumerate() {
            let Some(control) = &rank.control else { continue };
            if !control.unheard.is_empty() {
                return Some(format!("F{at} has not heard what was said"));
            }
            let link = &self.network.links[control.link];
            for (side, wire) in [("attention", &link.attention), ("FFN", &link.ffn)] {
                let held = wire.stats().counts().frames_held;
                if held != 0 {
                    return Some(format!(
                        "{held} frames outlive their hops at the {side} end of F{at}'s link"
                    ));
                }
            }
            let process = rank.process.as_ref().filter(|process| process.incarnation == control.incarnation);
            if process.is_some_and(|process| process.is_under_way(control.tag)) {
                return Some(format!("F{at} takes a step for one under way that is over"));
            }
        }
        None
    }

    /// What is left that should not be, once everything has ended: ends of links that nobody has let go, frames, and sessions.
    pub(crate) fn leftovers(&mut self) -> Vec<String> {
        let mut left = Vec::new();
        for (at, link) in self.network.links.drain(..).enumerate() {
            for (side, wire) in [("attention", link.attention), ("FFN", link.ffn)] {
                // A neighbour has no session by whose end the FFN would know, where its farewell is lost.
                if wire.is_held() && link.shard.is_some() {
                    left.push(format!("link {at} is still held at the {side} end"));
                }
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

    /// What has come of it.
    pub(crate) fn add_to(&self, summary: &mut Summary) {
        let neighbours = self.ranks.iter().filter_map(|rank| rank.neighbour.as_ref());
        summary.neighbours += neighbours.map(|neighbour| neighbour.num_answers).sum::<u64>();
        summary.harmed += self.network.num_harmed;
        summary.most_sends = summary.most_sends.max(self.network.most_sends());
        summary.ends_told += self.num_ends_told;
        summary.story = self.story.finish();
    }
}

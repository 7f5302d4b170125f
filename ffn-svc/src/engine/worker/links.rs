//! Links come and go with their sessions.
use std::sync::Arc;

use afd_common::link::HopLink;

use super::{Source, Worker};
use crate::engine::accounts::StepAccounts;
use crate::engine::{SessionTag, StageModel};
use crate::hop_queue::SourceId;

impl<M: StageModel> Worker<M> {
    pub(super) fn adopt(
        &mut self,
        link: Box<dyn HopLink>,
        accounts: Arc<StepAccounts>,
        session: SessionTag,
        rank: u32,
    ) {
        let id = SourceId(self.next_source);
        self.next_source += 1;
        tracing::info!(peer = %link.limits().peer, kind = %link.limits().kind, epoch = link.limits().epoch.0, "link up");
        self.metrics().links.with_label_values(&[&link.limits().kind.to_string()]).inc();
        self.metrics().book.handle_up(link.as_ref());
        self.queue.open(id);
        self.sources.push(Source { id, link, accounts, session, rank, failed_hops: 0 });
    }

    pub(super) fn close_session(&mut self, session: SessionTag, reason: &str) {
        while let Some(at) = self.sources.iter().position(|source| source.session == session) {
            self.sources[at].link.close(reason);
            self.drop_source(at, reason);
        }
        while let Some(at) = self.streams.iter().position(|source| source.owner.session == session) {
            self.drop_stream(at, reason);
        }
    }

    pub(super) fn stop(&mut self, reason: &str) {
        while !self.streams.is_empty() {
            self.drop_stream(0, reason);
        }
        for at in (0..self.sources.len()).rev() {
            self.sources[at].link.close(reason);
            self.drop_source(at, reason);
        }
    }

    /// Says on every link that the engine has died. Touches nothing else: whatever was under way when it did may be half done.
    pub(in crate::engine) fn say_farewell(&mut self, reason: &str) {
        self.sources.iter_mut().for_each(|source| source.link.close(reason));
    }

    pub(super) fn drop_source(&mut self, at: usize, why: &str) {
        let source = self.sources.swap_remove(at);
        let limits = source.link.limits();
        self.queue.close(source.id, &mut self.dropped);
        self.convoys.handle_closed(source.id);
        tracing::info!(
            peer = %limits.peer, kind = %limits.kind, epoch = limits.epoch.0, dropped_hops = self.dropped.len(), why,
            "link down"
        );
        self.dropped.clear();
        self.options.metrics.book.handle_down(source.link.as_ref());
        self.options.metrics.links.with_label_values(&[&limits.kind.to_string()]).dec();
    }
}

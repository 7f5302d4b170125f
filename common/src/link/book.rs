//! The links of a process as metrics: which are up, on which epoch, and what came and went over all that ever were. Touched
//! when a link comes or goes, never by a hop.
use std::sync::{Arc, Mutex, MutexGuard};

use super::{HopLink, LinkCounts, LinkKind, LinkStats};
use crate::ids::Epoch;
use crate::telemetry::metrics::{ReadKind, Sample};
use crate::telemetry::{MetricError, Metrics};

const KINDS: [LinkKind; 6] =
    [LinkKind::Loopback, LinkKind::Tcp, LinkKind::Inline, LinkKind::Shm, LinkKind::Nccl, LinkKind::CudaIpc];

/// See the module's head.
#[derive(Debug, Default)]
pub struct LinkBook(Mutex<Book>);

#[derive(Debug, Default)]
struct Book {
    live: Vec<Entry>,
    /// What links that are gone have counted, by kind.
    past: [Totals; KINDS.len()],
}

#[derive(Debug)]
struct Entry {
    kind: LinkKind,
    peer: String,
    epoch: Epoch,
    stats: Arc<LinkStats>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    sent_bytes: u64,
    received_bytes: u64,
    rejected: [u64; REASONS.len()],
}

/// Why a link drops a frame by itself.
const REASONS: [&str; 3] = ["epoch", "unasked", "duplicate"];

impl Totals {
    fn add(&mut self, counts: &LinkCounts) {
        self.sent_bytes += counts.bytes_sent;
        self.received_bytes += counts.bytes_received;
        let rejected = [counts.dropped_epoch, counts.dropped_unasked, counts.dropped_duplicate];
        self.rejected.iter_mut().zip(rejected).for_each(|(sum, count)| *sum += count);
    }
}

impl LinkBook {
    /// A link is up.
    pub fn handle_up(&self, link: &dyn HopLink) {
        let limits = link.limits();
        let (kind, peer, epoch) = (limits.kind, limits.peer.clone(), limits.epoch);
        self.lock().live.push(Entry { kind, peer, epoch, stats: link.stats() });
    }

    /// A link that a stream drives is up; what goes over it is not seen by the host, so its owner counts in what is
    /// returned.
    pub fn handle_stream_up(&self, kind: LinkKind, peer: &str, epoch: Epoch) -> Arc<LinkStats> {
        let stats = Arc::<LinkStats>::default();
        let entry = Entry { kind, peer: peer.to_owned(), epoch, stats: Arc::clone(&stats) };
        self.lock().live.push(entry);
        stats
    }

    /// It is gone. Its counts stay.
    pub fn handle_down(&self, link: &dyn HopLink) {
        self.handle_stream_down(&link.stats());
    }

    /// As [`handle_down`](Self::handle_down), by what [`handle_stream_up`](Self::handle_stream_up) returned.
    pub fn handle_stream_down(&self, stats: &Arc<LinkStats>) {
        let mut book = self.lock();
        if let Some(at) = book.live.iter().position(|entry| Arc::ptr_eq(&entry.stats, stats)) {
            let Entry { kind, stats, .. } = book.live.swap_remove(at);
            book.past[index(kind)].add(&stats.counts());
        }
    }

    /// Shows the links of `book` from now on.
    ///
    /// # Errors
    /// When the names are taken.
    pub fn show(book: &Arc<Self>, metrics: &Metrics) -> Result<(), MetricError> {
        let of = |book: &Arc<Self>| Arc::clone(book);
        let live = of(book);
        let help = "Epoch of a link that is up: another number is another life.";
        metrics.read_when_asked(ReadKind::Gauge, "afd_link_epoch", help, &["peer", "kind"], move || {
            live.lock().live.iter().map(Entry::sample).collect()
        })?;
        let all = of(book);
        let help = "Bytes of frames that went over links, by kind and direction.";
        metrics.read_when_asked(
            ReadKind::Counter,
            "afd_link_bytes_total",
            help,
            &["kind", "direction"],
            move || {
                let directions = |(kind, totals): (LinkKind, Totals)| {
                    [("sent", totals.sent_bytes), ("received", totals.received_bytes)]
                        .map(|(direction, bytes)| sample(vec![kind.to_string(), direction.into()], bytes))
                };
                all.totals().into_iter().flat_map(directions).collect()
            },
        )?;
        let all = of(book);
        let help = "Frames that links dropped: of another epoch, not asked for, or here already.";
        metrics.read_when_asked(
            ReadKind::Counter,
            "afd_link_frames_rejected_total",
            help,
            &["reason"],
            move || {
                let totals = all.totals();
                let count = |at: usize| totals.iter().map(|(_, totals)| totals.rejected[at]).sum();
                let of_reason = |(at, reason): (usize, &&str)| sample(vec![(*reason).into()], count(at));
                REASONS.iter().enumerate().map(of_reason).collect()
            },
        )
    }

    /// Of the kinds that were ever used.
    fn totals(&self) -> Vec<(LinkKind, Totals)> {
        let book = self.lock();
        let mut totals = book.past;
        book.live.iter().for_each(|entry| totals[index(entry.kind)].add(&entry.stats.counts()));
        let used = |(kind, totals): &(LinkKind, Totals)| {
            totals.sent_bytes + totals.received_bytes > 0 || book.live.iter().any(|entry| entry.kind == *kind)
        };
        KINDS.into_iter().zip(totals).filter(used).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Entry {
    fn sample(&self) -> Sample {
        sample(vec![self.peer.clone(), self.kind.to_string()], self.epoch.0)
    }
}

fn sample(labels: Vec<String>, value: u64) -> Sample {
    Sample { labels, value: value as f64 }
}

fn index(kind: LinkKind) -> usize {
    KINDS.iter().position(|known| *known == kind).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::{Doorbell, contract, loopback};
    use super::*;

    #[test]
    fn counts_outlive_their_link() {
        let (book, metrics) = (Arc::new(LinkBook::default()), Metrics::new());
        LinkBook::show(&book, &metrics).unwrap();
        let end = |peer| (contract::limits(peer), Doorbell::default());
        let (mut here, _there) = loopback::pair(end("F0"), end("A0"));
        let kind = here.limits().kind;
        book.handle_up(&here);
        let has = |line: String| metrics.render().unwrap().lines().any(|found| found == line);
        let sent =
            |bytes: usize| format!("afd_link_bytes_total{{kind=\"{kind}\",direction=\"sent\"}} {bytes}");
        assert!(has(sent(0)), "{}", metrics.render().unwrap());
        let header = crate::frame::FrameHeader {
            kind: crate::frame::FrameKind::Dispatch,
            dtype: crate::frame::RowType::F32,
            side: crate::frame::SideKind::None,
            epoch: Epoch(0),
            hop: crate::frame::FrameHeader::key(1, 0, 0),
            rows: 0,
            columns: 4,
            side_columns: 0,
            body_bytes: 0,
        };
        here.send(header, &[]).unwrap();
        let bytes = crate::frame::HEADER_BYTES;
        assert!(has(sent(bytes)), "{}", metrics.render().unwrap());
        book.handle_down(&here);
        book.handle_down(&here);
        assert!(has(sent(bytes)) && has("afd_link_frames_rejected_total{reason=\"epoch\"} 0".into()));
        assert!(!metrics.render().unwrap().contains("afd_link_epoch{"));
    }
}

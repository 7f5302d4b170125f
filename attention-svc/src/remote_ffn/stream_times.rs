//! Times of a step over links that a stream drives, when they were asked for: marks on attention's stream around every put
//! and wait. What lies between a wait and the next put is attention itself.
use std::time::{Duration, Instant};

use afd_common::ids::{Epoch, HopKey};
use afd_common::link::LinkKind;
use afd_gpu::{Anchor, Completion, Device, GpuError, Stream};

use crate::engine::{AttendRecord, DeviceTimes, HopRecord, Work};

/// How long the device may take to say what time it is.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a mark is in front of or behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    /// Rows are about to be put.
    PutBegins,
    /// They are put.
    PutEnds,
    /// The stream is about to wait.
    WaitBegins,
    /// What it waited for is there.
    WaitEnds,
}

/// One way of a hop, for its record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub(super) key: HopKey,
    pub(super) shard: u32,
    pub(super) rows: u32,
    pub(super) link: LinkKind,
    pub(super) epoch: Epoch,
}

/// The marks of one step.
pub(super) struct StreamTimes {
    begun: Completion,
    marks: Vec<(Point, Way, Completion)>,
}

impl StreamTimes {
    /// The step begins.
    pub(super) fn begin(stream: &Stream) -> Result<Self, GpuError> {
        Ok(Self { begun: stream.mark(true)?, marks: Vec::new() })
    }

    pub(super) fn mark(&mut self, stream: &Stream, point: Point, way: Way) -> Result<(), GpuError> {
        self.marks.push((point, way, stream.mark(true)?));
        Ok(())
    }

    /// The step is over.
    pub(super) fn read(self, device: &Device) -> Result<DeviceTimes, GpuError> {
        let anchor = Anchor::now(device, PATIENCE)?;
        let begun = anchor.moment(&self.begun)?;
        let marks = self.marks.iter().map(|(point, way, mark)| Ok((*point, *way, anchor.moment(mark)?)));
        Ok(sort_out(begun, marks.collect::<Result<_, GpuError>>()?))
    }
}

/// Moments in the order of the stream to what happened between them.
fn sort_out(begun: Instant, marks: Vec<(Point, Way, Instant)>) -> DeviceTimes {
    let mut times = DeviceTimes::default();
    // Since when the stream has done nothing but compute.
    let mut free = begun;
    for (point, way, at) in marks {
        let record = times.hops.iter_mut().find(|hop| (hop.key, hop.shard) == (way.key, way.shard));
        match (point, record) {
            (Point::PutBegins, _) => {
                // To the next shard the same rows go at once.
                if times.attends.last().is_none_or(|last| last.hop != way.key) {
                    times.attends.push(AttendRecord {
                        work: Work::Attention,
                        hop: way.key,
                        begun: free,
                        ended: at,
                    });
                }
                times.hops.push(HopRecord {
                    key: way.key,
                    shard: way.shard,
                    rows: way.rows,
                    link: way.link,
                    epoch: way.epoch,
                    sends: 1,
                    begun: at,
                    sent: at,
                    combine_begun: None,
                    arrived: None,
                    combined: None,
                });
            }
            (Point::PutEnds, Some(hop)) => hop.sent = at,
            (Point::WaitBegins, Some(hop)) => hop.combine_begun = Some(at),
            (Point::WaitEnds, Some(hop)) => (hop.arrived, hop.combined) = (Some(at), Some(at)),
            (_, None) => {}
        }
        free = at;
    }
    times
}

#[cfg(test)]
mod tests {
    use afd_common::frame::FrameHeader;

    use super::*;

    #[test]
    fn attention_is_what_lies_between_a_wait_and_the_next_put() {
        let begun = Instant::now();
        let after = |us: u64| begun + Duration::from_micros(us);
        let way = |layer, stage, shard| Way {
            key: FrameHeader::key(7, layer, stage),
            shard,
            rows: 3,
            link: LinkKind::CudaIpc,
            epoch: Epoch(1),
        };
        use Point::{PutBegins, PutEnds, WaitBegins, WaitEnds};
        let marks = vec![
            (PutBegins, way(0, 0, 0), after(10)),
            (PutEnds, way(0, 0, 0), after(12)),
            (PutBegins, way(0, 0, 1), after(12)),
            (PutEnds, way(0, 0, 1), after(14)),
            (PutBegins, way(0, 1, 0), after(24)),
            (PutEnds, way(0, 1, 0), after(26)),
            (WaitBegins, way(0, 0, 0), after(26)),
            (WaitEnds, way(0, 0, 0), after(40)),
            (WaitBegins, way(0, 0, 1), after(40)),
            (WaitEnds, way(0, 0, 1), after(41)),
            (PutBegins, way(1, 0, 0), after(50)),
        ];
        let times = sort_out(begun, marks);
        let attends: Vec<_> = times
            .attends
            .iter()
            .map(|one| (one.hop.layer.0, one.hop.stage.0, one.begun, one.ended))
            .collect();
        let expected =
            [(0, 0, after(0), after(10)), (0, 1, after(14), after(24)), (1, 0, after(41), after(50))];
        assert_eq!(attends, expected);
        let first = times.hops[0];
        assert_eq!((first.begun, first.sent), (after(10), after(12)));
        assert_eq!((first.combine_begun, first.arrived), (Some(after(26)), Some(after(40))));
        assert_eq!(times.hops.len(), 4);
        assert_eq!(times.hops[1].arrived, Some(after(41)));
    }
}

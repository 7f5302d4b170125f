//! Times of a step that was asked for: marks on the stream around every wait, layer and put, read once the step is over.
use std::time::Duration;

use afd_gpu::{Anchor, Completion, Device, GpuError, Stream};

use crate::engine::HopMoments;

/// How long the device may take to say what time it is.
const PATIENCE: Duration = Duration::from_secs(1);

/// Of every hop in the order in which they are enqueued: its rows are there, it is computed, it is sent.
#[derive(Default)]
pub(super) struct Marks(Vec<Completion>);

impl Marks {
    /// The next one.
    pub(super) fn set(&mut self, stream: &Stream) -> Result<(), GpuError> {
        self.0.push(stream.mark(true)?);
        Ok(())
    }

    /// The moments of every hop; the step is over.
    pub(super) fn read(&self, device: &Device) -> Result<Vec<HopMoments>, GpuError> {
        let anchor = Anchor::now(device, PATIENCE)?;
        let hops = self.0.as_chunks().0.iter();
        hops.map(|[arrived, computed, sent]| {
            Ok(HopMoments {
                arrived: anchor.moment(arrived)?,
                computed: anchor.moment(computed)?,
                sent: anchor.moment(sent)?,
            })
        })
        .collect()
    }
}

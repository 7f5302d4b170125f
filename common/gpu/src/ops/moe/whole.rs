//! A mixture-of-experts layer for at most eight rows: one kernel from the router to the sum.
use super::few::{Call, MoeTuning, TRACE_BYTES};
use super::plan::stages_of_whole;
use super::{MoeOutput, MoeShape};
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// The kernel, with the memory that its blocks share.
#[derive(Debug)]
pub(super) struct Whole {
    kernel: Kernel,
    blocks: u32,
    pub(super) overlap: bool,
    /// What `moe_whole.cu` calls so.
    pub(super) state: Region,
    hidden: Region,
}

impl Whole {
    /// Most rows of a call.
    pub(super) const MAX_ROWS: usize = 8;
    /// Threads of a block: eight warps multiply, one fetches, four choose.
    const THREADS: u32 = 13 * 32;
    /// Where `state` counts what is written of each segment.
    const WRITTEN_AT: usize = 96 * 4;

    /// Compiles for `shape`; `None` where the kernels for more rows do as well.
    pub(super) fn new(
        device: &Device,
        shape: MoeShape,
        output: MoeOutput,
        tuning: MoeTuning,
    ) -> Result<Option<Self>, GpuError> {
        let Some((stages, bytes)) = stages_of_whole(&shape) else { return Ok(None) };
        let constants = [
            ("STAGES", stages as i64),
            ("STATIC_PERCENT", i64::from(tuning.static_percent)),
            ("PACE", i64::from(tuning.pace_of_whole)),
            ("TRACE", i64::from(tuning.trace)),
        ];
        let constants = [&shape.constants(output)[..], &constants].concat();
        let kernel = Module::load(device, Source::MoeWhole, &constants)?.kernel("moe_whole", bytes)?;
        if tuning.one_split {
            kernel.prefer_shared_memory()?;
        }
        let packets = Self::MAX_ROWS * shape.num_experts;
        let segments = shape.num_experts.min(Self::MAX_ROWS * shape.top_k) + shape.num_shared;
        let state_bytes = Self::WRITTEN_AT + segments.next_multiple_of(2) * 4 + packets * 8 + TRACE_BYTES;
        Ok(Some(Self {
            kernel,
            blocks: device.num_multiprocessors(),
            overlap: true,
            state: Region::zeroed(device, state_bytes)?,
            hidden: Region::alloc(device, segments * Self::MAX_ROWS * shape.intermediate * 2)?,
        }))
    }

    /// Enqueues the layer. What is given was checked.
    pub(super) fn enqueue(&self, stream: &Stream, call: &Call<'_>, logits: &Region) -> Result<(), GpuError> {
        let &Call { weights, x, rows, num_rows, out } = call;
        let launch = Launch::new(&self.kernel, (self.blocks, 1), Self::THREADS).overlap(self.overlap);
        let launch = launch.region(&weights.gate_up).region(&weights.down).maybe(weights.router.as_ref());
        let launch = launch.maybe(weights.bias.as_ref()).region(x).region(out).region(&self.hidden);
        let launch = launch.region(logits).region(&self.state).maybe(weights.counts.as_ref());
        let launch = launch.maybe(num_rows).size(rows)?.size(weights.num_here)?;
        let launch = launch.size(weights.first_expert)?.f32(weights.scale);
        // SAFETY: moe_whole's arguments; `Moe` checked their sizes, or they were chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }
}

//! A mixture-of-experts layer for a few dozen rows: four kernels that overlap at their ends. A dense MLP is one without
//! routed experts, cut into shared ones.
use super::super::Ahead;
use super::few::{Call, Moe, MoeTuning, TRACE_BYTES};
use super::plan::Plan;
use super::{MoeOutput, MoeShape};
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// The kernels, with the memory between them.
#[derive(Debug)]
pub(super) struct Parts {
    shape: MoeShape,
    blocks: u32,
    pub(super) overlap: bool,
    /// Absent without routed experts.
    router: Option<Kernel>,
    gate_up: Kernel,
    down: Kernel,
    combine: Kernel,
    threads_up: u32,
    threads_down: u32,
    pub(super) routing: Region,
    weights: Region,
    ticket: Region,
    hidden: Region,
    partial: Region,
}

impl Parts {
    /// Compiles for `shape` and calls of up to `max_rows` rows.
    pub(super) fn new(
        device: &Device,
        shape: MoeShape,
        max_rows: usize,
        output: MoeOutput,
        tuning: MoeTuning,
    ) -> Result<Self, GpuError> {
        let plan = Plan::of(&shape, max_rows)?;
        let constants = [
            ("MAX_ROWS", Moe::MAX_ROWS as i64),
            ("NT", plan.row_tiles as i64),
            ("WARPS_UP", plan.up.warps as i64),
            ("WARPS_DOWN", plan.down.warps as i64),
            ("STAGES_UP", plan.up.stages as i64),
            ("STAGES_DOWN", plan.down.stages as i64),
            ("THREADS_UP", i64::from(plan.up.threads(plan.row_tiles))),
            ("THREADS_DOWN", i64::from(plan.down.threads(plan.row_tiles))),
            ("STATIC_PERCENT", i64::from(tuning.static_percent)),
            ("PACE", i64::from(tuning.pace)),
            ("TRACE", i64::from(tuning.trace)),
        ];
        let constants = [&shape.constants(output)[..], &constants].concat();
        let module = Module::load(device, Source::Moe, &constants)?;
        let choices = shape.top_k + shape.num_shared;
        let segment_rows = plan.row_tiles * 8;
        let max_segments = shape.num_experts + Moe::MAX_ROWS * shape.top_k / segment_rows;
        let routing_ints = 8 + (2 + segment_rows) * max_segments + Moe::MAX_ROWS * shape.top_k;
        let kernel = |name, bytes| {
            let kernel = module.kernel(name, bytes)?;
            if tuning.one_split {
                kernel.prefer_shared_memory()?;
            }
            Ok(kernel)
        };
        let router = (shape.num_experts > 0).then(|| kernel("moe_router", 0)).transpose()?;
        Ok(Self {
            shape,
            blocks: device.num_multiprocessors(),
            overlap: true,
            router,
            gate_up: kernel("moe_gate_up", plan.up.bytes)?,
            down: kernel("moe_down", plan.down.bytes)?,
            combine: kernel("moe_combine", 0)?,
            threads_up: plan.up.threads(plan.row_tiles),
            threads_down: plan.down.threads(plan.row_tiles),
            routing: Region::zeroed(device, routing_ints.div_ceil(2) * 8 + TRACE_BYTES)?,
            weights: Region::alloc(device, max_rows * shape.top_k * 4)?,
            ticket: Region::zeroed(device, 4)?,
            hidden: Region::alloc(device, max_rows * choices * shape.intermediate * 2)?,
            partial: Region::alloc(device, max_rows * choices * shape.hidden * 4)?,
        })
    }

    /// Which rows go to which expert. What is given was checked, here and below.
    pub(super) fn route(&self, stream: &Stream, call: &Call<'_>, logits: &Region) -> Result<(), GpuError> {
        let (shape, &Call { weights, x, rows, num_rows, .. }) = (&self.shape, call);
        let Some(kernel) = &self.router else { return Ok(()) };
        let Some(router) = &weights.router else { return Err(GpuError::unsupported("no router")) };
        let grid = (rows.div_ceil(8) as u32, (shape.num_experts / 16) as u32);
        let launch = Launch::new(kernel, grid, 256).overlap(self.overlap);
        let launch = launch.region(x).region(router).maybe(weights.bias.as_ref()).region(logits);
        let launch = launch.region(&self.routing).region(&self.weights).region(&self.ticket);
        let launch = launch.maybe(weights.counts.as_ref()).maybe(num_rows);
        let launch = launch.size(rows)?.f32(weights.scale);
        let launch = launch.size(weights.first_expert)?.size(weights.num_here)?;
        // SAFETY: moe_router's arguments; sizes were checked above or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }

    /// The products with gate and up.
    pub(super) fn gate_up(&self, stream: &Stream, call: &Call<'_>) -> Result<(), GpuError> {
        let &Call { weights, x, rows, .. } = call;
        let launch = Launch::new(&self.gate_up, (self.blocks, 1), self.threads_up).overlap(self.overlap);
        let launch = launch.region(&weights.gate_up).region(&weights.down).region(x).region(&self.hidden);
        // Without a router nobody says early that x is there.
        let patience = if self.overlap && self.router.is_some() { 256 } else { 0 };
        let launch = launch.region(&self.routing).size(rows)?.size(weights.num_here)?.u32(patience);
        // SAFETY: moe_gate_up's arguments; sizes were checked above, in `route`, or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }

    /// The products with down, of each choice for itself.
    pub(super) fn down(&self, stream: &Stream, call: &Call<'_>) -> Result<(), GpuError> {
        let &Call { weights, rows, .. } = call;
        let launch = Launch::new(&self.down, (self.blocks, 1), self.threads_down).overlap(self.overlap);
        let launch = launch.region(&weights.down).region(&self.hidden).region(&self.partial);
        let launch = launch.region(&self.routing).size(rows)?.size(weights.num_here)?;
        // SAFETY: moe_down's arguments; sizes were checked above or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }

    /// The sum over a row's choices.
    pub(super) fn combine(&self, stream: &Stream, call: &Call<'_>) -> Result<(), GpuError> {
        let &Call { weights, rows, num_rows, out, .. } = call;
        let (ahead, parts) = (Ahead::of(&weights.ahead), self.shape.hidden / 256);
        let grid = (rows as u32 + ahead.blocks(parts * 64), parts as u32);
        let launch = Launch::new(&self.combine, grid, 64).overlap(self.overlap);
        let launch = launch.region(&self.partial).region(&self.weights).region(out).maybe(num_rows);
        let launch = ahead.arguments(launch.size(rows)?)?;
        // SAFETY: moe_combine's arguments; sizes were checked above or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }
}

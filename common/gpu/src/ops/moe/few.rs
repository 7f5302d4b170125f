//! A mixture-of-experts layer for few rows: four kernels that overlap at their ends. A dense MLP is one without routed
//! experts, cut into shared ones.
use super::super::Ahead;
use super::plan::Plan;
use super::{MoeOutput, MoeShape};
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// Weights of a layer, bf16 unless it is said.
#[derive(Clone, Debug)]
pub struct MoeWeights {
    /// `[num_experts, hidden]`; absent without routed experts.
    pub router: Option<Region>,
    /// `[num_experts]` f32, with [`MoeScoring::Sigmoid`].
    pub bias: Option<Region>,
    /// `[experts here + num_shared, 2 * intermediate, hidden]`: of each expert the gate's rows, then up's.
    pub gate_up: Region,
    /// `[experts here + num_shared, hidden, intermediate]`
    pub down: Region,
    /// Which routed experts are here: a shard's, or all.
    pub first_expert: usize,
    /// How many; the shared experts' weights come behind them.
    pub num_here: usize,
    /// Factor on every routed weight.
    pub scale: f32,
    /// At most three regions, fetched into the second-level cache by the layer's last kernel: what the device will read next
    /// whatever comes. Empty where other work follows at once.
    pub ahead: Vec<Region>,
}

/// What the benchmark turns; the defaults are the best it found.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct MoeTuning {
    /// Of the routed weight tiles, those that blocks do not compete for.
    pub static_percent: u32,
    /// Cycles for 16 KB that a block fetches while the rows and their choice are being made; 0 is as fast as can be.
    pub pace: u32,
    /// Whether small kernels ask for the large ones' split of memory.
    pub one_split: bool,
    /// Whether kernels note when they began and ended.
    pub trace: bool,
}

impl Default for MoeTuning {
    fn default() -> Self {
        Self { static_percent: 60, pace: 950, one_split: true, trace: false }
    }
}

/// The kernels for a shape and up to `max_rows` rows, with the memory between them.
#[derive(Debug)]
pub struct Moe {
    shape: MoeShape,
    max_rows: usize,
    output: MoeOutput,
    blocks: u32,
    overlap: bool,
    /// Absent without routed experts.
    router: Option<Kernel>,
    gate_up: Kernel,
    down: Kernel,
    combine: Kernel,
    threads_up: u32,
    threads_down: u32,
    logits: Region,
    routing: Region,
    weights: Region,
    ticket: Region,
    hidden: Region,
    partial: Region,
}

/// Of four kernels, up to 256 blocks and up to four times each, at the routing's end.
const TRACE_BYTES: usize = 4 * 256 * 4 * 8;

impl Moe {
    /// Most rows of a call.
    pub const MAX_ROWS: usize = 256;

    /// Whether there are kernels for `shape`.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] names the dimension that does not divide.
    pub fn check(shape: &MoeShape) -> Result<(), GpuError> {
        [8, 16, Self::MAX_ROWS].iter().try_for_each(|&rows| Plan::of(shape, rows).map(drop))
    }

    /// Compiles for `shape` and calls of up to `max_rows` rows. Fewer rows go faster through a `Moe` made for fewer:
    /// up to 8, up to 16 and beyond are different kernels ([`row_class`](Self::row_class)).
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] for shapes that do not divide into tiles; otherwise as [`Module::load`].
    pub fn new(
        device: &Device,
        shape: MoeShape,
        max_rows: usize,
        output: MoeOutput,
    ) -> Result<Self, GpuError> {
        Self::tuned(device, shape, max_rows, output, MoeTuning::default())
    }

    #[doc(hidden)]
    pub fn tuned(
        device: &Device,
        shape: MoeShape,
        max_rows: usize,
        output: MoeOutput,
        tuning: MoeTuning,
    ) -> Result<Self, GpuError> {
        let plan = Plan::of(&shape, max_rows)?;
        let constants = [
            ("MAX_ROWS", Self::MAX_ROWS as i64),
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
        let max_segments = shape.num_experts + Self::MAX_ROWS * shape.top_k / segment_rows;
        let routing_ints = 8 + (2 + segment_rows) * max_segments + Self::MAX_ROWS * shape.top_k;
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
            max_rows,
            output,
            blocks: device.num_multiprocessors(),
            overlap: true,
            router,
            gate_up: kernel("moe_gate_up", plan.up.bytes)?,
            down: kernel("moe_down", plan.down.bytes)?,
            combine: kernel("moe_combine", 0)?,
            threads_up: plan.up.threads(plan.row_tiles),
            threads_down: plan.down.threads(plan.row_tiles),
            logits: Region::alloc(device, max_rows * shape.num_experts * 4)?,
            routing: Region::zeroed(device, routing_ints.div_ceil(2) * 8 + TRACE_BYTES)?,
            weights: Region::alloc(device, max_rows * shape.top_k * 4)?,
            ticket: Region::zeroed(device, 4)?,
            hidden: Region::alloc(device, max_rows * choices * shape.intermediate * 2)?,
            partial: Region::alloc(device, max_rows * choices * shape.hidden * 4)?,
        })
    }

    /// Whether kernels may start before the ones ahead of them have ended (the default): weights are then on their way
    /// while rows are still being made.
    pub fn set_overlap(&mut self, overlap: bool) {
        self.overlap = overlap;
    }

    /// Which kernel instructions a call of up to `max_rows` rows needs: calls with equal values can share a `Moe`.
    pub fn row_class(max_rows: usize) -> usize {
        match max_rows {
            0..=8 => 1,
            9..=16 => 2,
            _ => 4,
        }
    }

    /// Enqueues the layer: `x` `[rows, hidden]` bf16 to `out`, of the type that was chosen; `rows` up to `max_rows`. Only
    /// the first `num_rows` (one i32 on the device; all when absent) are real: the others are not routed and come out as
    /// zeros.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Unsupported`] beyond `max_rows`; [`GpuError::Driver`].
    pub fn enqueue(
        &self,
        stream: &Stream,
        weights: &MoeWeights,
        x: &Region,
        rows: usize,
        num_rows: Option<&Region>,
        out: &Region,
    ) -> Result<(), GpuError> {
        self.route(stream, weights, x, rows, num_rows)?;
        self.gate_up(stream, weights, x, rows)?;
        self.down(stream, weights, rows)?;
        self.combine(stream, weights, rows, num_rows, out)
    }

    /// The first part of [`enqueue`](Self::enqueue): which rows go to which expert.
    ///
    /// # Errors
    /// As there.
    pub fn route(
        &self,
        stream: &Stream,
        weights: &MoeWeights,
        x: &Region,
        rows: usize,
        num_rows: Option<&Region>,
    ) -> Result<(), GpuError> {
        let shape = &self.shape;
        if rows == 0 || rows > self.max_rows {
            return Err(GpuError::unsupported(format!("{rows} rows of at most {}", self.max_rows)));
        }
        x.expect("rows", rows * shape.hidden * 2)?;
        if let Some(num_rows) = num_rows {
            num_rows.expect("number of rows", 4)?;
        }
        if weights.first_expert + weights.num_here > shape.num_experts {
            return Err(GpuError::unsupported(format!("experts beyond {}", shape.num_experts)));
        }
        let Some(kernel) = &self.router else { return Ok(()) };
        let Some(router) = &weights.router else { return Err(GpuError::unsupported("no router")) };
        router.expect("router", shape.num_experts * shape.hidden * 2)?;
        if let Some(bias) = &weights.bias {
            bias.expect("correction bias", shape.num_experts * 4)?;
        }
        let grid = (rows.div_ceil(8) as u32, (shape.num_experts / 16) as u32);
        let launch = Launch::new(kernel, grid, 256).overlap(self.overlap);
        let launch = launch.region(x).region(router).maybe(weights.bias.as_ref()).region(&self.logits);
        let launch = launch.region(&self.routing).region(&self.weights).region(&self.ticket).maybe(num_rows);
        let launch = launch.size(rows)?.f32(weights.scale);
        let launch = launch.size(weights.first_expert)?.size(weights.num_here)?;
        // SAFETY: moe_router's arguments; sizes were checked above or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }

    /// A part of [`enqueue`](Self::enqueue), behind the one before.
    ///
    /// # Errors
    /// As there.
    pub fn gate_up(
        &self,
        stream: &Stream,
        weights: &MoeWeights,
        x: &Region,
        rows: usize,
    ) -> Result<(), GpuError> {
        let shape = &self.shape;
        let experts = weights.num_here + shape.num_shared;
        weights.gate_up.expect("gate and up", experts * 2 * shape.intermediate * shape.hidden * 2)?;
        weights.down.expect("down", experts * shape.hidden * shape.intermediate * 2)?;
        let launch = Launch::new(&self.gate_up, (self.blocks, 1), self.threads_up).overlap(self.overlap);
        let launch = launch.region(&weights.gate_up).region(&weights.down).region(x).region(&self.hidden);
        // Without a router nobody says early that x is there.
        let patience = if self.overlap && self.router.is_some() { 256 } else { 0 };
        let launch = launch.region(&self.routing).size(rows)?.size(weights.num_here)?.u32(patience);
        // SAFETY: moe_gate_up's arguments; sizes were checked above, in `route`, or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }

    /// A part of [`enqueue`](Self::enqueue), behind the one before.
    ///
    /// # Errors
    /// As there.
    pub fn down(&self, stream: &Stream, weights: &MoeWeights, rows: usize) -> Result<(), GpuError> {
        let shape = &self.shape;
        let experts = weights.num_here + shape.num_shared;
        weights.down.expect("down", experts * shape.hidden * shape.intermediate * 2)?;
        let launch = Launch::new(&self.down, (self.blocks, 1), self.threads_down).overlap(self.overlap);
        let launch = launch.region(&weights.down).region(&self.hidden).region(&self.partial);
        let launch = launch.region(&self.routing).size(rows)?.size(weights.num_here)?;
        // SAFETY: moe_down's arguments; sizes were checked above or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }

    /// A part of [`enqueue`](Self::enqueue), behind the one before.
    ///
    /// # Errors
    /// As there.
    pub fn combine(
        &self,
        stream: &Stream,
        weights: &MoeWeights,
        rows: usize,
        num_rows: Option<&Region>,
        out: &Region,
    ) -> Result<(), GpuError> {
        let element = if self.output == MoeOutput::F32 { 4 } else { 2 };
        out.expect("result", rows * self.shape.hidden * element)?;
        let (ahead, parts) = (Ahead::of(&weights.ahead), self.shape.hidden / 256);
        let grid = (rows as u32 + ahead.blocks(parts * 64), parts as u32);
        let launch = Launch::new(&self.combine, grid, 64).overlap(self.overlap);
        let launch = launch.region(&self.partial).region(&self.weights).region(out).maybe(num_rows);
        let launch = ahead.arguments(launch.size(rows)?)?;
        // SAFETY: moe_combine's arguments; sizes were checked above or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }

    /// When the last call's kernels began, had waited and ended, ns: `[kernel][block][4]`.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    #[doc(hidden)]
    pub fn trace(&self) -> Result<Vec<u64>, GpuError> {
        let len = self.routing.len();
        self.routing.part(len - TRACE_BYTES..len)?.read()
    }

    /// Logits of the last call, `[max_rows, num_experts]` f32.
    pub fn logits(&self) -> &Region {
        &self.logits
    }
}

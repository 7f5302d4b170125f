//! A mixture-of-experts layer for few rows: one kernel for up to four, four kernels that overlap for more, or without
//! routed experts: a dense MLP is cut into shared ones.
use super::parts::Parts;
use super::plan::Plan;
use super::whole::Whole;
use super::{MoeOutput, MoeShape};
use crate::{Device, GpuError, Region, Stream};

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
    /// `[num_experts]` u64, if somebody wants to know: how often rows chose each of the experts here; every call adds to it.
    pub counts: Option<Region>,
    /// At most three regions, fetched into the second-level cache by the last of a layer's kernels: what the device will read next
    /// whatever comes. Empty where other work follows at once; a layer that is one kernel does not look at it.
    pub ahead: Vec<Region>,
}

/// What a call of the kernels is about: `rows` rows of `x`, of which `num_rows` are real, to `out`, as [`Moe::enqueue`] says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    pub(super) weights: &'a MoeWeights,
    pub(super) x: &'a Region,
    pub(super) rows: usize,
    pub(super) num_rows: Option<&'a Region>,
    pub(super) out: &'a Region,
}

/// What the benchmark turns; the defaults are the best it found.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct MoeTuning {
    /// Of the routed weight tiles, those that blocks do not compete for.
    pub static_percent: u32,
    /// Cycles for 16 KB that a block fetches while the rows and their choice are being made; 0 is as fast as can be.
    pub pace: u32,
    /// The same of the one kernel.
    pub pace_of_whole: u32,
    /// The most rows that one kernel does from the router to the sum.
    pub whole_rows: usize,
    /// Whether small kernels ask for the large ones' split of memory.
    pub one_split: bool,
    /// Whether kernels note when they began and ended.
    pub trace: bool,
}

impl Default for MoeTuning {
    fn default() -> Self {
        Self {
            static_percent: 60,
            pace: 950,
            pace_of_whole: 700,
            whole_rows: 4,
            one_split: true,
            trace: false,
        }
    }
}

/// The kernels for a shape and up to `max_rows` rows, with the memory between them: one call at a time, on one stream.
#[derive(Debug)]
pub struct Moe {
    shape: MoeShape,
    max_rows: usize,
    output: MoeOutput,
    /// One kernel for all, with the most rows for which it is the faster way.
    whole: Option<(Whole, usize)>,
    parts: Parts,
    logits: Region,
}

/// Of four kernels, up to 256 blocks and up to four times each, behind what a kernel counts with.
pub(super) const TRACE_BYTES: usize = 4 * 256 * 4 * 8;

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
    /// [`GpuError::Unsupported`] for shapes that do not divide into tiles; otherwise as [`Module::load`](crate::Module::load).
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
        Plan::of(&shape, max_rows)?;
        let whole = match tuning.whole_rows.min(Whole::MAX_ROWS) {
            rows if rows > 0 && Self::row_class(max_rows) == 1 => Whole::new(device, shape, output, tuning)?,
            _ => None,
        };
        Ok(Self {
            shape,
            max_rows,
            output,
            whole: whole.map(|whole| (whole, tuning.whole_rows)),
            parts: Parts::new(device, shape, max_rows, output, tuning)?,
            logits: Region::alloc(device, max_rows * shape.num_experts * 4)?,
        })
    }

    /// Whether kernels may start before the ones ahead of them have ended (the default): weights are then on their way
    /// while rows are still being made.
    pub fn set_overlap(&mut self, overlap: bool) {
        self.parts.overlap = overlap;
        if let Some((whole, _)) = &mut self.whole {
            whole.overlap = overlap;
        }
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
        let call = Call { weights, x, rows, num_rows, out };
        self.expect(&call)?;
        if let Some(whole) = self.whole(rows) {
            return whole.enqueue(stream, &call, &self.logits);
        }
        let parts = &self.parts;
        parts.route(stream, &call, &self.logits)?;
        parts.gate_up(stream, &call)?;
        parts.down(stream, &call)?;
        parts.combine(stream, &call)
    }

    fn whole(&self, rows: usize) -> Option<&Whole> {
        self.whole.as_ref().filter(|(_, most)| rows <= *most).map(|(whole, _)| whole)
    }

    /// For the benchmark, of the four kernels that [`enqueue`](Self::enqueue) enqueues for more than a few rows, the
    /// `part`th alone.
    ///
    /// # Errors
    /// As there.
    #[doc(hidden)]
    pub fn enqueue_part(
        &self,
        part: usize,
        stream: &Stream,
        weights: &MoeWeights,
        (x, rows): (&Region, usize),
        out: &Region,
    ) -> Result<(), GpuError> {
        let call = Call { weights, x, rows, num_rows: None, out };
        self.expect(&call)?;
        let parts = &self.parts;
        match part {
            0 => parts.route(stream, &call, &self.logits),
            1 => parts.gate_up(stream, &call),
            2 => parts.down(stream, &call),
            _ => parts.combine(stream, &call),
        }
    }

    /// That everything is as large as the kernels reach.
    fn expect(&self, call: &Call<'_>) -> Result<(), GpuError> {
        let &Call { weights, x, rows, num_rows, out } = call;
        let MoeShape { hidden, intermediate, num_experts, num_shared, .. } = self.shape;
        if rows == 0 || rows > self.max_rows {
            return Err(GpuError::unsupported(format!("{rows} rows of at most {}", self.max_rows)));
        }
        x.expect("rows", rows * hidden * 2)?;
        let element = if self.output == MoeOutput::F32 { 4 } else { 2 };
        out.expect("result", rows * hidden * element)?;
        if let Some(num_rows) = num_rows {
            num_rows.expect("number of rows", 4)?;
        }
        if weights.first_expert + weights.num_here > num_experts {
            return Err(GpuError::unsupported(format!("experts beyond {num_experts}")));
        }
        if num_experts > 0 {
            let router = weights.router.as_ref().ok_or_else(|| GpuError::unsupported("no router"))?;
            router.expect("router", num_experts * hidden * 2)?;
        }
        if let Some(bias) = &weights.bias {
            bias.expect("correction bias", num_experts * 4)?;
        }
        if let Some(counts) = &weights.counts {
            counts.expect("counts", num_experts * 8)?;
        }
        let experts = weights.num_here + num_shared;
        weights.gate_up.expect("gate and up", experts * 2 * intermediate * hidden * 2)?;
        weights.down.expect("down", experts * hidden * intermediate * 2)?;
        Ok(())
    }

    /// When the last call's kernels, or stretches of the one, began, had waited and ended, ns: `[kernel][block][4]`.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    #[doc(hidden)]
    pub fn trace(&self) -> Result<Vec<u64>, GpuError> {
        let notes = self.whole.as_ref().map_or(&self.parts.routing, |(whole, _)| &whole.state);
        notes.part(notes.len() - TRACE_BYTES..notes.len())?.read()
    }

    /// Logits of the last call, `[max_rows, num_experts]` f32.
    pub fn logits(&self) -> &Region {
        &self.logits
    }
}

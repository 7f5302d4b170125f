//! What stands around the products of a layer with many rows: the choice of experts, the rows in the order of experts, the
//! weighted sum, and SwiGLU where libtorch computes the products.
use std::ops::Range;

use super::plan::Plan;
use super::{MoeOutput, MoeShape};
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// The kernels for a shape and any number of rows. They keep no memory: what is between them is the caller's.
#[derive(Clone, Debug)]
pub struct MoeMany {
    shape: MoeShape,
    output: MoeOutput,
    /// Absent without routed experts.
    routed: Option<Routed>,
    swiglu: Kernel,
    combine: Kernel,
}

#[derive(Clone, Debug)]
struct Routed {
    choose: Kernel,
    place: Kernel,
    scatter: Kernel,
}

/// Where the choices of some rows stand among all that were sorted by expert.
#[derive(Clone, Debug)]
pub struct Places {
    /// `[rows, top_k]` i32: the expert, counted from the first one here; -1 when it is elsewhere.
    pub ids: Region,
    /// `[rows, top_k]` f32: its weight; 0 when it is elsewhere.
    pub weights: Region,
    /// `[rows, top_k]` i32: the place; -1 when it is elsewhere.
    pub positions: Region,
    /// `[experts here]` i32: where each expert's places end.
    pub ends: Region,
    /// `[num_experts]` u64, if somebody wants to know: how often rows chose each of the experts here; added to.
    pub counts: Option<Region>,
}

impl MoeMany {
    /// Compiles for `shape`.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] where there is no [`Moe`](super::Moe) either; otherwise as [`Module::load`].
    pub fn new(device: &Device, shape: MoeShape, output: MoeOutput) -> Result<Self, GpuError> {
        Plan::of(&shape, 1)?;
        let module = Module::load(device, Source::MoeMany, &shape.constants(output))?;
        let kernel = |name| module.kernel(name, 0);
        let routed = || -> Result<_, GpuError> {
            let (choose, place) = (kernel("many_choose")?, kernel("many_place")?);
            Ok(Routed { choose, place, scatter: kernel("many_scatter")? })
        };
        Ok(Self {
            shape,
            output,
            routed: (shape.num_experts > 0).then(routed).transpose()?,
            swiglu: kernel("many_swiglu")?,
            combine: kernel("many_combine")?,
        })
    }

    /// Enqueues: the best experts of every row by its `logits`, `[rows, num_experts]` f32, of which those `here` are given
    /// places. `bias` `[num_experts]` f32 and `scale` are as in [`MoeWeights`](super::MoeWeights).
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Unsupported`] without routed experts, or any here; [`GpuError::Driver`].
    pub fn place(
        &self,
        stream: &Stream,
        logits: &Region,
        bias: Option<&Region>,
        rows: usize,
        (here, scale): (Range<usize>, f32),
        places: &Places,
    ) -> Result<(), GpuError> {
        let MoeShape { num_experts, top_k, .. } = self.shape;
        let routed = self.routed()?;
        if here.is_empty() || here.end > num_experts || rows == 0 {
            return Err(GpuError::unsupported(format!("{rows} rows, experts {here:?} of {num_experts}")));
        }
        let choices = rows * top_k;
        logits.expect("logits", rows * num_experts * 4)?;
        if let Some(bias) = bias {
            bias.expect("correction bias", num_experts * 4)?;
        }
        places.ids.expect("ids", choices * 4)?;
        places.weights.expect("weights", choices * 4)?;
        places.positions.expect("positions", choices * 4)?;
        places.ends.expect("ends", here.len() * 4)?;
        if let Some(counts) = &places.counts {
            counts.expect("counts", num_experts * 8)?;
        }
        let launch = Launch::new(&routed.choose, (rows.div_ceil(8) as u32, 1), 256);
        let launch = launch.region(logits).maybe(bias).region(&places.ids).region(&places.weights);
        let launch = launch.size(rows)?.f32(scale).size(here.start)?.size(here.len())?;
        // SAFETY: many_choose's arguments; sizes were checked.
        unsafe { launch.enqueue(stream)? };
        let launch = Launch::new(&routed.place, (here.len() as u32, 1), 1024);
        let launch = launch.region(&places.ids).region(&places.positions).region(&places.ends);
        let launch = launch.maybe(places.counts.as_ref()).size(choices)?.size(here.start)?;
        // SAFETY: many_place's arguments; sizes were checked.
        unsafe { launch.enqueue(stream) }
    }

    /// Enqueues: `sorted` `[rows * top_k, hidden]` bf16 gets each row of `x` `[rows, hidden]` at its choices' places. What
    /// is behind the last place stays as it is. With `copy` all rows follow once more, as they come.
    ///
    /// # Errors
    /// As for [`place`](Self::place).
    pub fn scatter(
        &self,
        stream: &Stream,
        x: &Region,
        rows: usize,
        places: &Places,
        (sorted, copy): (&Region, bool),
    ) -> Result<(), GpuError> {
        let MoeShape { hidden, top_k, .. } = self.shape;
        let routed = self.routed()?;
        x.expect("rows", rows * hidden * 2)?;
        places.positions.expect("positions", rows * top_k * 4)?;
        sorted.expect("sorted rows", rows * (top_k + usize::from(copy)) * hidden * 2)?;
        let launch = Launch::new(&routed.scatter, (rows as u32, 1), (hidden / 8) as u32);
        let launch = launch.region(x).region(&places.positions).region(sorted).u32(u32::from(copy));
        // SAFETY: many_scatter's arguments; sizes were checked; places are below rows * top_k.
        unsafe { launch.enqueue(stream) }
    }

    /// Enqueues `out = silu(gate) * up`: `both` `[rows, 2 * intermediate]` bf16, of which the first half are gates, `out`
    /// `[rows, intermediate]`.
    ///
    /// # Errors
    /// As for [`place`](Self::place).
    pub fn swiglu(&self, stream: &Stream, both: &Region, rows: usize, out: &Region) -> Result<(), GpuError> {
        let inner = self.shape.intermediate;
        both.expect("gates and ups", rows * 2 * inner * 2)?;
        out.expect("products", rows * inner * 2)?;
        let blocks = (rows * inner / 8).div_ceil(256);
        let launch = Launch::new(&self.swiglu, (blocks as u32, 1), 256).region(both).region(out);
        // SAFETY: many_swiglu's arguments; sizes were checked.
        unsafe { launch.size(rows)?.enqueue(stream) }
    }

    /// Enqueues the sum of every row's parts: `sorted` `[rows * top_k, hidden]` bf16 by places and weights (absent without
    /// routed experts here), then `shared` `[num_shared, rows, hidden]` bf16 (absent without shared experts). `out`
    /// `[rows, hidden]` is of the type that was chosen.
    ///
    /// # Errors
    /// As for [`place`](Self::place).
    pub fn combine(
        &self,
        stream: &Stream,
        routed: Option<(&Region, &Places)>,
        shared: Option<&Region>,
        rows: usize,
        out: &Region,
    ) -> Result<(), GpuError> {
        let MoeShape { hidden, top_k, num_shared, .. } = self.shape;
        if routed.is_some() != self.routed.is_some() || shared.is_some() != (num_shared > 0) || rows == 0 {
            return Err(GpuError::unsupported(format!("{rows} rows, or other parts than the layer's")));
        }
        if let Some((sorted, places)) = routed {
            sorted.expect("sorted rows", rows * top_k * hidden * 2)?;
            places.positions.expect("positions", rows * top_k * 4)?;
            places.weights.expect("weights", rows * top_k * 4)?;
        }
        if let Some(shared) = shared {
            shared.expect("shared experts' rows", num_shared * rows * hidden * 2)?;
        }
        let element = if self.output == MoeOutput::F32 { 4 } else { 2 };
        out.expect("result", rows * hidden * element)?;
        let launch = Launch::new(&self.combine, (rows as u32, 1), (hidden / 8) as u32);
        let launch = launch.maybe(routed.map(|(sorted, _)| sorted));
        let launch = launch.maybe(routed.map(|(_, places)| &places.positions));
        let launch = launch.maybe(routed.map(|(_, places)| &places.weights));
        let launch = launch.maybe(shared).region(out).size(rows)?;
        // SAFETY: many_combine's arguments; sizes were checked; places are below rows * top_k.
        unsafe { launch.enqueue(stream) }
    }

    fn routed(&self) -> Result<&Routed, GpuError> {
        self.routed.as_ref().ok_or_else(|| GpuError::unsupported("no routed experts"))
    }
}

//! The stacked layers through compiled kernels, for the few rows of a decode step.
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::thread;

use afd_common::ids::LayerIdx;
use afd_ffi::cuda;
use afd_gpu::ops::{Ahead, Moe, MoeOutput, MoeShape, MoeWeights};
use afd_gpu::{Device, GpuError, Region, Stream};
use tch::Tensor;

use super::stack::Stack;
use crate::model::FfnModelError;

/// Largest calls of the kernels' row classes.
const CLASSES: [usize; 3] = [8, 16, DeviceFfn::MAX_ROWS];

/// What is fetched of a layer while its rows are awaited: more of it would push itself out of the second-level cache.
const FETCHED_BYTES: usize = 24 << 20;

/// Of a count: u64.
const COUNT_BYTES: usize = 8;

/// Enqueues layers; see the module's head.
///
/// # Contract
/// - One stream at a time: the memory between a layer's kernels is shared by all layers.
/// - `input` is read and `output` written by the time that later work on the stream runs; they must not overlap.
/// - After [`prepare`](Self::prepare) of a number of rows nothing is allocated or compiled for it, so that
///   [`enqueue`](Self::enqueue) may run inside a graph's capture. The graph keeps all memory it uses, but not this value:
///   keep that too.
#[derive(Debug)]
pub struct DeviceFfn {
    device: Device,
    output: MoeOutput,
    hidden: usize,
    layers: Vec<(MoeShape, MoeWeights)>,
    /// Of each layer what every row needs: the shared experts' gates and ups.
    sure: Vec<Region>,
    /// Of each layer the first routed experts' gates and ups.
    meanwhile: Vec<Region>,
    compiled: HashMap<(MoeShape, usize), Moe>,
    /// By class.
    prepared: [bool; CLASSES.len()],
}

impl DeviceFfn {
    /// Most rows of a call.
    pub const MAX_ROWS: usize = Moe::MAX_ROWS;

    pub(super) fn new(device: &Device, stacks: &[Stack], output: MoeOutput) -> Result<Self, FfnModelError> {
        let region = |tensor: &Tensor| cuda::region(device, tensor);
        let most = stacks.iter().map(|stack| stack.shape.num_experts).max().unwrap_or(0);
        let counts = Region::zeroed(device, (stacks.len() * most * COUNT_BYTES).max(COUNT_BYTES))?;
        let counts_of = |layer: usize, stack: &Stack| {
            let (first, experts) = (layer * most * COUNT_BYTES, stack.shape.num_experts);
            counts.part(first..first + experts * COUNT_BYTES)
        };
        let layers = stacks
            .iter()
            .enumerate()
            .map(|(layer, stack)| {
                let routed = stack.routed.as_ref();
                let weights = MoeWeights {
                    router: routed.map(|routed| region(&routed.weight)).transpose()?,
                    bias: routed.and_then(|routed| routed.bias.as_ref()).map(region).transpose()?,
                    gate_up: region(&stack.gate_up)?,
                    down: region(&stack.down)?,
                    first_expert: routed.map_or(0, |routed| routed.local.start),
                    num_here: stack.num_here(),
                    scale: routed.map_or(1.0, |routed| routed.scale),
                    counts: routed.map(|_| counts_of(layer, stack)).transpose()?,
                    ahead: Vec::new(),
                };
                Ok((stack.shape, weights))
            })
            .collect::<Result<Vec<_>, FfnModelError>>()?;
        let shared = |weights: &Region, stack: &Stack| {
            let each = weights.len() / (stack.num_here() + stack.shape.num_shared).max(1);
            weights.part(each * stack.num_here()..weights.len())
        };
        let sure = layers.iter().zip(stacks).map(|((_, weights), stack)| shared(&weights.gate_up, stack));
        let sure: Vec<Region> = sure.collect::<Result<_, GpuError>>()?;
        let first = |(shape, weights): &(MoeShape, MoeWeights)| {
            let routed = weights.num_here * 2 * shape.intermediate * shape.hidden * 2;
            weights.gate_up.part(0..routed.min(FETCHED_BYTES))
        };
        let meanwhile = layers.iter().map(first).collect::<Result<_, GpuError>>()?;
        let hidden = stacks.first().map_or(0, |stack| stack.shape.hidden);
        Ok(Self {
            device: device.clone(),
            output,
            hidden,
            layers,
            sure,
            meanwhile,
            compiled: HashMap::new(),
            prepared: [false; CLASSES.len()],
        })
    }

    /// What the kernels count: rows by expert of a layer, for any thread.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub(super) fn counts(&self) -> Result<impl Fn(LayerIdx) -> Vec<u64> + Send + Sync + 'static, GpuError> {
        // A stream of its own: the engine's may be waiting.
        let aside = Mutex::new(self.device.stream()?);
        let of_layer = |(_, weights): &(MoeShape, MoeWeights)| weights.counts.clone();
        let layers: Vec<_> = self.layers.iter().map(of_layer).collect();
        Ok(move |layer: LayerIdx| {
            let Some(Some(counts)) = layers.get(usize::from(layer.0)) else { return Vec::new() };
            let aside = aside.lock().unwrap_or_else(PoisonError::into_inner);
            counts.read_on(&aside).unwrap_or_default()
        })
    }

    pub(super) fn layers(&self) -> &[(MoeShape, MoeWeights)] {
        &self.layers
    }

    /// Bytes of a row that goes out: bf16, or f32 partial sums with several shards.
    pub fn out_row_bytes(&self) -> usize {
        match self.output {
            MoeOutput::Bf16 => self.hidden * 2,
            MoeOutput::F32 => self.hidden * 4,
        }
    }

    /// What every row of the layer needs, and is worth fetching ahead: its shared experts' gates and ups.
    pub fn sure_to_be_read(&self, layer: LayerIdx) -> Option<&Region> {
        let (_, weights) = self.layers.get(usize::from(layer.0))?;
        self.sure.get(usize::from(layer.0)).filter(|_| weights.num_here > 0)
    }

    /// Part of what the layer will most likely read for so many rows, for a device that has nothing else to do until they come:
    /// experts, once nearly all of them are chosen by someone. Shared ones are not worth it, the router's time is
    /// enough for them.
    pub fn read_meanwhile(&self, layer: LayerIdx, rows: usize) -> Ahead<'_> {
        let layer = usize::from(layer.0);
        let is_busy =
            self.layers.get(layer).is_some_and(|(shape, _)| rows * shape.top_k > 2 * shape.num_experts);
        Ahead::of(self.meanwhile.get(layer).filter(|_| is_busy))
    }

    /// Compiles what calls of `padded_rows` need, if that was not done: about a second. Not inside a capture, nor while
    /// a kernel waits for this process to go on.
    ///
    /// # Errors
    /// [`GpuError`]; [`GpuError::Unsupported`] beyond [`MAX_ROWS`](Self::MAX_ROWS).
    pub fn prepare(&mut self, padded_rows: usize) -> Result<(), GpuError> {
        let class = class_of(padded_rows)?;
        if self.prepared[class] {
            return Ok(());
        }
        let mut missing: Vec<MoeShape> = Vec::new();
        for (shape, _) in &self.layers {
            if !missing.contains(shape) {
                missing.push(*shape);
            }
        }
        let (device, output) = (&self.device, self.output);
        let made = thread::scope(|scope| {
            let threads: Vec<_> = missing
                .into_iter()
                .map(|shape| (shape, scope.spawn(move || Moe::new(device, shape, CLASSES[class], output))))
                .collect();
            threads
                .into_iter()
                .map(|(shape, thread)| {
                    let moe = thread.join().unwrap_or_else(|_| {
                        Err(GpuError::Unsupported { what: "compiling the FFN kernels panicked".into() })
                    });
                    Ok((shape, moe?))
                })
                .collect::<Result<Vec<_>, GpuError>>()
        })?;
        self.compiled.extend(made.into_iter().map(|(shape, moe)| ((shape, class), moe)));
        self.prepared[class] = true;
        Ok(())
    }

    /// Enqueues the FFN of `layer`: `input` `[padded_rows, hidden]` bf16 to `output` `[padded_rows, hidden]`, bf16, or f32
    /// partial sums with several shards. Only the first `num_rows` (one i32 on the device; all when absent) are real; the
    /// others come out as zeros.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Unsupported`] for more rows than [`MAX_ROWS`](Self::MAX_ROWS), none, or an
    /// unknown layer; [`GpuError::Driver`].
    pub fn enqueue(
        &mut self,
        stream: &Stream,
        layer: LayerIdx,
        padded_rows: usize,
        input: &Region,
        num_rows: Option<&Region>,
        output: &Region,
    ) -> Result<(), GpuError> {
        self.prepare(padded_rows)?;
        let class = class_of(padded_rows)?;
        let unknown = || GpuError::Unsupported { what: format!("{layer} of {}", self.layers.len()) };
        let (shape, weights) = self.layers.get(usize::from(layer.0)).ok_or_else(unknown)?;
        let moe = self.compiled.get(&(*shape, class)).ok_or_else(unknown)?;
        moe.enqueue(stream, weights, input, padded_rows, num_rows, output)
    }
}

/// Index into [`CLASSES`].
fn class_of(rows: usize) -> Result<usize, GpuError> {
    let class = CLASSES.iter().position(|&most| rows <= most).filter(|_| rows > 0);
    class
        .ok_or_else(|| GpuError::Unsupported { what: format!("{rows} rows of 1 to {}", DeviceFfn::MAX_ROWS) })
}

//! One stage's way through the attention half of every layer, as operations of ours on a stream: nothing is allocated when
//! they are enqueued.
//!
//! ```text
//! embedding, norm ─▶ projection ─▶ rope, cache write ─▶ decode attention ─▶ output projection ─▶ + residual, norm ─▶ FFN
//! ```
//! The latent form multiplies W_UK into the queries before and W_UV into the result behind the decode kernel.
use std::collections::BTreeMap;
use std::time::Duration;

use afd_common::ids::LayerIdx;
use afd_gpu::ops::{
    Ahead, GqaDecode, GqaStep, GqaWrite, Meanwhile, Mla, MlaQueries, MlaShape, MlaSizes, MlaStep, MlaWrite,
    NormRows, ProductKernels, RowPlaces, Rows, Sample,
};
use afd_gpu::{Device, GpuError, Region, Stream};

use super::inputs::Inputs;
use super::outcome::Outcome;
use super::products::{Operands, Products, of_values, widths};
use super::stream_ffn::Summand;
use crate::engine::{DecodeStage, DeviceChoice};
use crate::model::{AttentionShape, KernelAttention, KernelModel, KernelShape};

/// Epsilon of the norm of the latent, whatever the model's own is.
const LATENT_NORM_EPS: f32 = 1e-6;

/// Up to so many rows, memory is idle often enough for weights to be fetched ahead on a device that does all by itself.
const FEW_ROWS: usize = 16;

/// What all stages share.
pub(super) struct Kernels {
    rows: Rows,
    sample: Sample,
    pub(super) meanwhile: Meanwhile,
    products: ProductKernels,
}

/// One stage: its inputs, its rows on their way, and its products by padded rows.
pub(super) struct StageRows {
    pub(super) inputs: Inputs,
    attend: Attend,
    /// `[max_rows, hidden]` bf16 each.
    pub(super) residual: Region,
    x: Region,
    delta: Region,
    projected: Region,
    /// `[max_rows, heads, latent + rope]` and `[max_rows, heads, latent]`; unused with grouped queries.
    query: Region,
    latents: Region,
    attended: Region,
    /// `[max_rows, vocab]`
    logits: Region,
    /// What was chosen of them.
    outcome: Outcome,
    /// `[max_rows, hidden]` f32, of shared experts that attention has.
    shared: Option<Region>,
    products: BTreeMap<usize, Products>,
    addresses: Option<(Vec<u64>, Region)>,
}

/// The decode kernel.
enum Attend {
    Mla(Box<Mla>),
    Gqa(Box<GqaDecode>),
}

impl Kernels {
    pub(super) fn new(device: &Device) -> Result<Self, GpuError> {
        let (rows, sample) = (Rows::new(device)?, Sample::new(device)?);
        let meanwhile = Meanwhile::new(device)?;
        Ok(Self { rows, sample, meanwhile, products: ProductKernels::new(device)? })
    }
}

impl StageRows {
    /// Buffers and kernels for up to `max_rows` rows.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] when the kernels are not made for the model.
    pub(super) fn new(device: &Device, model: &KernelModel, max_rows: usize) -> Result<Self, GpuError> {
        let (shape, has_shared) = (&model.shape, model.shared.is_some());
        let max_blocks = shape.max_model_len.div_ceil(shape.block_size).next_multiple_of(4);
        let (projected, attended) = widths(shape);
        let rows = |columns: usize| Region::zeroed(device, max_rows * columns * 2);
        let (attend, query, latents) = match shape.attention {
            AttentionShape::Mla(MlaSizes { heads, latent, rope, .. }) => {
                if heads != 16 {
                    return Err(GpuError::Unsupported { what: format!("latent attention of {heads} heads") });
                }
                let of_mla = MlaShape { latent, rope, block_size: shape.block_size };
                let mla = Mla::new(device, of_mla, max_rows)?;
                let query = rows(heads * (latent + rope))?;
                (Attend::Mla(Box::new(mla)), query, rows(heads * latent)?)
            }
            AttentionShape::Gqa { heads, kv, dim } => {
                let gqa = GqaDecode::new(device, heads, kv, dim, shape.block_size, max_rows)?;
                (Attend::Gqa(Box::new(gqa)), rows(0)?, rows(0)?)
            }
        };
        Ok(Self {
            inputs: Inputs::new(device, max_rows, max_blocks)?,
            attend,
            residual: rows(shape.hidden)?,
            x: rows(shape.hidden)?,
            delta: rows(shape.hidden)?,
            projected: rows(projected)?,
            query,
            latents,
            attended: rows(attended)?,
            logits: rows(shape.vocab)?,
            outcome: Outcome::new(device, max_rows)?,
            shared: has_shared.then(|| Region::zeroed(device, max_rows * shape.hidden * 4)).transpose()?,
            products: BTreeMap::new(),
            addresses: None,
        })
    }

    /// Plans the products of some padded rows and finds the fastest way to compute each.
    pub(super) fn prepare(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
        model: &KernelModel,
        padded: usize,
    ) -> Result<(), GpuError> {
        if self.products.contains_key(&padded) {
            return Ok(());
        }
        let mut products = Products::new(&kernels.products, &model.shape, padded)?;
        let rows = Operands {
            x: &self.x,
            projected: &self.projected,
            query: &self.query,
            latents: &self.latents,
            attended: &self.attended,
            delta: &self.delta,
            logits: &self.logits,
        };
        products.tune(stream, model, &rows)?;
        self.products.insert(padded, products);
        Ok(())
    }

    /// Enqueues what comes before the first layer.
    pub(super) fn begin(
        &self,
        kernels: &Kernels,
        stream: &Stream,
        model: &KernelModel,
        padded: usize,
    ) -> Result<(), GpuError> {
        match &self.attend {
            Attend::Mla(mla) => mla.plan(stream, &self.mla_step(padded, model))?,
            Attend::Gqa(_) => {}
        }
        let Some(first) = model.layers.first() else { return Ok(()) };
        let norm = self.norm(&model.shape, &first.input_norm, padded);
        let table = (&model.embedding, model.shape.vocab);
        kernels.rows.embed_norm(stream, &self.inputs.ids, table, &norm)
    }

    /// Enqueues a layer's attention and the norm behind it; gives what goes to the FFN, unless it was written to `to`. `ffn_reads`
    /// is what the FFN will read on this device.
    pub(super) fn attend(
        &self,
        kernels: &Kernels,
        stream: &Stream,
        model: &KernelModel,
        index: usize,
        padded: usize,
        (ffn_reads, to): (Option<&Region>, Option<&Region>),
    ) -> Result<&Region, GpuError> {
        let products = self.products(padded)?;
        let shape = &model.shape;
        let layer = &model.layers[index];
        // Not while the FFN is elsewhere: its rows would wait until all has been asked for, which cost more than it gave. What is
        // worth it is fetched behind them then (`fetch_next`).
        let now = match ffn_reads {
            Some(reads) if padded <= FEW_ROWS => layer.behind_the_write(Some(reads)),
            _ => Ahead::default(),
        };
        products.projection.enqueue(stream, &self.x, &layer.projection, &self.projected)?;
        let places = RowPlaces {
            positions: &self.inputs.positions,
            slots: &self.inputs.slots,
            cos_sin: &model.cos_sin,
            rows: padded,
        };
        match (&self.attend, &layer.attention, shape.attention) {
            (
                Attend::Mla(mla),
                KernelAttention::Mla { norm, up, cache },
                AttentionShape::Mla(MlaSizes { heads, latent, nope, rope, .. }),
            ) => {
                let write = MlaWrite {
                    projected: &self.projected,
                    stride: widths(shape).0,
                    latent_norm: norm,
                    query: MlaQueries::Absorbed(&self.query),
                    cache,
                    latent,
                    nope,
                    rope,
                    heads,
                    interleaved: shape.interleaved,
                    epsilon: LATENT_NORM_EPS,
                    ahead: now,
                };
                kernels.rows.mla_write(stream, &places, &write)?;
                let Some((keys, values)) = &products.absorb else { return Err(missing(padded)) };
                keys.enqueue(stream, &self.projected, up, &self.query)?;
                // Products may begin while everything ahead of them still runs; but before a layer's FFN had ended, no kernel of
                // the next one began, and all that reading early needs was there before the step's first FFN.
                let (step, early) = (self.mla_step(padded, model), index > 0);
                mla.decode(stream, &step, &self.query, cache, shape.scale, &self.latents, early)?;
                values.enqueue(stream, &self.latents, &of_values(up, shape)?, &self.attended)?;
            }
            (
                Attend::Gqa(gqa),
                KernelAttention::Gqa { norms, keys, values },
                AttentionShape::Gqa { heads, kv, dim },
            ) => {
                let write = GqaWrite {
                    qkv: &self.projected,
                    norms: norms.as_ref().map(|(query, key)| (query, key)),
                    keys,
                    values,
                    heads,
                    kv,
                    dim,
                    rotary: shape.rotary,
                    epsilon: shape.epsilon,
                };
                kernels.rows.gqa_write(stream, &places, &write)?;
                let step = GqaStep {
                    batch: padded,
                    block_table: self.inputs.block_table.clone(),
                    max_blocks: self.max_blocks(shape),
                    seq_lens: self.inputs.seq_lens.clone(),
                };
                gqa.decode(stream, &step, &self.projected, (keys, values), shape.scale, &self.attended)?;
            }
            _ => return Err(GpuError::Unsupported { what: "mixed kinds of attention".into() }),
        }
        products.out.enqueue(stream, &self.attended, &layer.out, &self.delta)?;
        let norm = self.norm(shape, &layer.post_norm, padded);
        // Shared experts read them here.
        let also = to.filter(|_| model.has_shared(index)).map(|_| &self.x);
        let norm = NormRows { out: to.unwrap_or(&self.x), also, ..norm };
        kernels.rows.rms_norm(stream, Some(&self.delta), &norm)?;
        Ok(&self.x)
    }

    /// Enqueues the shared experts of layer `index`, if attention has them, for the rows that went to the FFN.
    pub(super) fn share(
        &self,
        stream: &Stream,
        model: &mut KernelModel,
        index: usize,
        padded: usize,
    ) -> Result<(), GpuError> {
        if !model.has_shared(index) {
            return Ok(());
        }
        let (Some(kernels), Some(out)) = (&mut model.shared, &self.shared) else { return Ok(()) };
        let rows = (&self.x, &self.inputs.num_rows);
        kernels.enqueue(stream, LayerIdx(index as u16), padded, rows, out)
    }

    /// Enqueues: what the FFN of layer `index` returned, and its shared experts if they are here, is added, and normed for the next layer or for the head.
    pub(super) fn land(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
        model: &KernelModel,
        index: usize,
        padded: usize,
        summand: &Summand,
    ) -> Result<(), GpuError> {
        let next = model.layers.get(index + 1).map_or(&model.final_norm, |layer| &layer.input_norm);
        let addresses = match summand {
            Summand::Whole(_) => None,
            Summand::Parts(parts) => Some((self.addresses_of(stream, parts)?, parts)),
        };
        let more = self.shared.as_ref().filter(|_| model.has_shared(index));
        let norm = NormRows { more, ..self.norm(&model.shape, next, padded) };
        match (summand, addresses) {
            (Summand::Whole(delta), _) => kernels.rows.rms_norm(stream, Some(delta), &norm),
            (_, Some((addresses, parts))) => kernels.rows.rms_norm_parts(stream, &addresses, parts, &norm),
            _ => Ok(()),
        }
    }

    /// Where partial sums are does not change as long as the links live.
    fn addresses_of(&mut self, stream: &Stream, parts: &[Region]) -> Result<Region, GpuError> {
        let now: Vec<u64> = parts.iter().map(Region::address).collect();
        if let Some((known, region)) = &self.addresses
            && *known == now
        {
            return Ok(region.clone());
        }
        let region = Region::from_slice(stream.device(), &now)?;
        self.addresses = Some((now, region.clone()));
        Ok(region)
    }

    /// Enqueues the head and the choice of tokens, by the rules of the inputs.
    pub(super) fn choose(
        &self,
        kernels: &Kernels,
        stream: &Stream,
        model: &KernelModel,
        padded: usize,
    ) -> Result<(), GpuError> {
        self.products(padded)?.head.enqueue(stream, &self.x, &model.head, &self.logits)?;
        let vocab = model.shape.vocab;
        let Outcome { tokens, intervals, .. } = &self.outcome;
        kernels.rows.argmax(stream, &self.logits, tokens, padded, vocab)?;
        let chosen = (tokens, intervals);
        kernels.sample.enqueue(stream, &self.logits, &self.inputs.rules, chosen, padded, vocab)
    }

    /// Enqueues the copy of a stage's numbers to the device; `is_behind`: its ids are the tokens that the last step chose.
    pub(super) fn upload(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
        stage: DecodeStage<'_>,
        padded: usize,
        is_behind: bool,
    ) -> Result<(), GpuError> {
        let tokens = is_behind.then_some(&self.outcome.tokens);
        self.inputs.upload(&kernels.rows, stream, stage, padded, tokens)
    }

    /// The same of a stage that has nothing but padding.
    pub(super) fn upload_padding(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
        padded: usize,
    ) -> Result<(), GpuError> {
        self.inputs.upload_padding(&kernels.rows, stream, padded)
    }

    /// Enqueues the copy of the chosen tokens to the host; `turn` is another one for a step and the one behind it.
    pub(super) fn fetch(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
        padded: usize,
        turn: usize,
    ) -> Result<(), GpuError> {
        self.outcome.fetch(&kernels.rows, stream, padded, turn)
    }

    /// The tokens of `padded` rows that were [fetched](Self::fetch), once they are here.
    pub(super) fn chosen(
        &mut self,
        padded: usize,
        turn: usize,
        deadline: Duration,
    ) -> Result<Vec<DeviceChoice>, GpuError> {
        self.outcome.chosen(padded, turn, deadline)
    }

    fn products(&self, padded: usize) -> Result<&Products, GpuError> {
        self.products.get(&padded).ok_or_else(|| missing(padded))
    }

    fn norm<'a>(&'a self, shape: &KernelShape, weight: &'a Region, rows: usize) -> NormRows<'a> {
        let KernelShape { hidden, epsilon, .. } = *shape;
        let ahead = Ahead::default();
        let (also, more) = (None, None);
        NormRows { residual: &self.residual, weight, out: &self.x, also, more, rows, hidden, epsilon, ahead }
    }

    pub(super) fn max_blocks(&self, shape: &KernelShape) -> usize {
        shape.max_model_len.div_ceil(shape.block_size).next_multiple_of(4)
    }

    fn mla_step(&self, padded: usize, model: &KernelModel) -> MlaStep {
        MlaStep {
            batch: padded,
            block_table: self.inputs.block_table.clone(),
            max_blocks: self.max_blocks(&model.shape),
            seq_lens: self.inputs.seq_lens.clone(),
        }
    }
}

fn missing(padded: usize) -> GpuError {
    GpuError::Unsupported { what: format!("{padded} rows, for which nothing was prepared") }
}

//! Attention of a decoder layer, operation by operation and as a whole: each in a graph over as many layers as the model has,
//! every layer with weights and a cache of its own, so that nothing is warm that would not be in use.
use afd_gpu::ops::{
    Ahead, GemmShape, Mla, MlaQueries, MlaShape, MlaSizes, MlaStep, MlaWrite, NormRows, Product,
    ProductKernels, RowPlaces, Rows,
};
use afd_gpu::random::Random;
use afd_gpu::{Device, GpuError, Region, Stream};

use crate::table::{Table, us};
use crate::timing::graph_us;
use crate::{Result, machine};

pub(crate) const LAYERS: usize = 27;
pub(crate) const HIDDEN: usize = 2048;
const VOCAB: usize = 102_400;
const HEADS: usize = 16;
const NOPE: usize = 128;
const ROPE: usize = 64;
const LATENT: usize = 512;
const VALUE: usize = 128;
pub(crate) const BLOCK: usize = 64;
const TOKENS: usize = 1088;
/// Of a token in the cache.
pub(crate) const CACHE_ROW_BYTES: usize = (LATENT + ROPE) * 2;
const PROJECTED: usize = HEADS * (NOPE + ROPE) + LATENT + ROPE;
/// DeepSeek-V2-Lite's.
pub(crate) const SIZES: MlaSizes =
    MlaSizes { heads: HEADS, latent: LATENT, rope: ROPE, nope: NOPE, value: VALUE };
const UP: usize = HEADS * (NOPE + VALUE) * LATENT;

/// DeepSeek-V2-Lite's.
pub(crate) fn run(device: &Device) -> Result<String> {
    let rate = machine::read_rate(device)?;
    let columns = [
        "rows",
        "norm",
        "projection",
        "rope",
        "W_UK",
        "decode",
        "W_UV",
        "out",
        "sum",
        "layer",
        "floor",
        "head",
        "argmax",
    ];
    let title = "Attention of a DeepSeek-V2-Lite layer, us; floor: bytes over the read rate";
    let mut table = Table::new(title, &columns);
    for rows in [1, 8, 32, 64, 128] {
        let bench = Bench::new(device, rows)?;
        let stream = &bench.stream;
        let per_layer = |op: &dyn Fn(usize) -> std::result::Result<(), GpuError>| -> Result<f64> {
            Ok(graph_us(stream, 10, || (0..LAYERS).try_for_each(op))? / LAYERS as f64)
        };
        let norm = per_layer(&|l| bench.norm(l))?;
        let projection = per_layer(&|l| bench.project(l))?;
        let rope = per_layer(&|l| bench.write(l, bench.soon(l)))?;
        let keys = per_layer(&|l| bench.absorb(l))?;
        let decode = per_layer(&|l| bench.decode(l))?;
        let values = per_layer(&|l| bench.values(l))?;
        let out = per_layer(&|l| bench.out(l))?;
        let whole = per_layer(&|l| bench.layer(l))?;
        let head = graph_us(stream, 10, || bench.head())?;
        let argmax = graph_us(stream, 10, || bench.argmax())?;
        let weights = (HIDDEN * PROJECTED + UP + HEADS * VALUE * HIDDEN) * 2;
        let floor = (weights + rows * TOKENS * (LATENT + ROPE) * 2) as f64 / rate;
        let sum = 2.0 * norm + projection + rope + keys + decode + values + out;
        let cells = [norm, projection, rope, keys, decode, values, out, sum, whole, floor, head, argmax];
        table.row(std::iter::once(rows.to_string()).chain(cells.map(us)));
    }
    Ok(table.to_string())
}

pub(crate) struct Weights {
    norm: Region,
    pub(crate) projection: Region,
    pub(crate) up: Region,
    up_values: Region,
    pub(crate) out: Region,
    pub(crate) cache: Region,
}

/// A model's attention for some rows, each of which has so many tokens.
pub(crate) struct Bench {
    pub(crate) stream: Stream,
    rows: usize,
    rows_ops: Rows,
    mla: Mla,
    pub(crate) step: MlaStep,
    projection: Product,
    keys: Product,
    values: Product,
    out: Product,
    head: Product,
    pub(crate) layers: Vec<Weights>,
    pub(crate) head_weight: Region,
    residual: Region,
    x: Region,
    delta: Region,
    projected: Region,
    query: Region,
    latents: Region,
    attended: Region,
    logits: Region,
    tokens: Region,
    positions: Region,
    slots: Region,
    cos_sin: Region,
}

impl Bench {
    pub(crate) fn new(device: &Device, rows: usize) -> Result<Self> {
        let stream = device.stream()?;
        let (random, kernels) = (Random::new(device)?, ProductKernels::new(device)?);
        let product = |shape| Product::new(&kernels, shape);
        let mut seed = 0;
        let mut filled = |elements: usize, scale: f32| -> Result<Region> {
            let region = Region::alloc(device, elements * 2)?;
            seed += 1;
            random.fill(&stream, &region, seed, scale)?;
            Ok(region)
        };
        let max_blocks = TOKENS.div_ceil(BLOCK);
        let layers = (0..LAYERS)
            .map(|_| {
                let up = filled(UP, 0.05)?;
                Ok(Weights {
                    norm: filled(HIDDEN, 1.0)?,
                    projection: filled(HIDDEN * PROJECTED, 0.03)?,
                    up_values: up.part(HEADS * NOPE * LATENT * 2..up.len())?,
                    up,
                    out: filled(HEADS * VALUE * HIDDEN, 0.03)?,
                    cache: filled(rows * max_blocks * BLOCK * (LATENT + ROPE), 1.0)?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let head_weight = filled(VOCAB * HIDDEN, 0.03)?;
        let x = filled(rows * HIDDEN, 1.0)?;
        let residual = filled(rows * HIDDEN, 1.0)?;
        let zeroed = |columns: usize| Region::zeroed(device, rows * columns * 2);
        let (delta, projected, query) =
            (zeroed(HIDDEN)?, zeroed(PROJECTED)?, zeroed(HEADS * (LATENT + ROPE))?);
        let (latents, attended, logits) = (zeroed(HEADS * LATENT)?, zeroed(HEADS * VALUE)?, zeroed(VOCAB)?);
        let table: Vec<i32> = (0..(rows * max_blocks) as i32).collect();
        let last = |r: usize| (r * max_blocks * BLOCK + TOKENS - 1) as i64;
        let step = MlaStep {
            batch: rows,
            block_table: Region::from_slice(device, &table)?,
            max_blocks,
            seq_lens: Region::from_slice(device, &vec![TOKENS as i32; rows])?,
        };
        let mla = Mla::new(device, MlaShape { latent: LATENT, rope: ROPE, block_size: BLOCK }, rows)?;
        mla.plan(&stream, &step)?;
        let mut bench = Self {
            rows,
            rows_ops: Rows::new(device)?,
            mla,
            step,
            projection: product(GemmShape::linear(rows, HIDDEN, PROJECTED))?,
            keys: product(SIZES.keys(rows))?,
            values: product(SIZES.values(rows))?,
            out: product(GemmShape::linear(rows, HEADS * VALUE, HIDDEN))?,
            head: product(GemmShape::linear(rows, HIDDEN, VOCAB))?,
            layers,
            head_weight,
            residual,
            x,
            delta,
            projected,
            query,
            latents,
            attended,
            logits,
            tokens: Region::zeroed(device, rows * 4)?,
            positions: Region::from_slice(device, &vec![TOKENS as i32 - 1; rows])?,
            slots: Region::from_slice(device, &(0..rows).map(last).collect::<Vec<_>>())?,
            cos_sin: Region::from_slice(device, &vec![0.7f32; TOKENS * ROPE])?,
            stream,
        };
        bench.tune()?;
        Ok(bench)
    }

    fn tune(&mut self) -> Result<()> {
        let Self { stream, layers, x, projected, query, latents, attended, delta, logits, .. } = self;
        let of = |weight: fn(&Weights) -> &Region| layers.iter().map(weight).collect::<Vec<_>>();
        self.projection.tune(stream, x, &of(|l| &l.projection), projected)?;
        self.keys.tune(stream, projected, &of(|l| &l.up), query)?;
        self.values.tune(stream, latents, &of(|l| &l.up_values), attended)?;
        self.out.tune(stream, attended, &of(|l| &l.out), delta)?;
        Ok(self.head.tune(stream, x, &[&self.head_weight], logits)?)
    }

    pub(crate) fn norm(&self, layer: usize) -> std::result::Result<(), GpuError> {
        let norm = NormRows {
            residual: &self.residual,
            weight: &self.layers[layer].norm,
            out: &self.x,
            also: None,
            more: None,
            rows: self.rows,
            hidden: HIDDEN,
            epsilon: 1e-6,
            ahead: Ahead::default(),
        };
        self.rows_ops.rms_norm(&self.stream, Some(&self.delta), &norm)
    }

    pub(crate) fn project(&self, layer: usize) -> std::result::Result<(), GpuError> {
        self.projection.enqueue(&self.stream, &self.x, &self.layers[layer].projection, &self.projected)
    }

    pub(crate) fn write(&self, layer: usize, ahead: Ahead<'_>) -> std::result::Result<(), GpuError> {
        let places = RowPlaces {
            positions: &self.positions,
            slots: &self.slots,
            cos_sin: &self.cos_sin,
            rows: self.rows,
        };
        let write = MlaWrite {
            projected: &self.projected,
            stride: PROJECTED,
            latent_norm: &self.layers[layer].norm,
            query: MlaQueries::Absorbed(&self.query),
            cache: &self.layers[layer].cache,
            latent: LATENT,
            nope: NOPE,
            rope: ROPE,
            heads: HEADS,
            interleaved: true,
            epsilon: 1e-6,
            ahead,
        };
        self.rows_ops.mla_write(&self.stream, &places, &write)
    }

    pub(crate) fn absorb(&self, layer: usize) -> std::result::Result<(), GpuError> {
        self.keys.enqueue(&self.stream, &self.projected, &self.layers[layer].up, &self.query)
    }

    pub(crate) fn decode(&self, layer: usize) -> std::result::Result<(), GpuError> {
        let cache = &self.layers[layer].cache;
        self.mla.decode(&self.stream, &self.step, &self.query, cache, 0.07, &self.latents, true)
    }

    pub(crate) fn values(&self, layer: usize) -> std::result::Result<(), GpuError> {
        self.values.enqueue(&self.stream, &self.latents, &self.layers[layer].up_values, &self.attended)
    }

    pub(crate) fn out(&self, layer: usize) -> std::result::Result<(), GpuError> {
        self.out.enqueue(&self.stream, &self.attended, &self.layers[layer].out, &self.delta)
    }

    pub(crate) fn head(&self) -> std::result::Result<(), GpuError> {
        self.head.enqueue(&self.stream, &self.x, &self.head_weight, &self.logits)
    }

    pub(crate) fn argmax(&self) -> std::result::Result<(), GpuError> {
        self.rows_ops.argmax(&self.stream, &self.logits, &self.tokens, self.rows, VOCAB)
    }

    /// What a decode step that has the device for itself fetches beside the write to the cache.
    fn soon(&self, layer: usize) -> Ahead<'_> {
        Ahead::of([&self.layers[layer].up, &self.layers[layer].out])
    }

    fn layer(&self, layer: usize) -> std::result::Result<(), GpuError> {
        self.norm(layer)?;
        self.project(layer)?;
        self.write(layer, self.soon(layer))?;
        self.absorb(layer)?;
        self.decode(layer)?;
        self.values(layer)?;
        self.out(layer)?;
        self.norm(layer)
    }
}

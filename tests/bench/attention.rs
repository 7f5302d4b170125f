//! What attention of one layer costs beside the matrix products that it cannot do without, and MLA decode beside a
//! matrix product over the same bytes. Run with `cargo bench -p afd-tests --bench attention [-- THREADS]`; not a test: the
//! numbers are for reading. Both sides of each line alternate, medians are printed.
use std::time::Instant;

use afd_common::config::model::{
    Architecture, AttentionConfig, CheckpointDtype, DenseConfig, FfnConfig, GqaConfig, MlaConfig,
    ModelConfig, QkNorm, RopeConfig, RopeScaling,
};
use afd_common::ids::LayerIdx;
use afd_common::weights::Weights;
use attention_svc::model::{AttentionModel, BlockId, KvCache, Reach, SequenceRows, StageBatch};
use tch::{Device, Kind, Tensor};

const BLOCK_SIZE: usize = 16;
/// Layers take turns, so that neither weights nor cache stay in the processor's cache.
const LAYERS: usize = 30;
/// Most that MLA's decode may take over the products that it cannot do without.
const MLA_GOAL: f64 = 2.0;

fn main() {
    let _no_grad = tch::no_grad_guard();
    // Cargo passes `--bench` too.
    if let Some(threads) = std::env::args().find_map(|arg| arg.parse().ok()) {
        tch::set_num_threads(threads);
    }
    println!("{} threads", tch::get_num_threads());
    for kind in [Kind::Float, Kind::BFloat16] {
        println!("\n{kind:?}: SmolLM2-135M attention, µs per layer: whole block | products alone | ratio");
        for (sequences, len, context) in [
            (1, 1, 128),
            (1, 1, 1024),
            (8, 1, 256),
            (16, 1, 1024),
            (1, 4, 64),
            (1, 16, 64),
            (1, 256, 256),
            (1, 256, 1024),
        ] {
            block_beside_products(&smollm2(), kind, sequences, len, context, Reach::Auto);
        }
        println!("\n{kind:?}: chunks of SmolLM2-135M, µs per layer: in place | copied together");
        for (len, context) in [(2, 64), (4, 64), (8, 64), (16, 64), (8, 1024), (16, 1024), (32, 1024)] {
            both_ways(&smollm2(), kind, len, context);
        }
        println!("\n{kind:?}: DeepSeek-V2-Lite decode, µs per layer: whole block | products alone | ratio");
        let ratios = [(1, 64), (1, 4096), (4, 4096), (16, 1024)].map(|(sequences, context)| {
            block_beside_products(&deepseek_v2_lite(), kind, sequences, 1, context, Reach::Auto)
        });
        let worst = ratios.into_iter().fold(0.0, f64::max);
        let word = if worst <= MLA_GOAL { "met" } else { "missed" };
        println!("MLA decode over products of the same bytes: {worst:.2} at worst (goal {MLA_GOAL}): {word}");
        println!("\n{kind:?}: chunks of DeepSeek-V2-Lite, µs per layer: in place | copied together");
        for (len, context) in [(2, 64), (8, 64), (8, 1024), (64, 64), (64, 2048), (128, 1024), (256, 2048)] {
            both_ways(&deepseek_v2_lite(), kind, len, context);
        }
    }
}

/// The block's time beside that of its projections and of two products over the context's bytes. Returns the ratio.
fn block_beside_products(
    config: &ModelConfig,
    kind: Kind,
    sequences: usize,
    len: usize,
    context: usize,
    reach: Reach,
) -> f64 {
    let mut bench = Bench::new(config, kind, sequences, len, context);
    let products = Products::new(config, kind, sequences, len, context);
    let stage = bench.model.prepare_with(&bench.batch, reach).unwrap();
    let (mut whole, mut alone) = (Vec::new(), Vec::new());
    for turn in 0..bench.turns() {
        let layer = LayerIdx((turn % LAYERS) as u16);
        let residual = bench.residual.shallow_clone();
        let start = Instant::now();
        bench.model.attend(layer, residual, &stage, &mut bench.kv).unwrap();
        whole.push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        products.run(turn);
        alone.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let (whole, alone) = (median(whole), median(alone));
    println!(
        "  {sequences:>3} × {len:>3} of {context:>5}: {whole:>9.0} | {alone:>9.0} | {:.2}",
        whole / alone
    );
    whole / alone
}

fn both_ways(config: &ModelConfig, kind: Kind, len: usize, context: usize) {
    let mut bench = Bench::new(config, kind, 1, len, context);
    let ways = [Reach::Direct, Reach::Gathered].map(|r| bench.model.prepare_with(&bench.batch, r).unwrap());
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..bench.turns() {
        // Each way has a layer that the other did not just bring into the processor's cache.
        for (way, (stage, times)) in ways.iter().zip(&mut times).enumerate() {
            let layer = LayerIdx(((turn + way * LAYERS / 2) % LAYERS) as u16);
            let residual = bench.residual.shallow_clone();
            let start = Instant::now();
            bench.model.attend(layer, residual, stage, &mut bench.kv).unwrap();
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    let auto = bench.model.prepare(&bench.batch).unwrap().num_direct_rows() > 0;
    let [direct, gathered] = times.map(median);
    let chosen = if auto { "in place" } else { "copied" };
    println!("  {len:>3} of {context:>5}: {direct:>9.0} | {gathered:>9.0}   chosen: {chosen}");
}

struct Bench {
    model: AttentionModel,
    kv: KvCache,
    batch: StageBatch,
    residual: Tensor,
}

impl Bench {
    fn new(config: &ModelConfig, kind: Kind, sequences: usize, len: usize, context: usize) -> Self {
        let weights = Weights::dummy(config, kind, 1);
        let model = AttentionModel::load(config, &weights, config.max_position_embeddings).unwrap();
        let blocks_each = context.div_ceil(BLOCK_SIZE);
        let num_blocks = blocks_each * sequences;
        let kv = KvCache::new(config, num_blocks, BLOCK_SIZE, kind).unwrap();
        let mut batch = StageBatch::default();
        for sequence in 0..sequences {
            // Neighbouring blocks of a sequence are far apart in the cache.
            let table: Vec<BlockId> =
                (0..blocks_each).map(|i| BlockId((i * sequences + sequence) as u32)).collect();
            let start = batch.positions.len();
            for position in context - len..context {
                let block = table[position / BLOCK_SIZE].0 as usize;
                batch.input_ids.push(position as u32 % 64);
                batch.positions.push(position as u32);
                batch.slot_mapping.push((block * BLOCK_SIZE + position % BLOCK_SIZE) as i64);
            }
            batch.sequences.push(SequenceRows { start, len, context_len: context, block_table: table });
        }
        let residual = model.embed(&batch.input_ids).unwrap();
        Self { model, kv, batch, residual }
    }

    /// Fewer for large work.
    fn turns(&self) -> usize {
        let tokens: usize = self.batch.sequences.iter().map(|s| s.len * s.context_len).sum();
        (4_000_000 / (tokens * self.model.config().hidden_size)).clamp(LAYERS, 10 * LAYERS)
    }
}

/// The projections of a block, and scores and weighted sum of a context that lies together.
struct Products {
    weights: Vec<Vec<Tensor>>,
    inputs: Vec<Tensor>,
    queries: Tensor,
    results: Tensor,
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
}

impl Products {
    fn new(config: &ModelConfig, kind: Kind, sequences: usize, len: usize, context: usize) -> Self {
        let make = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind);
        let hidden = config.hidden_size as i64;
        let (projections, heads, kv_heads, key, value) = match &config.attention {
            AttentionConfig::Gqa(g) => {
                let (h, kv, d) = (g.num_heads as i64, g.num_kv_heads as i64, g.head_dim as i64);
                (vec![[(h + 2 * kv) * d, hidden], [hidden, h * d]], h, kv, d, d)
            }
            AttentionConfig::Mla(m) => {
                let (h, r) = (m.num_heads as i64, m.kv_lora_rank as i64);
                let (nope, rope, value) =
                    (m.qk_nope_head_dim as i64, m.qk_rope_head_dim as i64, m.v_head_dim as i64);
                let down = [h * (nope + rope) + r + rope, hidden];
                (vec![down, [h * (nope + value), r], [hidden, h * value]], h, 1, r + rope, r)
            }
        };
        let rows = (sequences * len) as i64;
        let batch = sequences as i64 * kv_heads;
        let context = context as i64;
        let keys: Vec<Tensor> = (0..LAYERS).map(|_| make(&[batch, context, key])).collect();
        let values = match &config.attention {
            AttentionConfig::Gqa(_) => (0..LAYERS).map(|_| make(&[batch, context, value])).collect(),
            AttentionConfig::Mla(_) => keys.iter().map(|keys| keys.narrow(2, 0, value)).collect(),
        };
        let rows_per_head = heads / kv_heads * len as i64;
        Self {
            inputs: projections.iter().map(|shape| make(&[rows, shape[1]])).collect(),
            weights: (0..LAYERS).map(|_| projections.iter().map(|shape| make(shape)).collect()).collect(),
            queries: make(&[batch, rows_per_head, key]),
            results: make(&[batch, rows_per_head, context]),
            keys,
            values,
        }
    }

    fn run(&self, turn: usize) {
        let layer = turn % LAYERS;
        for (weight, input) in self.weights[layer].iter().zip(&self.inputs) {
            let _ = std::hint::black_box(input.linear(weight, None::<Tensor>));
        }
        let _ = std::hint::black_box(self.queries.bmm(&self.keys[layer].transpose(1, 2)));
        let _ = std::hint::black_box(self.results.bmm(&self.values[layer]));
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn model(hidden: usize, attention: AttentionConfig) -> ModelConfig {
    let ffn = FfnConfig::Dense(DenseConfig { intermediate_size: 64, bias: false });
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: hidden,
        vocab_size: 64,
        max_position_embeddings: 1 << 17,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: true,
        attention,
        rope: RopeConfig { theta: 10_000.0, scaling: RopeScaling::None },
        layers: vec![ffn; LAYERS],
        dtype: CheckpointDtype::F32,
        fp8_block: None,
        bos_token_id: None,
        eos_token_ids: vec![0],
    }
}

fn smollm2() -> ModelConfig {
    let gqa = GqaConfig {
        num_heads: 9,
        num_kv_heads: 3,
        head_dim: 64,
        rotary_dim: 64,
        qkv_bias: false,
        o_bias: false,
        qk_norm: QkNorm::None,
        clip_qkv: None,
        sliding_window: None,
    };
    model(576, AttentionConfig::Gqa(gqa))
}

fn deepseek_v2_lite() -> ModelConfig {
    let mla = MlaConfig {
        num_heads: 16,
        q_lora_rank: None,
        kv_lora_rank: 512,
        qk_nope_head_dim: 128,
        qk_rope_head_dim: 64,
        v_head_dim: 128,
        bias: false,
        rope_interleave: true,
    };
    model(2048, AttentionConfig::Mla(mla))
}

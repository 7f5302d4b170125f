//! A loop of nothing but a dense model's matrix products, in bf16 or f32: what decoding cannot be faster than. Run by
//! `speed.py`, or `cargo bench -p afd-tests --bench products -- CONFIG DTYPE BATCH STEPS THREADS`; prints tokens a second.
use std::path::Path;
use std::time::Instant;

use afd_common::config::model::{AttentionConfig, FfnConfig, ModelConfig};
use anyhow::{Context, bail, ensure};
use tch::{Device, Kind, Tensor};

/// Steps before the clock starts.
const WARM_UP: usize = 3;

fn main() -> anyhow::Result<()> {
    // Cargo passes `--bench` too.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let [folder, dtype, batch, steps, threads] = &arguments[..] else {
        bail!(
            "expected: CONFIG DTYPE BATCH STEPS THREADS, for example .deps/models/smollm2-135m bfloat16 8 50 2"
        );
    };
    let kind = match dtype.as_str() {
        "bfloat16" => Kind::BFloat16,
        "float32" => Kind::Float,
        other => bail!("`{other}`: float32 or bfloat16"),
    };
    let (batch, steps): (i64, usize) = (batch.parse()?, steps.parse()?);
    ensure!(batch > 0 && steps > 0, "BATCH and STEPS are at least 1");
    tch::set_num_threads(threads.parse()?);
    let _no_grad = tch::no_grad_guard();

    let products = products(&ModelConfig::load(Path::new(folder))?)?;
    // Every matrix is another one, as in the model: each step reads all of them from memory.
    let matrices: Vec<(Tensor, Tensor)> = products
        .iter()
        .map(|&(rows, columns)| {
            let matrix = Tensor::f_randn([rows, columns], (Kind::Float, Device::Cpu))?.f_to_kind(kind)?;
            Ok((matrix, Tensor::f_ones([batch, columns], (kind, Device::Cpu))?))
        })
        .collect::<Result<_, tch::TchError>>()?;
    let mut start = Instant::now();
    for step in 0..WARM_UP + steps {
        if step == WARM_UP {
            start = Instant::now();
        }
        for (matrix, x) in &matrices {
            let _ = x.f_linear(matrix, None::<&Tensor>)?;
        }
    }
    println!("{:.3}", batch as f64 * steps as f64 / start.elapsed().as_secs_f64());
    Ok(())
}

/// `(rows, columns)` of every matrix that a decode step multiplies with, layer by layer.
fn products(config: &ModelConfig) -> anyhow::Result<Vec<(i64, i64)>> {
    let AttentionConfig::Gqa(gqa) = &config.attention else { bail!("only grouped-query attention") };
    let hidden = config.hidden_size;
    let (queries, keys) = (gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim);
    let mut all = Vec::new();
    for layer in &config.layers {
        let FfnConfig::Dense(dense) = layer else { bail!("only dense layers") };
        let width = dense.intermediate_size;
        // Queries, keys and values in one, gate and up in one: what costs least.
        all.extend([(queries + 2 * keys, hidden), (hidden, queries), (2 * width, hidden), (hidden, width)]);
    }
    all.push((config.vocab_size, hidden));
    let as_sizes =
        |(rows, columns): (usize, usize)| Some((i64::try_from(rows).ok()?, i64::try_from(columns).ok()?));
    all.into_iter().map(as_sizes).collect::<Option<_>>().context("sizes beyond 64 bits")
}

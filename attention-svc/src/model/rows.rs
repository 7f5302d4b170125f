//! What happens to each row around attention, where the rows are: one pass by loops of our own on the CPU, libtorch
//! operations on any other device. Both compute in f32 and round once.
use afd_common::weights::{WeightError, Weights};
use afd_ffi::cpu_attention::{CacheView, paged_attention};
use afd_ffi::cpu_rows::{self, GqaRows, GqaShape, MlaRows, Pairing, QkNorms};
use tch::{Device, Kind, TchError, Tensor};

use super::device_rows::DeviceRows;
use super::error::RowsError;
use super::prepare::PreparedStage;
use super::rope::Rope;

/// The weight of a norm, as the loops take it and as libtorch does.
pub(super) struct Norm {
    numbers: Vec<f32>,
    tensor: Tensor,
}

impl Norm {
    pub(super) fn load(weights: &Weights, name: &str, len: usize) -> Result<Self, WeightError> {
        let tensor = weights.tensor(name, &[len as i64])?;
        let numbers = tensor.f_to_kind(Kind::Float).and_then(|tensor| tensor.f_contiguous());
        let numbers = numbers
            .and_then(Vec::try_from)
            .map_err(|source| WeightError::Torch { name: name.into(), source })?;
        Ok(Self { numbers, tensor })
    }

    /// `[len]` in the compute dtype, on the model's device.
    pub(super) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub(super) fn len(&self) -> i64 {
        self.numbers.len() as i64
    }
}

/// RMSNorm of each row of `x`, `[num_rows, len]`.
pub(super) fn rms_norm(x: &Tensor, norm: &Norm, eps: f64) -> Result<Tensor, RowsError> {
    match x.device() {
        Device::Cpu => Ok(cpu_rows::rms_norm(x, &norm.numbers, eps)?),
        _ => Ok(device_norm(x, norm, eps)?),
    }
}

/// Over the last dimension.
fn device_norm(x: &Tensor, norm: &Norm, eps: f64) -> Result<Tensor, TchError> {
    x.f_rms_norm([norm.len()], Some(&norm.tensor), eps)
}

/// The norms of queries and keys.
pub(super) struct Norms {
    pub(super) query: Norm,
    pub(super) key: Norm,
    pub(super) eps: f64,
}

/// Norms, clips and turns queries and keys in place and writes keys and values into the cache; see
/// [`cpu_rows::gqa_rows`].
#[allow(clippy::too_many_arguments)] // one equation's terms
pub(super) fn gqa_rows(
    qkv: &Tensor,
    shape: GqaShape,
    norms: Option<&Norms>,
    clip: Option<f64>,
    rope: &Rope,
    stage: &PreparedStage,
    keys: &Tensor,
    values: &Tensor,
) -> Result<(), RowsError> {
    let Some(rows) = &stage.on_device else {
        let norms = norms.map(|n| QkNorms { query: &n.query.numbers, key: &n.key.numbers, eps: n.eps });
        let rules = GqaRows { shape, norms, clip, rope: stage.rope(rope), slots: &stage.slots };
        cpu_rows::gqa_rows(qkv, &rules, keys, values)?;
        return Ok(());
    };
    let GqaShape { num_heads, num_kv_heads, head_dim } = shape;
    let (queries, kv, dim) = (num_heads as i64, num_kv_heads as i64, head_dim as i64);
    let heads = qkv.f_view([-1, queries + 2 * kv, dim])?;
    if let Some(Norms { query, key, eps }) = norms {
        for (first, count, norm) in [(0, queries, query), (queries, kv, key)] {
            let (mut part, shape) = if norm.len() == dim {
                (heads.f_narrow(1, first, count)?, None)
            } else {
                (qkv.f_narrow(1, first * dim, count * dim)?, Some([-1, count * dim]))
            };
            let flat = shape.map_or_else(|| Ok(part.shallow_clone()), |shape| part.f_reshape(shape))?;
            let normed = device_norm(&flat, norm, *eps)?;
            part.f_copy_(&normed)?;
        }
    }
    if let Some(limit) = clip {
        let _ = qkv.shallow_clone().f_clamp_(-limit, limit)?;
    }
    turn(&heads.f_narrow(1, 0, queries + kv)?.f_narrow(2, 0, rope.dim as i64)?, rows, rope.pairing)?;
    for (cache, first) in [(keys, queries), (values, queries + kv)] {
        let new = heads.f_narrow(1, first, kv)?;
        let _ = cache.f_view([-1, kv, dim])?.f_index_copy_(0, &rows.slots, &new)?;
    }
    Ok(())
}

/// Turns the rope part of every query in place and writes each row's latent and rope key into the cache; see
/// [`cpu_rows::mla_rows`].
pub(super) fn mla_rows(
    queries: &Tensor,
    latents: &Tensor,
    norm: &Norm,
    eps: f64,
    rope: &Rope,
    stage: &PreparedStage,
    cache: &Tensor,
) -> Result<(), RowsError> {
    let Some(rows) = &stage.on_device else {
        let angles = stage.rope(rope);
        let rules = MlaRows { norm: &norm.numbers, eps, rope: angles, slots: &stage.slots };
        cpu_rows::mla_rows(queries, latents, &rules, cache)?;
        return Ok(());
    };
    let (latent, dim) = (norm.len(), rope.dim as i64);
    let content = device_norm(&latents.f_narrow(1, 0, latent)?, norm, eps)?;
    let key = latents.f_narrow(1, latent, dim)?.f_unsqueeze(1)?;
    turn(&key, rows, rope.pairing)?;
    let entry = Tensor::f_cat(&[content, key.f_squeeze_dim(1)?], 1)?;
    let _ = cache.f_view([-1, latent + dim])?.f_index_copy_(0, &rows.slots, &entry)?;
    let width = queries.size()[2];
    turn(&queries.f_narrow(2, width - dim, dim)?, rows, rope.pairing)?;
    Ok(())
}

/// Turns all elements of `x`, `[num_rows, heads, dim]`, a view, in place.
fn turn(x: &Tensor, rows: &DeviceRows, pairing: Pairing) -> Result<(), TchError> {
    let half = x.size()[2] / 2;
    let wide = x.f_to_kind(Kind::Float)?;
    let (a, b) = match pairing {
        Pairing::Halves => (wide.f_narrow(2, 0, half)?, wide.f_narrow(2, half, half)?),
        Pairing::Neighbours => {
            let pairs = wide.f_unflatten(2, [half, 2])?;
            (pairs.f_select(3, 0)?, pairs.f_select(3, 1)?)
        }
    };
    let first = a.f_mul(&rows.cos)?.f_sub(&b.f_mul(&rows.sin)?)?;
    let second = b.f_mul(&rows.cos)?.f_add(&a.f_mul(&rows.sin)?)?;
    let turned = match pairing {
        Pairing::Halves => Tensor::f_cat(&[first, second], 2)?,
        Pairing::Neighbours => Tensor::f_stack(&[first, second], 3)?.f_flatten(2, 3)?,
    };
    x.shallow_clone().f_copy_(&turned)?;
    Ok(())
}

/// Attention of the stage's direct rows: `queries` are parts `[num_rows, num_heads, len]` whose lengths add up to the
/// cache's keys; `out` `[num_rows, num_heads, value_dim]` may be a view.
pub(super) fn direct_attention(
    queries: &[&Tensor],
    view: &CacheView<'_>,
    stage: &PreparedStage,
    scale: f64,
    out: &Tensor,
) -> Result<(), RowsError> {
    let Some(rows) = &stage.on_device else {
        paged_attention(queries, view, &stage.direct, scale, out, &stage.crew)?;
        return Ok(());
    };
    let Some(direct) = &rows.direct else { return Ok(()) };
    let (kv, key_dim) = (view.num_kv_heads as i64, view.key_dim as i64);
    let joined = Tensor::f_cat(queries, 2)?;
    let queries = joined.f_index_select(0, &direct.rows)?;
    let (num_rows, heads) = (queries.size()[0], queries.size()[1]);
    // [rows * blocks, ..] → [rows, kv, tokens, dim]. Of a latent cache the values are the beginning of the keys.
    let context = |cache: &Tensor, dim: i64| {
        let gathered = cache.f_index_select(0, &direct.blocks)?.f_view([num_rows, -1, kv, key_dim])?;
        gathered.f_narrow(3, 0, dim)?.f_permute([0, 2, 1, 3])
    };
    let (keys, values) = (context(view.keys, key_dim)?, context(view.values, view.value_dim as i64)?);
    let tokens = Tensor::f_arange(keys.size()[2], (Kind::Int64, keys.device()))?;
    let beyond = tokens.f_ge_tensor(&direct.lens)?;
    // A group of heads shares a key.
    let grouped = queries.f_view([num_rows, kv, heads / kv, key_dim])?;
    let scores = grouped.f_matmul(&keys.f_transpose(2, 3)?)?.f_to_kind(Kind::Float)?.f_mul_scalar(scale)?;
    let shares = scores.f_masked_fill(&beyond, f64::NEG_INFINITY)?.f_softmax(-1, Kind::Float)?;
    let attended = shares.f_to_kind(values.kind())?.f_matmul(&values)?;
    let attended = attended.f_reshape([num_rows, heads, view.value_dim as i64])?;
    let _ = out.shallow_clone().f_index_copy_(0, &direct.rows, &attended)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use afd_ffi::cpu_attention::{PagedRow, PagedRows};

    use super::*;
    use crate::model::rope::Rope;
    use afd_common::config::model::{RopeConfig, RopeScaling};

    fn random(shape: &[i64]) -> Tensor {
        Tensor::randn(shape, (Kind::Float, Device::Cpu))
    }

    fn norm(len: i64) -> Norm {
        let tensor = Tensor::rand([len], (Kind::Float, Device::Cpu)) + 0.5;
        Norm { numbers: Vec::try_from(&tensor).unwrap(), tensor }
    }

    fn close(a: &Tensor, b: &Tensor) {
        let distance = (a - b).abs().max().double_value(&[]);
        assert!(distance < 2e-6, "{distance:e}");
    }

    /// Two stages of the same rows: one for the loops, one for libtorch's operations, which run on the CPU as well.
    fn stages(rope: &Rope, direct: PagedRows) -> (PreparedStage, PreparedStage) {
        let make = |device| {
            PreparedStage::of_rows(rope, &[3, 9, 0], vec![5, 11, 2], direct.clone(), device).unwrap()
        };
        (make(None), make(Some(Device::Cpu)))
    }

    fn rope(dim: usize, pairing: Pairing) -> Rope {
        Rope::new(&RopeConfig { theta: 100.0, scaling: RopeScaling::None }, dim, pairing).unwrap()
    }

    #[test]
    fn operations_do_what_the_loops_do() {
        tch::manual_seed(3);
        let shape = GqaShape { num_heads: 4, num_kv_heads: 2, head_dim: 8 };
        for (rotary, per_head, clip) in [(8, true, None), (4, false, Some(0.7))] {
            let rope = rope(rotary, Pairing::Halves);
            let (loops, operations) = stages(&rope, PagedRows::default());
            let (query, key) = if per_head { (8, 8) } else { (32, 16) };
            let norms = Norms { query: norm(query), key: norm(key), eps: 1e-6 };
            let qkv = random(&[3, 64]);
            let run = |stage| {
                let (qkv, keys, values) =
                    (qkv.copy(), random(&[4, 4, 2, 8]).zeros_like(), random(&[4, 4, 2, 8]).zeros_like());
                gqa_rows(&qkv, shape, Some(&norms), clip, &rope, stage, &keys, &values).unwrap();
                (qkv, keys, values)
            };
            let (a, b) = (run(&loops), run(&operations));
            close(&a.0, &b.0);
            close(&a.1, &b.1);
            close(&a.2, &b.2);
            assert!(a.1.abs().sum(Kind::Float).double_value(&[]) > 0.0);
        }
        for pairing in [Pairing::Halves, Pairing::Neighbours] {
            let rope = rope(4, pairing);
            let (loops, operations) = stages(&rope, PagedRows::default());
            let (queries, latents, norm) = (random(&[3, 2, 10]), random(&[3, 12]), norm(8));
            let run = |stage| {
                let (queries, latents, cache) =
                    (queries.copy(), latents.copy(), Tensor::zeros([4, 4, 12], (Kind::Float, Device::Cpu)));
                mla_rows(&queries, &latents, &norm, 1e-6, &rope, stage, &cache).unwrap();
                (queries, cache)
            };
            let (a, b) = (run(&loops), run(&operations));
            close(&a.0, &b.0);
            close(&a.1, &b.1);
        }
    }

    #[test]
    fn direct_rows_attend_to_the_same() {
        tch::manual_seed(4);
        let row = |row, table, num_tokens| PagedRow { row, table, num_tokens };
        let direct = PagedRows {
            blocks: vec![2, 0, 3, 1],
            rows: vec![row(0, 0..2, 7), row(1, 2..4, 5), row(2, 2..4, 1)],
        };
        let rope = rope(4, Pairing::Halves);
        let (loops, operations) = stages(&rope, direct);
        let (keys, values) = (random(&[4, 4, 2, 8]), random(&[4, 4, 2, 8]));
        let view = CacheView { keys: &keys, values: &values, num_kv_heads: 2, key_dim: 8, value_dim: 8 };
        let queries = random(&[3, 4, 8]);
        let run = |stage| {
            let out = Tensor::zeros([3, 4, 8], (Kind::Float, Device::Cpu));
            direct_attention(&[&queries], &view, stage, 0.4, &out).unwrap();
            out
        };
        close(&run(&loops), &run(&operations));
        // A latent cache: the values are the beginning of the keys; the query comes in two parts.
        let cache = random(&[4, 4, 12]);
        let view = CacheView { keys: &cache, values: &cache, num_kv_heads: 1, key_dim: 12, value_dim: 8 };
        let (latent, turned) = (random(&[3, 4, 8]), random(&[3, 4, 4]));
        let run = |stage| {
            let out = Tensor::zeros([4, 3, 8], (Kind::Float, Device::Cpu));
            direct_attention(&[&latent, &turned], &view, stage, 0.4, &out.transpose(0, 1)).unwrap();
            out
        };
        close(&run(&loops), &run(&operations));
    }
}

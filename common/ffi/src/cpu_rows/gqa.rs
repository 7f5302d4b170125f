//! Queries, keys and values of grouped-query attention: normed, clipped, turned, and written into the cache.
use tch::{Kind, Tensor};

use super::{RopeRows, Slots, load, rms_norm_in_place, store, unsqueezed};
use crate::simd::{Bf16, Element, Isa, Portable, Simd, for_each_isa};
use crate::views::{Rows3, ShapeError, ensure};

/// RMSNorm of queries and keys. Weights as long as a head norm each head, longer ones the whole projection.
#[derive(Clone, Copy)]
pub struct QkNorms<'a> {
    /// `[head_dim]` or `[num_heads * head_dim]`
    pub query: &'a [f32],
    /// `[head_dim]` or `[num_kv_heads * head_dim]`
    pub key: &'a [f32],
    /// Added to the mean of the squares.
    pub eps: f64,
}

/// Heads of a grouped-query attention.
#[derive(Clone, Copy, Debug)]
pub struct GqaShape {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of each.
    pub head_dim: usize,
}

/// What happens to the rows of a stage.
#[derive(Clone, Copy)]
pub struct GqaRows<'a> {
    /// Heads of a row.
    pub shape: GqaShape,
    /// None: queries and keys are not normed.
    pub norms: Option<QkNorms<'a>>,
    /// Most that an element of a row may be, either way.
    pub clip: Option<f64>,
    /// How the heads of each row turn.
    pub rope: RopeRows<'a>,
    /// `[num_rows]`: where in the cache each row goes.
    pub slots: &'a [i64],
}

/// Norms, clips and turns the queries and keys of `qkv` (`[num_rows, (num_heads + 2 num_kv_heads) * head_dim]`,
/// contiguous: queries, keys, values) in place, and copies keys and values into their slots of the cache
/// (`[num_blocks, block_size, num_kv_heads, head_dim]`). The first `2 * half` elements of a head turn, up to all.
///
/// # Errors
/// [`ShapeError`] when something does not fit; nothing was written then.
pub fn gqa_rows(qkv: &Tensor, rules: &GqaRows<'_>, keys: &Tensor, values: &Tensor) -> Result<(), ShapeError> {
    match qkv.kind() {
        Kind::Float => gqa::<f32>(Kind::Float, qkv, rules, keys, values),
        Kind::BFloat16 => gqa::<Bf16>(Kind::BFloat16, qkv, rules, keys, values),
        other => Err(ShapeError(format!("rows of {other:?}; f32 and bf16 are served"))),
    }
}

fn gqa<E: Element>(
    kind: Kind,
    qkv: &Tensor,
    rules: &GqaRows<'_>,
    keys: &Tensor,
    values: &Tensor,
) -> Result<(), ShapeError> {
    let GqaRows { shape: GqaShape { num_heads, num_kv_heads, head_dim }, norms, rope, slots, .. } = *rules;
    let (q_len, kv_len) = (num_heads * head_dim, num_kv_heads * head_dim);
    let rows = Rows3::<E>::new("qkv", &unsqueezed("qkv", qkv)?, kind)?;
    ensure!(rows.len == q_len + 2 * kv_len, "qkv rows of {}, expected {}", rows.len, q_len + 2 * kv_len);
    ensure!(rows.is_injective(), "qkv rows overlap one another");
    ensure!(2 * rope.half <= head_dim, "rope over {} elements of a head of {head_dim}", 2 * rope.half);
    rope.check(rows.rows, 2 * rope.half)?;
    if let Some(norms) = norms {
        ensure!(
            [head_dim, q_len].contains(&norms.query.len()) && [head_dim, kv_len].contains(&norms.key.len()),
            "norms of {} and {} elements",
            norms.query.len(),
            norms.key.len()
        );
    }
    let mut keys = Slots::<E>::new("keys", keys, kind, kv_len, slots, rows.rows)?;
    let mut values = Slots::<E>::new("values", values, kind, kv_len, slots, rows.rows)?;
    // SAFETY: everything was compared above.
    unsafe { gqa_each(Isa::best(), &rows, rules, &mut keys, &mut values) };
    Ok(())
}

for_each_isa! {
    /// # Safety
    /// The arguments are [`gqa`]'s, which has checked them against one another; nothing else refers to the rows.
    fn gqa_each(
        rows: &Rows3<E>,
        rules: &GqaRows<'_>,
        keys: &mut Slots<E>,
        values: &mut Slots<E>,
    ) = gqa_each_with
}

/// # Safety
/// As for [`gqa_each`].
#[inline(always)]
unsafe fn gqa_each_with<S: Simd, E: Element>(
    rows: &Rows3<E>,
    rules: &GqaRows<'_>,
    keys: &mut Slots<E>,
    values: &mut Slots<E>,
) {
    let GqaRows { shape: GqaShape { num_heads, num_kv_heads, head_dim }, norms, clip, rope, slots } = *rules;
    let (q_len, kv_len) = (num_heads * head_dim, num_kv_heads * head_dim);
    let mut scratch = vec![0.0f32; rows.len];
    for (row, &slot) in slots.iter().enumerate() {
        // SAFETY: the row is within the tensor's shape and contiguous; nothing else refers to it during this call.
        let memory = unsafe { std::slice::from_raw_parts_mut(rows.at(row, 0), rows.len) };
        load(memory, &mut scratch);
        let (q, kv) = scratch.split_at_mut(q_len);
        let (k, _) = kv.split_at_mut(kv_len);
        if let Some(norms) = norms {
            rms_norm_in_place(q, norms.query, norms.eps);
            rms_norm_in_place(k, norms.key, norms.eps);
        }
        if let Some(limit) = clip {
            scratch.iter_mut().for_each(|x| *x = x.clamp(-limit as f32, limit as f32));
        }
        for head in scratch[..q_len + kv_len].chunks_exact_mut(head_dim) {
            rope.turn(row, &mut head[..2 * rope.half]);
        }
        store(&scratch, memory);
        keys.at(slot).copy_from_slice(&memory[q_len..q_len + kv_len]);
        values.at(slot).copy_from_slice(&memory[q_len + kv_len..]);
    }
}

//! Queries and latent rows of multi-head latent attention: normed, turned, and written into the cache.
use tch::{Kind, Tensor};

use super::{RopeRows, Slots, load, rms_norm_in_place, store, unsqueezed};
use crate::simd::{Bf16, Element, Isa, Portable, Simd, for_each_isa};
use crate::views::{Rows3, ShapeError, ensure};

/// What happens to the rows of a stage.
#[derive(Clone, Copy)]
pub struct MlaRows<'a> {
    /// `[kv_lora_rank]`: the weight of the latents' norm.
    pub norm: &'a [f32],
    /// Added to the mean of the squares.
    pub eps: f64,
    /// How each row turns.
    pub rope: RopeRows<'a>,
    /// `[num_rows]`: where in the cache each row goes.
    pub slots: &'a [i64],
}

/// Turns the last `2 * half` elements of each query head (`[num_rows, num_heads, head_dim]`) in place, and writes
/// each row's cache entry into its slot: the normed first part of `latent` (`[num_rows, kv_lora_rank + 2 * half]`) and
/// its turned rest. The cache is `[num_blocks, block_size, kv_lora_rank + 2 * half]`.
///
/// # Errors
/// [`ShapeError`] when something does not fit; nothing was written then.
pub fn mla_rows(
    queries: &Tensor,
    latent: &Tensor,
    rules: &MlaRows<'_>,
    cache: &Tensor,
) -> Result<(), ShapeError> {
    match queries.kind() {
        Kind::Float => mla::<f32>(Kind::Float, queries, latent, rules, cache),
        Kind::BFloat16 => mla::<Bf16>(Kind::BFloat16, queries, latent, rules, cache),
        other => Err(ShapeError(format!("rows of {other:?}; f32 and bf16 are served"))),
    }
}

fn mla<E: Element>(
    kind: Kind,
    queries: &Tensor,
    latent: &Tensor,
    rules: &MlaRows<'_>,
    cache: &Tensor,
) -> Result<(), ShapeError> {
    let MlaRows { norm, rope, slots, .. } = *rules;
    let turned = 2 * rope.half;
    let rows = Rows3::<E>::new("latent", &unsqueezed("latent", latent)?, kind)?;
    let queries = Rows3::<E>::new("queries", queries, kind)?;
    ensure!(queries.rows == rows.rows, "queries for {} rows, latents for {}", queries.rows, rows.rows);
    ensure!(queries.len >= turned, "query heads of {} elements, {turned} of them turn", queries.len);
    ensure!(queries.is_injective(), "queries overlap one another");
    ensure!(
        rows.len == norm.len() + turned,
        "latent rows of {}, expected {} and {turned}",
        rows.len,
        norm.len()
    );
    rope.check(rows.rows, turned)?;
    let mut cache = Slots::<E>::new("cache", cache, kind, rows.len, slots, rows.rows)?;
    // SAFETY: everything was compared above.
    unsafe { mla_each(Isa::best(), &queries, &rows, rules, &mut cache) };
    Ok(())
}

for_each_isa! {
    /// # Safety
    /// The arguments are [`mla`]'s, which has checked them against one another; nothing else refers to queries or rows.
    fn mla_each(
        queries: &Rows3<E>,
        rows: &Rows3<E>,
        rules: &MlaRows<'_>,
        cache: &mut Slots<E>,
    ) = mla_each_with
}

/// # Safety
/// As for [`mla_each`].
#[inline(always)]
unsafe fn mla_each_with<S: Simd, E: Element>(
    queries: &Rows3<E>,
    rows: &Rows3<E>,
    rules: &MlaRows<'_>,
    cache: &mut Slots<E>,
) {
    let MlaRows { norm, eps, rope, slots } = *rules;
    let turned = 2 * rope.half;
    let mut scratch = vec![0.0f32; rows.len];
    for (row, &slot) in slots.iter().enumerate() {
        // SAFETY: the row is within the tensor's shape and contiguous; nothing writes it during this call.
        load(unsafe { std::slice::from_raw_parts(rows.at(row, 0).cast_const(), rows.len) }, &mut scratch);
        let (content, rope_key) = scratch.split_at_mut(norm.len());
        rms_norm_in_place(content, norm, eps);
        rope.turn(row, rope_key);
        store(&scratch, cache.at(slot));

        let scratch = &mut scratch[..turned];
        for head in 0..queries.heads {
            // SAFETY: row and head are within the shape, and the head's last `turned` elements are contiguous; nothing
            // else refers to them during this call.
            let memory = unsafe {
                std::slice::from_raw_parts_mut(queries.at(row, head).add(queries.len - turned), turned)
            };
            load(memory, scratch);
            rope.turn(row, scratch);
            store(scratch, memory);
        }
    }
}

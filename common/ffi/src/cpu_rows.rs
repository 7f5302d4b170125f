//! What happens to each row between the projections and attention, on the CPU, in one pass: norm, clip, rotary
//! embedding, and the write into the paged cache. As libtorch operations these are a dozen passes per layer, each
//! dearer than the arithmetic when a step has few rows.
//!
//! Arithmetic is in f32 whatever the dtype, rounded once. The loops are plain; they are compiled once per kind of CPU so
//! that the compiler can use its vectors.
use tch::{Kind, Tensor};

use crate::cpu_attention::simd::{Bf16, Element, Isa, Portable, Simd, for_each_isa};
use crate::cpu_attention::{Rows3, ShapeError, check_cpu, ensure};

/// Which elements of a head the rotary embedding turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `i` and `i + half`.
    Halves,
    /// `2i` and `2i + 1`.
    Neighbours,
}

/// Rotary embedding of the rows of a stage.
#[derive(Clone, Copy)]
pub struct RopeRows<'a> {
    /// `[num_rows, half]`
    pub cos: &'a [f32],
    /// `[num_rows, half]`
    pub sin: &'a [f32],
    /// Half of the elements that turn.
    pub half: usize,
    /// Which turn together.
    pub pairing: Pairing,
}

impl RopeRows<'_> {
    fn check(&self, num_rows: usize, dim: usize) -> Result<(), ShapeError> {
        ensure!(2 * self.half == dim, "rope over {} elements, {dim} expected", 2 * self.half);
        ensure!(
            self.cos.len() == num_rows * self.half && self.sin.len() == num_rows * self.half,
            "rope for {} rows, {num_rows} expected",
            self.cos.len() / self.half.max(1)
        );
        Ok(())
    }

    /// Turns the `2 * half` elements of `x`.
    #[inline(always)]
    fn turn(&self, row: usize, x: &mut [f32]) {
        let range = row * self.half..(row + 1) * self.half;
        let angles = self.cos[range.clone()].iter().zip(&self.sin[range]);
        match self.pairing {
            Pairing::Halves => {
                let (first, second) = x.split_at_mut(self.half);
                for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
            Pairing::Neighbours => {
                for (pair, (cos, sin)) in x.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                    let [a, b] = *pair;
                    *pair = [a * cos - b * sin, b * cos + a * sin];
                }
            }
        }
    }
}

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

/// RMSNorm of each row of `x` (`[num_rows, weight.len()]`, rows may be strided) as a new contiguous tensor.
///
/// # Errors
/// [`ShapeError`] when something does not fit.
pub fn rms_norm(x: &Tensor, weight: &[f32], eps: f64) -> Result<Tensor, ShapeError> {
    match x.kind() {
        Kind::Float => norm::<f32>(x, weight, eps),
        Kind::BFloat16 => norm::<Bf16>(x, weight, eps),
        other => Err(ShapeError(format!("rows of {other:?}; f32 and bf16 are served"))),
    }
}

fn norm<E: Element>(x: &Tensor, weight: &[f32], eps: f64) -> Result<Tensor, ShapeError> {
    let size = x.size();
    ensure!(size.len() == 2 && size[1] == weight.len() as i64, "shape {size:?}, a norm of {}", weight.len());
    let torch = |error: tch::TchError| ShapeError(error.to_string());
    let out = Tensor::f_empty(&size[..], (x.kind(), x.device())).map_err(torch)?;
    let from = Rows3::<E>::new("rows", &unsqueezed("rows", x)?, x.kind())?;
    let to = Rows3::<E>::new("normed rows", &unsqueezed("normed rows", &out)?, x.kind())?;
    // SAFETY: the tensors have the same shape; `to` was made here, nobody else knows it yet.
    unsafe { norm_rows(Isa::best(), &from, &to, weight, eps) };
    Ok(out)
}

for_each_isa! {
    /// # Safety
    /// Both have the same rows of `weight.len()` elements; nothing else refers to those of `to`, and nothing writes those
    /// of `from`, during this call.
    fn norm_rows(from: &Rows3<E>, to: &Rows3<E>, weight: &[f32], eps: f64) = norm_rows_with
}

/// # Safety
/// As for [`norm_rows`].
#[inline(always)]
unsafe fn norm_rows_with<S: Simd, E: Element>(from: &Rows3<E>, to: &Rows3<E>, weight: &[f32], eps: f64) {
    let mut scratch = vec![0.0f32; weight.len()];
    for row in 0..from.rows {
        // SAFETY: the row is within the tensor's shape and contiguous; nothing writes it, says the caller.
        load(unsafe { std::slice::from_raw_parts(from.at(row, 0).cast_const(), from.len) }, &mut scratch);
        rms_norm_in_place(&mut scratch, weight, eps);
        // SAFETY: as above, for writing.
        store(&scratch, unsafe { std::slice::from_raw_parts_mut(to.at(row, 0), to.len) });
    }
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

/// Norms, clips and turns the queries and keys of `qkv` (`[num_rows, (num_heads + 2 num_kv_heads) * head_dim]`,
/// contiguous: queries, keys, values) in place, and copies keys and values into their slots of the cache
/// (`[num_blocks, block_size, num_kv_heads, head_dim]`). The first `2 * half` elements of a head turn, up to all.
///
/// # Errors
/// [`ShapeError`] when something does not fit; nothing was written then.
#[allow(clippy::too_many_arguments)] // One equation's terms; a struct would only rename them.
pub fn gqa_rows(
    qkv: &Tensor,
    shape: GqaShape,
    norms: Option<QkNorms<'_>>,
    clip: Option<f64>,
    rope: &RopeRows<'_>,
    slots: &[i64],
    keys: &Tensor,
    values: &Tensor,
) -> Result<(), ShapeError> {
    match qkv.kind() {
        Kind::Float => gqa::<f32>(Kind::Float, qkv, shape, norms, clip, rope, slots, keys, values),
        Kind::BFloat16 => gqa::<Bf16>(Kind::BFloat16, qkv, shape, norms, clip, rope, slots, keys, values),
        other => Err(ShapeError(format!("rows of {other:?}; f32 and bf16 are served"))),
    }
}

#[allow(clippy::too_many_arguments)]
fn gqa<E: Element>(
    kind: Kind,
    qkv: &Tensor,
    shape: GqaShape,
    norms: Option<QkNorms<'_>>,
    clip: Option<f64>,
    rope: &RopeRows<'_>,
    slots: &[i64],
    keys: &Tensor,
    values: &Tensor,
) -> Result<(), ShapeError> {
    let GqaShape { num_heads, num_kv_heads, head_dim } = shape;
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
    unsafe { gqa_each(Isa::best(), &rows, shape, norms, clip, rope, slots, &mut keys, &mut values) };
    Ok(())
}

for_each_isa! {
    /// # Safety
    /// The arguments are [`gqa`]'s, which has checked them against one another; nothing else refers to the rows.
    fn gqa_each(
        rows: &Rows3<E>,
        shape: GqaShape,
        norms: Option<QkNorms<'_>>,
        clip: Option<f64>,
        rope: &RopeRows<'_>,
        slots: &[i64],
        keys: &mut Slots<E>,
        values: &mut Slots<E>,
    ) = gqa_each_with
}

/// # Safety
/// As for [`gqa_each`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn gqa_each_with<S: Simd, E: Element>(
    rows: &Rows3<E>,
    shape: GqaShape,
    norms: Option<QkNorms<'_>>,
    clip: Option<f64>,
    rope: &RopeRows<'_>,
    slots: &[i64],
    keys: &mut Slots<E>,
    values: &mut Slots<E>,
) {
    let GqaShape { num_heads, num_kv_heads, head_dim } = shape;
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

/// Turns the last `2 * half` elements of each query head (`[num_rows, num_heads, head_dim]`) in place, and writes
/// each row's cache entry into its slot: the normed first part of `latent` (`[num_rows, kv_lora_rank + 2 * half]`) and
/// its turned rest. The cache is `[num_blocks, block_size, kv_lora_rank + 2 * half]`.
///
/// # Errors
/// [`ShapeError`] when something does not fit; nothing was written then.
pub fn mla_rows(
    queries: &Tensor,
    latent: &Tensor,
    norm: &[f32],
    eps: f64,
    rope: &RopeRows<'_>,
    slots: &[i64],
    cache: &Tensor,
) -> Result<(), ShapeError> {
    match queries.kind() {
        Kind::Float => mla::<f32>(Kind::Float, queries, latent, norm, eps, rope, slots, cache),
        Kind::BFloat16 => mla::<Bf16>(Kind::BFloat16, queries, latent, norm, eps, rope, slots, cache),
        other => Err(ShapeError(format!("rows of {other:?}; f32 and bf16 are served"))),
    }
}

#[allow(clippy::too_many_arguments)]
fn mla<E: Element>(
    kind: Kind,
    queries: &Tensor,
    latent: &Tensor,
    norm: &[f32],
    eps: f64,
    rope: &RopeRows<'_>,
    slots: &[i64],
    cache: &Tensor,
) -> Result<(), ShapeError> {
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
    unsafe { mla_each(Isa::best(), &queries, &rows, norm, eps, rope, slots, &mut cache) };
    Ok(())
}

for_each_isa! {
    /// # Safety
    /// The arguments are [`mla`]'s, which has checked them against one another; nothing else refers to queries or rows.
    fn mla_each(
        queries: &Rows3<E>,
        rows: &Rows3<E>,
        norm: &[f32],
        eps: f64,
        rope: &RopeRows<'_>,
        slots: &[i64],
        cache: &mut Slots<E>,
    ) = mla_each_with
}

/// # Safety
/// As for [`mla_each`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn mla_each_with<S: Simd, E: Element>(
    queries: &Rows3<E>,
    rows: &Rows3<E>,
    norm: &[f32],
    eps: f64,
    rope: &RopeRows<'_>,
    slots: &[i64],
    cache: &mut Slots<E>,
) {
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

/// The rows of a paged cache, by slot.
struct Slots<E> {
    first: *mut E,
    len: usize,
}

impl<E: Element> Slots<E> {
    /// Checks every slot.
    fn new(
        what: &str,
        cache: &Tensor,
        kind: Kind,
        len: usize,
        slots: &[i64],
        rows: usize,
    ) -> Result<Self, ShapeError> {
        check_cpu(what, cache, kind)?;
        let size = cache.size();
        ensure!(cache.is_contiguous() && size.len() >= 3, "{what}: shape {size:?}, expected whole blocks");
        ensure!(
            size[2..].iter().product::<i64>() == len as i64,
            "{what}: shape {size:?}, {len} a token expected"
        );
        ensure!(slots.len() == rows, "{} slots for {rows} rows", slots.len());
        let num_slots = size[0] * size[1];
        if let Some(slot) = slots.iter().find(|slot| !(0..num_slots).contains(*slot)) {
            return Err(ShapeError(format!("{what}: slot {slot} of {num_slots}")));
        }
        Ok(Self { first: cache.data_ptr().cast(), len })
    }

    /// A slot that `new` has checked.
    #[inline(always)]
    fn at(&mut self, slot: i64) -> &mut [E] {
        // SAFETY: `new` found the slot within the contiguous tensor; one slice is handed out at a time, and nothing else
        // refers to the cache while the engine's thread is in this call.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(slot as usize * self.len), self.len) }
    }
}

/// `[rows, len]` as `[rows, 1, len]`.
fn unsqueezed(what: &str, rows: &Tensor) -> Result<Tensor, ShapeError> {
    rows.f_unsqueeze(1).map_err(|error| ShapeError(format!("{what}: {error}")))
}

#[inline(always)]
fn load<E: Element>(from: &[E], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.to_f32();
    }
}

#[inline(always)]
fn store<E: Element>(from: &[f32], to: &mut [E]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = E::from_f32(*from);
    }
}

/// Norms every `weight.len()` elements of `x`.
#[inline(always)]
fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f64) {
    for x in x.chunks_exact_mut(weight.len()) {
        let mut squares = [0.0f32; 16];
        let (chunks, rest) = x.as_chunks::<16>();
        for chunk in chunks {
            for (sum, x) in squares.iter_mut().zip(chunk) {
                *sum += x * x;
            }
        }
        let sum: f32 = squares.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
        let scale = 1.0 / (sum / x.len() as f32 + eps as f32).sqrt();
        for (x, weight) in x.iter_mut().zip(weight) {
            *x = *x * scale * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::{GqaShape, Pairing, QkNorms, RopeRows, gqa_rows, mla_rows};

    fn numbers(x: &Tensor) -> Vec<f32> {
        Vec::try_from(x.to_kind(Kind::Float).contiguous().view(-1)).unwrap()
    }

    #[test]
    fn both_pairings_turn_by_the_angle() {
        let (cos, sin) = ([0.6, 1.0], [0.8, 0.0]);
        let rope = |pairing| RopeRows { cos: &cos, sin: &sin, half: 2, pairing };
        let mut halves = [1.0, 2.0, 3.0, 4.0];
        rope(Pairing::Halves).turn(0, &mut halves);
        let expected = [0.6 - 3.0 * 0.8, 2.0, 3.0 * 0.6 + 0.8, 4.0];
        assert!(halves.iter().zip(expected).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-6), "{halves:?}");
        let mut neighbours = [1.0, 2.0, 3.0, 4.0];
        rope(Pairing::Neighbours).turn(0, &mut neighbours);
        let expected = [0.6 - 2.0 * 0.8, 2.0 * 0.6 + 0.8, 3.0, 4.0];
        assert!(
            neighbours.iter().zip(expected).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-6),
            "{neighbours:?}"
        );
    }

    #[test]
    fn keys_and_values_land_in_their_slots_normed_clipped_and_turned() {
        tch::no_grad(|| {
            let shape = GqaShape { num_heads: 2, num_kv_heads: 1, head_dim: 2 };
            let qkv = Tensor::from_slice(&[3.0f32, 4.0, 0.0, 2.0, 6.0, 8.0, 9.0, -9.0]).view([1, 8]);
            let keys = Tensor::zeros([2, 3, 1, 2], (Kind::Float, Device::Cpu));
            let values = keys.zeros_like();
            let norms = QkNorms { query: &[1.0, 2.0], key: &[1.0, 1.0], eps: 0.0 };
            let rope = RopeRows { cos: &[0.0], sin: &[1.0], half: 1, pairing: Pairing::Halves };
            gqa_rows(&qkv, shape, Some(norms), Some(1.0), &rope, &[4], &keys, &values).unwrap();
            let r = 12.5f32.sqrt();
            // Each head over its root mean square, times its weight, clipped to 1, then turned by a quarter.
            let expected = [-1.0, 3.0 / r, -1.0, 0.0, -1.0, 6.0 / (2.0 * r), 1.0, -1.0];
            for (a, b) in numbers(&qkv).iter().zip(expected) {
                assert!((a - b).abs() < 1e-6, "{a} {b}");
            }
            let slot = |cache: &Tensor, slot: i64| numbers(&cache.view([6, 2]).get(slot));
            assert_eq!(slot(&keys, 4), numbers(&qkv)[4..6]);
            assert_eq!(slot(&values, 4), [1.0, -1.0]);
            assert!((0..6).filter(|s| *s != 4).all(|s| slot(&keys, s) == [0.0, 0.0]));
            let refused = gqa_rows(&qkv, shape, None, None, &rope, &[6], &keys, &values).unwrap_err();
            assert_eq!(refused.to_string(), "keys: slot 6 of 6");
        });
    }

    #[test]
    fn a_latent_row_is_normed_turned_and_cached_and_left_alone() {
        tch::no_grad(|| {
            for kind in [Kind::Float, Kind::BFloat16] {
                let joined = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0])
                    .view([1, 8])
                    .to_kind(kind);
                let queries = joined.narrow(1, 0, 4).view([1, 1, 4]);
                let cache = Tensor::zeros([1, 2, 4], (kind, Device::Cpu));
                let rope = RopeRows { cos: &[0.0], sin: &[1.0], half: 1, pairing: Pairing::Neighbours };
                mla_rows(&queries, &joined.narrow(1, 4, 4), &[2.0, 2.0], 0.0, &rope, &[1], &cache).unwrap();
                assert_eq!(numbers(&joined), [1.0, 2.0, -4.0, 3.0, 3.0, 4.0, 5.0, 6.0]);
                let r = 12.5f32.sqrt();
                for (a, b) in numbers(&cache.view([2, 4]).get(1)).iter().zip([6.0 / r, 8.0 / r, -6.0, 5.0]) {
                    assert!((a - b).abs() < 1e-2, "{a} {b}");
                }
            }
        });
    }
}

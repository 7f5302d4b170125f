//! Attention of many rows of one sequence at once, over keys and values that lie together, by libtorch's fused kernel.
//!
//! The kernel's causal mask starts at the first key, so a chunk with earlier context needs two calls: the chunk against
//! itself (causal) and against what came before (everything), joined by their log-sum-exp. No mask is ever built, and
//! nothing above the diagonal is computed.
use tch::{Device, Kind, TchError, Tensor};

/// `queries` `[batch, heads, len, dim]`; `keys` and `values` `[batch, heads, context, dim]`, the last `len` of them the
/// rows' own. Returns `[batch, heads, len, dim]`.
pub(super) fn causal_attention(
    queries: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    scale: f64,
) -> Result<Tensor, TchError> {
    let (len, context) = (queries.size()[2], keys.size()[2]);
    let earlier = context - len;
    if earlier == 0 && queries.device() != Device::Cpu && queries.kind() != Kind::Float {
        // Nothing to join, so whichever kernel libtorch finds fastest will do.
        let none = None::<Tensor>;
        return Tensor::f_scaled_dot_product_attention(queries, keys, values, none, 0.0, true, scale, false);
    }
    let (own, own_lse) =
        attend(queries, &keys.f_narrow(2, earlier, len)?, &values.f_narrow(2, earlier, len)?, true, scale)?;
    if earlier == 0 {
        return Ok(own);
    }
    let (before, before_lse) =
        attend(queries, &keys.f_narrow(2, 0, earlier)?, &values.f_narrow(2, 0, earlier)?, false, scale)?;
    // e^a / (e^a + e^b) = sigmoid(a - b)
    let share = before_lse.f_sub(&own_lse)?.f_sigmoid()?.f_unsqueeze(-1)?.f_to_kind(own.kind())?;
    own.f_lerp_tensor(&before, &share)
}

fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    causal: bool,
    scale: f64,
) -> Result<(Tensor, Tensor), TchError> {
    // What libtorch's fused kernel for GPUs takes.
    let fits = q.kind() != Kind::Float && q.size()[3] % 8 == 0;
    match q.device() {
        Device::Cpu => {
            let none = None::<Tensor>;
            Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, none, scale)
        }
        _ if fits => {
            let (out, lse, _, _) = Tensor::f_internal_scaled_dot_product_efficient_attention(
                q,
                k,
                v,
                None::<Tensor>,
                true,
                0.0,
                causal,
                scale,
            )?;
            // Its rows are padded to full tiles.
            Ok((out, lse.f_narrow(2, 0, q.size()[2])?))
        }
        _ => plainly(q, k, v, causal, scale),
    }
}

/// The same step by step, scores in f32 and in memory.
fn plainly(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    causal: bool,
    scale: f64,
) -> Result<(Tensor, Tensor), TchError> {
    let wide = |x: &Tensor| x.f_to_kind(Kind::Float);
    let mut scores = wide(q)?.f_matmul(&wide(k)?.f_transpose(2, 3)?)?.f_mul_scalar(scale)?;
    if causal {
        let size = [q.size()[2], k.size()[2]];
        let above = Tensor::f_ones(size, (Kind::Bool, q.device()))?.f_triu(1)?;
        scores = scores.f_masked_fill(&above, f64::NEG_INFINITY)?;
    }
    let lse = scores.f_logsumexp([-1i64], false)?;
    let out = scores.f_softmax(-1, Kind::Float)?.f_matmul(&wide(v)?)?.f_to_kind(q.kind())?;
    Ok((out, lse))
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;
    use tch::{Device, Kind, Tensor};

    use super::{causal_attention, plainly};

    /// f32 `[2, 3, num_tokens, dim]` of about unit variance. From a generator of the test's own: libtorch's is the
    /// process's, and tests beside this one draw from it.
    fn drawn(rng: &mut ChaCha8Rng, num_tokens: i64, dim: i64) -> Tensor {
        let values: Vec<f32> = (0..6 * num_tokens * dim).map(|_| rng.random_range(-1.7..1.7)).collect();
        Tensor::from_slice(&values).reshape([2, 3, num_tokens, dim])
    }

    #[test]
    fn a_chunk_with_earlier_context_is_the_textbook_s() {
        tch::no_grad(|| {
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            for (len, context, dim) in [(1, 1, 8), (5, 5, 24), (7, 23, 16), (1, 9, 5), (70, 100, 64)] {
                let [q, k, v] = [len, context, context].map(|tokens| drawn(&mut rng, tokens, dim));
                let mask = Tensor::ones([len, context], (Kind::Bool, Device::Cpu)).tril(context - len);
                // In f64, so that the bound is on one side's rounding and not on that of two.
                let [exact_q, exact_k, exact_v] = [&q, &k, &v].map(|tensor| tensor.to_kind(Kind::Double));
                let scores: Tensor = exact_q.matmul(&exact_k.transpose(2, 3)) * 0.3;
                let expected = scores
                    .masked_fill(&mask.logical_not(), f64::NEG_INFINITY)
                    .softmax(-1, Kind::Double)
                    .matmul(&exact_v);
                let found = causal_attention(&q, &k, &v, 0.3).unwrap();
                let worst = (&found - expected).abs().max().double_value(&[]);
                assert!(worst < 2e-6, "{len} of {context}: {worst:e}");
                let (own, lse) = plainly(&q, &k.narrow(2, 0, len), &v.narrow(2, 0, len), true, 0.3).unwrap();
                assert_eq!(lse.size(), [2, 3, len]);
                if len == context {
                    assert!((own - found).abs().max().double_value(&[]) < 2e-6);
                }
            }
        });
    }
}

//! Attention of many rows of one sequence at once, over keys and values that lie together, by libtorch's fused kernel.
//!
//! The kernel's causal mask starts at the first key, so a chunk with earlier context needs two calls: the chunk against
//! itself (causal) and against what came before (everything), joined by their log-sum-exp. No mask is ever built, and
//! nothing above the diagonal is computed.
use tch::{TchError, Tensor};

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
    Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, None::<Tensor>, scale)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::causal_attention;

    #[test]
    fn a_chunk_with_earlier_context_is_the_textbook_s() {
        tch::no_grad(|| {
            tch::manual_seed(1);
            for (len, context, dim) in [(1, 1, 8), (5, 5, 24), (7, 23, 16), (1, 9, 5), (70, 100, 64)] {
                let make = |tokens| Tensor::randn([2, 3, tokens, dim], (Kind::Float, Device::Cpu));
                let (q, k, v) = (make(len), make(context), make(context));
                let mask = Tensor::ones([len, context], (Kind::Bool, Device::Cpu)).tril(context - len);
                let scores: Tensor = q.matmul(&k.transpose(2, 3)) * 0.3;
                let expected = scores
                    .masked_fill(&mask.logical_not(), f64::NEG_INFINITY)
                    .softmax(-1, Kind::Float)
                    .matmul(&v);
                let found = causal_attention(&q, &k, &v, 0.3).unwrap();
                let worst = (found - expected).abs().max().double_value(&[]);
                assert!(worst < 2e-6, "{len} of {context}: {worst:e}");
            }
        });
    }
}

//! Attention over latents, one sequence and head at a time.
use half::bf16;

use super::parallel;
use crate::ops::MlaShape;

/// `[batch, 16, latent]`: what each query attends to. `row(sequence, token)` is a cache row, `[latent + rope]`.
pub fn mla_decode<'a>(
    shape: &MlaShape,
    query: &[bf16],
    seq_lens: &[usize],
    row: impl Fn(usize, usize) -> &'a [bf16] + Sync,
    scale: f64,
) -> Vec<f64> {
    let width = shape.latent + shape.rope;
    let heads = parallel(seq_lens.len() * 16, |i| {
        let sequence = i / 16;
        let query = &query[i * width..][..width];
        let scores: Vec<f64> = (0..seq_lens[sequence])
            .map(|t| {
                let products = row(sequence, t).iter().zip(query);
                products.map(|(k, q)| f64::from(k.to_f32()) * f64::from(q.to_f32())).sum::<f64>() * scale
            })
            .collect();
        let top = scores.iter().copied().fold(f64::MIN, f64::max);
        let all: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        let mut out = vec![0.0; shape.latent];
        for (t, score) in scores.iter().enumerate() {
            let p = (score - top).exp() / all;
            for (sum, v) in out.iter_mut().zip(row(sequence, t)) {
                *sum += p * f64::from(v.to_f32());
            }
        }
        out
    });
    heads.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_token_is_itself_and_equal_scores_average() {
        let shape = MlaShape { latent: 2, rope: 2, block_size: 1 };
        let row = |v: [f32; 4]| v.map(bf16::from_f32);
        let cache = [row([1.0, 2.0, 0.0, 0.0]), row([3.0, 6.0, 0.0, 0.0])];
        let query = vec![bf16::ZERO; 2 * 16 * 4];
        let out = mla_decode(&shape, &query, &[1, 2], |_, t| &cache[t][..], 1.0);
        assert_eq!(out[..2], [1.0, 2.0]);
        assert_eq!(out[32..34], [2.0, 4.0]);
    }
}

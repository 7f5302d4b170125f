//! The FFN stage of one layer on its busiest rank: what it reads and what it multiplies.
use super::routing;
use crate::plan::shape::MoeShape;

/// `3 · h · d`, weights of one gated MLP (gate, up and down), elements.
pub fn gated_weights(hidden: u32, intermediate: f64) -> f64 {
    3.0 * f64::from(hidden) * intermediate
}

/// `⌈E / n_F⌉`, routed experts of the fullest of `ranks` ranks.
pub fn experts_on_fullest_rank(num_experts: u32, ranks: u32) -> f64 {
    f64::from(num_experts.div_ceil(ranks))
}

/// Weights read by the fullest rank for `X` rows of the pool, elements:
/// `(E · (1 − (1 − k/E)^X) · e/E + n_s) · 3 · h · d`, `e` its experts. Every rank holds the shared experts whole, as they
/// serve every row.
pub fn moe_weights_read(moe: &MoeShape, hidden: u32, rows: f64, experts_on_rank: f64) -> f64 {
    let hit = routing::experts_hit(moe.num_experts, moe.experts_per_token, rows);
    let routed = hit * experts_on_rank / f64::from(moe.num_experts);
    routed * gated_weights(hidden, f64::from(moe.intermediate))
        + gated_weights(hidden, f64::from(moe.shared_intermediate))
}

/// Operations of the fullest rank for `X` rows of the pool: `X · (k · e/E · d + n_s · d / n_F) · 6 · h`. Rows are drawn to
/// experts evenly; the shared experts' rows are split over the ranks.
pub fn moe_flop(moe: &MoeShape, hidden: u32, rows: f64, experts_on_rank: f64, ranks: u32) -> f64 {
    let routed = f64::from(moe.experts_per_token) * experts_on_rank / f64::from(moe.num_experts);
    let width = routed * f64::from(moe.intermediate) + f64::from(moe.shared_intermediate) / f64::from(ranks);
    2.0 * rows * gated_weights(hidden, width)
}

/// Weights the fullest rank holds of one mixture layer, elements.
pub fn moe_weights_held(moe: &MoeShape, hidden: u32, experts_on_rank: f64) -> f64 {
    gated_weights(hidden, experts_on_rank * f64::from(moe.intermediate) + f64::from(moe.shared_intermediate))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config_reader;

    #[test]
    fn one_rank_does_all_the_work_of_a_token() {
        let shape = config_reader::load("deepseek-v2-lite").unwrap();
        let moe = shape.moe.unwrap();
        // 6 routed and 2 shared experts of 2048 × 1408.
        let expected = 8.0 * 3.0 * 2048.0 * 1408.0;
        assert!((moe_weights_read(&moe, shape.hidden, 1.0, 64.0) / expected - 1.0).abs() < 1e-9);
        assert!((moe_flop(&moe, shape.hidden, 1.0, 64.0, 1) / (2.0 * expected) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn ranks_that_divide_the_experts_divide_the_work() {
        let moe = config_reader::load("deepseek-v3").unwrap().moe.unwrap();
        let whole = moe_flop(&moe, 7168, 1000.0, 256.0, 1);
        let shared_by_64 = 64.0 * moe_flop(&moe, 7168, 1000.0, 4.0, 64);
        assert!((whole / shared_by_64 - 1.0).abs() < 1e-12);
    }

    #[test]
    fn ranks_that_do_not_divide_them_wait_for_the_fullest() {
        assert_eq!(experts_on_fullest_rank(128, 4), 32.0);
        assert_eq!(experts_on_fullest_rank(128, 3), 43.0);
        assert_eq!(experts_on_fullest_rank(8, 5), 2.0);
    }
}

//! Where a token's `k` of `E` experts are, when they are drawn evenly and without repetition.

/// `P_send`, the part of rows that go to one of `N` equal owners: `1 − C(E − E/N, k) / C(E, k)`. Written as a product, it
/// needs no factorials and holds for an `E/N` that is not whole. Source: arXiv 2602.09721.
pub fn send_fraction(num_experts: u32, per_token: u32, owners: f64) -> f64 {
    let (experts, own) = (f64::from(num_experts), f64::from(num_experts) / owners);
    let missed = |drawn: u32| ((experts - own - f64::from(drawn)) / (experts - f64::from(drawn))).max(0.0);
    1.0 - (0..per_token).map(missed).product::<f64>()
}

/// `k_loc = k / (N · P_send)`, experts an owner applies to a row it receives. Source: arXiv 2602.09721.
pub fn local_experts_per_row(per_token: u32, owners: f64, send_fraction: f64) -> f64 {
    f64::from(per_token) / (owners * send_fraction)
}

/// `E · (1 − (1 − k/E)^X)`, experts that at least one of `X` rows chooses. Draws of different rows are independent;
/// within a row they are not repeated, which is what `k/E` says.
pub fn experts_hit(num_experts: u32, per_token: u32, rows: f64) -> f64 {
    let experts = f64::from(num_experts);
    experts * (1.0 - (1.0 - f64::from(per_token) / experts).powf(rows))
}

/// `I_net = 6 · d · k_loc / max(b_in, b_out)`, FFN operations per byte on the busier direction of the owner's link. The
/// hidden size cancels: a row's work and its bytes both grow with it. Source: arXiv 2602.09721.
pub fn network_intensity(expert_intermediate: u32, local_experts: f64, bytes_in: f64, bytes_out: f64) -> f64 {
    6.0 * f64::from(expert_intermediate) * local_experts / bytes_in.max(bytes_out)
}

/// `HFU_max = min(1, W_F · I_net / P_F)`, the part of the matrix rate that the link lets an FFN rank reach; far below 1 is
/// the dead zone. `link_bandwidth` in B/s per device, `rate` in operations/s. Source: arXiv 2602.09721.
pub fn max_hfu(link_bandwidth: f64, network_intensity: f64, rate: f64) -> f64 {
    (link_bandwidth * network_intensity / rate).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C(n, k) for the definition.
    fn choose(n: u32, k: u32) -> f64 {
        (0..k).map(|i| f64::from(n - i) / f64::from(i + 1)).product()
    }

    #[test]
    fn the_product_is_the_binomial_definition() {
        for (experts, per_token, owners) in [(256, 8, 4), (128, 8, 32), (64, 6, 2), (8, 2, 8)] {
            let own = experts / owners;
            let expected = 1.0 - choose(experts - own, per_token) / choose(experts, per_token);
            let found = send_fraction(experts, per_token, f64::from(owners));
            assert!((found - expected).abs() < 1e-12, "{experts} {per_token} {owners}: {found} {expected}");
        }
        assert_eq!(send_fraction(256, 8, 1.0), 1.0);
        assert_eq!(send_fraction(4, 4, 2.0), 1.0, "every row needs every expert");
    }

    #[test]
    fn one_row_hits_k_experts_and_many_hit_all() {
        assert!((experts_hit(64, 6, 1.0) - 6.0).abs() < 1e-9);
        assert!((experts_hit(64, 6, 1e4) - 64.0).abs() < 1e-9);
        // 34.9 at 8 rows is what makes V2-Lite's step at concurrency 8 cost half of the one at 64.
        assert!((experts_hit(64, 6, 8.0) - 34.9).abs() < 0.05);
    }
}

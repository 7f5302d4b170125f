//! Moving rows between the roles, per layer, stage and direction.
//!
//! A transfer has a latency (`α`, launch and wire, once) and an occupancy (bytes over bandwidth), kept apart because a link
//! that is busy with one stage cannot carry the next: occupancy bounds the pipeline however many stages hide the latency.

/// Bytes that leave the busiest sender and arrive at the busiest receiver in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// B, out of the busiest attention rank (or back into it).
    pub attention_side: f64,
    /// B, into the busiest FFN rank (or back out of it).
    pub ffn_side: f64,
}

impl Traffic {
    /// Time the busier side's link is occupied, s. `bandwidth` in B/s, one direction.
    pub fn occupancy_s(self, bandwidth: f64) -> f64 {
        self.attention_side.max(self.ffn_side) / bandwidth
    }
}

/// Rows of `h · b` bytes from attention ranks with `x` rows each to FFN targets of which each row goes to a part
/// `P_send`: `P_send · N · x · h · b` out of a sender, `P_send · X · h · b / G` into each of the `G` links of a target
/// (a rank, or a host whose cards share the load). Sources: arXiv 2602.09721; MegaScale-Infer.
pub fn to_targets(
    rows_per_sender: f64,
    rows_in_all: f64,
    row_bytes: f64,
    send_fraction: f64,
    targets: f64,
    links_per_target: f64,
) -> Traffic {
    Traffic {
        attention_side: send_fraction * targets * rows_per_sender * row_bytes,
        ffn_side: send_fraction * rows_in_all * row_bytes / links_per_target,
    }
}

/// Every row to one FFN rank, which shares it with the others afterwards: `x · h · b` out, `X · h · b / n_F` in. Source:
/// the AFD plugin for vLLM, P2P connector.
pub fn to_one(rows_per_sender: f64, rows_in_all: f64, row_bytes: f64, ffn_ranks: f64) -> Traffic {
    Traffic { attention_side: rows_per_sender * row_bytes, ffn_side: rows_in_all * row_bytes / ffn_ranks }
}

/// What follows [`to_one`]: all rows to all FFN ranks (or their sums back), `X · h · b · (n − 1)/n` through each link, s.
pub fn among_ffn_s(rows_in_all: f64, row_bytes: f64, ffn_ranks: f64, bandwidth: f64) -> f64 {
    rows_in_all * row_bytes * (ffn_ranks - 1.0) / ffn_ranks / bandwidth
}

/// Copies of a row that one of `R` equal ranks sends to the other ranks: `P_send(R) · (R − 1)`. DeepEP's low-latency
/// kernels send one per rank; by symmetry as many arrive.
pub fn copies_to_others(send_fraction: f64, ranks: f64) -> f64 {
    send_fraction * (ranks - 1.0)
}

/// Adding up what came back, `(N + 1) · x · h · b` of memory traffic on an attention rank, s.
pub fn combine_s(rows: f64, row_bytes: f64, targets: f64, memory_bandwidth: f64) -> f64 {
    (targets + 1.0) * rows * row_bytes / memory_bandwidth
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::formulas::routing;

    #[test]
    fn what_all_senders_send_is_what_all_targets_receive() {
        let traffic = to_targets(25.0, 500.0, 4096.0, 0.9, 4.0, 1.0);
        assert!((traffic.attention_side * 20.0 - traffic.ffn_side * 4.0).abs() < 1e-6);
        let traffic = to_one(25.0, 500.0, 4096.0, 4.0);
        assert_eq!(traffic.attention_side * 20.0, traffic.ffn_side * 4.0);
    }

    /// 128 rows of 7168 to 8 of 256 experts, 8 GPUs a host, 50 GB/s a GPU: DeepEP's published low-latency dispatch (FP8) and
    /// combine (BF16) on H800, within 20 % once several hosts take part.
    #[test]
    fn deepep_latency_table_follows_from_copies_over_bandwidth() {
        for (ranks, dispatch_us, combine_us) in
            [(32.0, 155.0, 273.0), (64.0, 173.0, 314.0), (128.0, 192.0, 369.0), (256.0, 194.0, 360.0)]
        {
            let copies = copies_to_others(routing::send_fraction(256, 8, ranks), ranks);
            let predicted = |bytes: f64| 20.0 + 128.0 * 7168.0 * bytes * copies / 50e9 * 1e6;
            for (predicted, published) in [(predicted(1.0), dispatch_us), (predicted(2.0), combine_us)] {
                let off: f64 = predicted / published - 1.0;
                assert!(off.abs() < 0.2, "EP{ranks}: {predicted} for {published}");
            }
        }
    }
}

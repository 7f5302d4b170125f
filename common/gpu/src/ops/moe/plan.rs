//! How the kernels for few rows are cut for a shape: warps that share an inner dimension, and tiles in flight.
use super::{Moe, MoeShape};
use crate::GpuError;

/// Most shared memory of a block of one that has a multiprocessor for itself.
const SHARED_BYTES: usize = 227 << 10;

/// How the kernels are cut for a shape.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) row_tiles: usize,
    pub(super) up: Ring,
    pub(super) down: Ring,
}

/// Warps that share the inner dimension, tiles in flight, shared memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ring {
    pub(super) warps: usize,
    pub(super) stages: usize,
    pub(super) bytes: usize,
}

impl Plan {
    pub(super) fn of(shape: &MoeShape, max_rows: usize) -> Result<Self, GpuError> {
        let refuse = |what: &str, value: usize| Err(GpuError::unsupported(format!("{what} {value}")));
        if !shape.hidden.is_multiple_of(256) || shape.hidden > 8192 {
            return refuse("hidden size", shape.hidden);
        }
        if !shape.intermediate.is_multiple_of(32) {
            return refuse("intermediate size", shape.intermediate);
        }
        if !shape.num_experts.is_multiple_of(16) || shape.num_experts > 128 {
            return refuse("experts", shape.num_experts);
        }
        if (shape.top_k == 0) != (shape.num_experts == 0) || shape.top_k > 32.min(shape.num_experts) {
            return refuse("experts a row", shape.top_k);
        }
        if shape.top_k + shape.num_shared == 0 {
            return refuse("experts", 0);
        }
        if max_rows == 0 || max_rows > Moe::MAX_ROWS {
            return refuse("rows", max_rows);
        }
        let row_tiles = Moe::row_class(max_rows);
        let up = Ring::of(shape.hidden, row_tiles, 8, 12)?;
        let down = Ring::of(shape.intermediate, row_tiles, 12, 12)?;
        Ok(Self { row_tiles, up, down })
    }
}

impl Ring {
    /// Threads of a block: one warp more to fetch; a whole warpgroup more where it gives its registers up (`moe.cu`).
    pub(super) fn threads(&self, row_tiles: usize) -> u32 {
        let fetching = if self.warps == 8 && row_tiles == 4 { 4 } else { 1 };
        (self.warps as u32 + fetching) * 32
    }

    /// The most warps up to `most` that divide `width` into chunks of 32, of which a warp holds at most 8 in registers.
    pub(super) fn of(width: usize, row_tiles: usize, most: usize, limit: usize) -> Result<Self, GpuError> {
        // Each row tile's sum is one warp's work.
        let divides = |warps: &usize| {
            (width / 32).is_multiple_of(*warps) && width / 32 / warps <= 8 && *warps >= row_tiles
        };
        let warps = (1..=most).rev().find(divides).or_else(|| (most..=limit).find(divides));
        let warps = warps.ok_or_else(|| GpuError::unsupported(format!("inner dimension {width}")))?;
        let stage = 16 * (width * 2 + 64);
        let reduction = warps * row_tiles * 512;
        // Static shared memory takes up to 2 KiB. The kernel knows by the same sum whether the reduction has two buffers.
        let room = SHARED_BYTES - 2048;
        let stages = (room.saturating_sub(reduction) / stage).min(6);
        if stages < 2 {
            return Err(GpuError::unsupported(format!("inner dimension {width}")));
        }
        let buffers = if stages * stage + 2 * reduction <= room { 2 } else { 1 };
        Ok(Self { warps, stages, bytes: stages * stage + buffers * reduction })
    }
}

/// Of the kernel that is a whole layer (`moe_whole.cuh`): tiles in flight, and shared memory besides what it always has. `None`
/// where it does not pay: without routed experts no time is lost between kernels, and fewer than three tiles in flight do
/// not bridge a wait.
pub(super) fn stages_of_whole(shape: &MoeShape) -> Option<(usize, usize)> {
    const ROWS: usize = 8;
    const MOST_CHUNKS: usize = 12; // of 32 elements, that each of eight warps holds of a row
    let stride = |width: usize| (width * 2).next_multiple_of(128) + 64;
    let stage = (16 * stride(shape.hidden)).max((16 + ROWS) * stride(shape.intermediate));
    let parts = 4 * 8 * 512;
    // What warps tell each other: a few kilobytes, and 44 bytes for each expert.
    let told = 3712 + 44 * shape.num_experts;
    let stages = ((SHARED_BYTES - told - parts) / stage).min(6);
    let is_wide = shape.hidden.max(shape.intermediate).div_ceil(32 * 8) > MOST_CHUNKS;
    (shape.num_experts > 0 && stages >= 3 && !is_wide).then_some((stages, stages * stage + parts))
}

#[cfg(test)]
mod tests {
    use super::super::MoeScoring;
    use super::*;

    pub(crate) const LITE: MoeShape = MoeShape {
        hidden: 2048,
        intermediate: 1408,
        num_experts: 64,
        top_k: 6,
        num_shared: 2,
        scoring: MoeScoring::Softmax,
        normalize: false,
        round_logits: false,
    };

    #[test]
    fn known_shapes_keep_three_tiles_in_flight() {
        for rows in [1, 16, 128] {
            let plan = Plan::of(&LITE, rows).unwrap();
            assert_eq!((plan.up.warps, plan.down.warps), (8, 11));
            assert!(plan.up.stages >= 3 && plan.down.stages >= 3, "{plan:?}");
            assert!(plan.up.bytes.max(plan.down.bytes) <= SHARED_BYTES - 2048, "{plan:?}");
        }
        let qwen = MoeShape { intermediate: 768, num_experts: 128, top_k: 8, num_shared: 0, ..LITE };
        assert_eq!(Plan::of(&qwen, 64).unwrap().down.warps, 12);
    }

    #[test]
    fn a_whole_layer_in_one_kernel_is_for_routed_experts_that_fit() {
        assert_eq!(stages_of_whole(&LITE).map(|(stages, _)| stages), Some(3));
        assert_eq!(stages_of_whole(&MoeShape { num_experts: 0, top_k: 0, ..LITE }), None);
        assert_eq!(stages_of_whole(&MoeShape { intermediate: 1568, ..LITE }), None);
        assert_eq!(stages_of_whole(&MoeShape { hidden: 3328, ..LITE }), None);
    }

    #[test]
    fn a_dense_mlp_is_shared_experts_alone_and_is_cut_so_that_little_is_padded() {
        let dense = MoeShape { num_experts: 0, top_k: 0, num_shared: 8, ..LITE };
        assert!(Plan::of(&dense, 64).is_ok());
        assert_eq!(MoeShape::cut(2048, 10944), Some((7, 1568)));
        assert_eq!(MoeShape::cut(2048, 1408), Some((1, 1408)));
        assert_eq!(MoeShape::cut(2000, 1408), None);
    }

    #[test]
    fn refuses_what_does_not_divide() {
        for shape in [
            MoeShape { hidden: 2000, ..LITE },
            MoeShape { intermediate: 1400, ..LITE },
            MoeShape { num_experts: 60, ..LITE },
            MoeShape { intermediate: 64, ..LITE }, // two warps cannot add up four row tiles
            MoeShape { top_k: 0, ..LITE },
            MoeShape { num_experts: 0, top_k: 0, num_shared: 0, ..LITE },
        ] {
            assert!(matches!(Moe::check(&shape), Err(GpuError::Unsupported { .. })), "{shape:?}");
        }
        assert!(Plan::of(&LITE, 257).is_err());
    }
}

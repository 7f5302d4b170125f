//! Products with a few dozen rows by a kernel that asks for its weight before its rows are there, on the tensor cores of
//! whole warpgroups.
use super::{GemmShape, ProductType, WeightOrder};
use crate::tensor_map::{MapArgument, MapShape};
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// Elements of the inner dimension that are fetched at once.
const BOX: usize = 64;
/// Rows of a block that there are kernels for.
const ROWS: [usize; 3] = [32, 64, 128];
const MAX_ROWS: usize = 128;
/// Most steps in flight.
const MAX_STAGES: usize = 16;
/// Shared memory of a block that has a multiprocessor for itself, less what is static and what aligns it.
const RING_BYTES: usize = (227 << 10) - 2048;
/// Most that a block reads: beyond, the library is faster.
const MAX_OWN_BYTES: usize = 200 << 10;
/// The same where blocks share the inner dimension.
const MAX_JOINED_BYTES: usize = 256 << 10;
/// Shared memory of a block that leaves room for another, less the same.
const SHARED_RING_BYTES: usize = 110 << 10;
/// Most that such a block reads, or of weight if it shares the inner dimension.
const SHARED_OWN_BYTES: usize = 128 << 10;
const SHARED_WEIGHT_BYTES: usize = 64 << 10;
/// A block that reads no more is over soon, and takes so much that three fill a multiprocessor: more of them would gather on those
/// that the product ahead leaves free, where they keep each other and whoever comes behind them waiting.
const SHORT_OWN_BYTES: usize = 64 << 10;
const SHORT_ROOM_BYTES: usize = 74 << 10;
const ALIGN_BYTES: usize = 1024;

/// The kernels for all shapes.
#[derive(Clone, Debug)]
pub(super) struct MidProducts {
    multiprocessors: usize,
    /// By rows, then by warpgroups.
    kernels: [[Kernel; 2]; 3],
}

/// A product that one of them computes.
#[derive(Clone, Debug)]
pub(super) struct MidProduct {
    kernel: Kernel,
    cut: Cut,
}

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Index into [`ROWS`].
    class: usize,
    /// Of 64 columns each, that share a block's rows.
    warpgroups: usize,
    /// Blocks that share the inner dimension.
    splits: usize,
    /// Blocks that share the rows.
    row_tiles: usize,
    stages: usize,
    bytes: usize,
}

impl MidProducts {
    /// `None` for devices that lack the instructions.
    ///
    /// # Errors
    /// As [`Module::load`].
    pub(super) fn new(device: &Device) -> Result<Option<Self>, GpuError> {
        if device.arch() != (9, 0) {
            return Ok(None);
        }
        let module = Module::load(device, Source::MidProduct, &[])?;
        let pair = |names: [&'static str; 2]| -> Result<_, GpuError> {
            let kernel = |name: &'static str| {
                let kernel = module.kernel(name, RING_BYTES + ALIGN_BYTES)?;
                kernel.prefer_shared_memory()?;
                Ok::<_, GpuError>(kernel)
            };
            Ok([kernel(names[0])?, kernel(names[1])?])
        };
        let kernels = [
            pair(["mid_product_32_1", "mid_product_32_2"])?,
            pair(["mid_product_64_1", "mid_product_64_2"])?,
            pair(["mid_product_128_1", "mid_product_128_2"])?,
        ];
        Ok(Some(Self { multiprocessors: device.num_multiprocessors() as usize, kernels }))
    }

    /// `None` for shapes that no kernel is made for.
    pub(super) fn plan(&self, shape: &GemmShape) -> Option<MidProduct> {
        let cut = cut(shape, self.multiprocessors)?;
        let kernel = self.kernels[cut.class][cut.warpgroups - 1].with_shared_bytes(cut.bytes);
        Some(MidProduct { kernel, cut })
    }
}

/// Of the cuts that give no multiprocessor more than one block, the one that should take the least time.
fn cut(shape: &GemmShape, multiprocessors: usize) -> Option<Cut> {
    let GemmShape { rows, inner, columns, batch, .. } = *shape;
    let plain = shape.order == WeightOrder::OutIn && shape.out == ProductType::Bf16 && !shape.accumulate;
    let strides = [shape.x_stride, shape.x_batch, shape.weight_stride, shape.weight_batch];
    // Sixteen bytes at once.
    let aligned =
        strides.iter().chain(&[shape.out_stride, shape.out_batch, columns]).all(|s| s.is_multiple_of(8));
    if !plain || !aligned || !inner.is_multiple_of(BOX) || rows > MAX_ROWS {
        return None;
    }
    let steps = inner / BOX;
    let mut best: Option<(usize, Cut)> = None;
    for (class, of_block) in ROWS.into_iter().enumerate() {
        for (warpgroups, splits) in [1, 2].into_iter().flat_map(|w| [1, 2, 4].map(|s| (w, s))) {
            let row_tiles = rows.div_ceil(of_block);
            let blocks = columns.div_ceil(64 * warpgroups) * batch * splits * row_tiles;
            // Not by more rows than there are, where fewer would do.
            let wasted = class > 0 && rows <= ROWS[class - 1];
            // Who shares the inner dimension has all rows, so that the weight is read once.
            let joins_tiles = splits > 1 && row_tiles > 1;
            let most = if splits > 1 { MAX_JOINED_BYTES } else { MAX_OWN_BYTES };
            let stage = (warpgroups * 64 + of_block) * BOX * 2;
            let own = steps / splits * stage;
            if wasted
                || joins_tiles
                || !steps.is_multiple_of(splits)
                || blocks > multiprocessors
                || own > most
            {
                continue;
            }
            // The others' parts of the rows that a block sums.
            let inbox = of_block / splits * warpgroups * 64 * 4 * (splits - 1);
            // What a block reads, and all together, at what was seen to be possible; and what it hears from the others.
            let ns = (own / 50).max(own * blocks / 5000) + if splits > 1 { 1100 + inbox / 20 } else { 0 };
            if best.is_none_or(|(least, _)| ns < least) {
                // Two blocks on a multiprocessor, this product's and the next one's, where that costs few steps in flight.
                let own_weight = steps / splits * warpgroups * 64 * BOX * 2;
                let shared = own <= SHARED_OWN_BYTES || (splits > 1 && own_weight <= SHARED_WEIGHT_BYTES);
                let room = if shared { SHARED_RING_BYTES } else { RING_BYTES } - inbox;
                let stages = (room / stage).min(MAX_STAGES).min(steps / splits);
                let sums = if splits == 1 { of_block * (warpgroups * 64 + 4) * 4 } else { 0 };
                let least = if own <= SHORT_OWN_BYTES { SHORT_ROOM_BYTES } else { 0 };
                let bytes = (stages * stage + inbox).max(sums).max(least) + ALIGN_BYTES;
                best = Some((ns, Cut { class, warpgroups, splits, row_tiles, stages, bytes }));
            }
        }
    }
    best.map(|(_, cut)| cut)
}

impl MidProduct {
    /// Enqueues the product of `shape`, which it was planned for, of operands that are as large as it reaches.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub(super) fn enqueue(
        &self,
        stream: &Stream,
        shape: &GemmShape,
        x: &Region,
        weight: &Region,
        out: &Region,
    ) -> Result<(), GpuError> {
        let GemmShape { rows, inner, columns, batch, .. } = *shape;
        let Cut { class, warpgroups, splits, row_tiles, stages, .. } = self.cut;
        let device = stream.device();
        // A stride that does not count must still be a valid one.
        let between = |stride: usize| if batch == 1 { 16 } else { stride * 2 };
        let weight_map = MapShape {
            sizes: &[inner, columns, batch],
            strides: &[shape.weight_stride * 2, between(shape.weight_batch)],
            box_sizes: &[BOX, warpgroups * 64, 1],
        };
        let x_map = MapShape {
            sizes: &[inner, rows, batch],
            strides: &[shape.x_stride * 2, between(shape.x_batch)],
            box_sizes: &[BOX, ROWS[class], 1],
        };
        let (weight_map, x_map) =
            (MapArgument::new(device, weight, weight_map)?, MapArgument::new(device, x, x_map)?);
        let grid = (splits as u32, columns.div_ceil(warpgroups * 64) as u32);
        let launch = Launch::new(&self.kernel, grid, (warpgroups * 128 + 32) as u32).overlap(true);
        let launch = launch.deep((batch * row_tiles) as u32).cluster(splits as u32);
        let launch = launch.map(weight_map, weight).map(x_map, x).region(out).size(rows)?.size(columns)?;
        let launch = launch.size(inner / BOX / splits)?.size(stages)?;
        let launch = launch.size(shape.out_stride)?.size(shape.out_batch)?;
        // SAFETY: mid_product's arguments; the caller checked the sizes.
        unsafe { launch.enqueue(stream) }
    }

    /// In words.
    pub(super) fn cut(&self) -> String {
        let Cut { class, warpgroups, splits, stages, .. } = self.cut;
        format!("{} x {} / {splits}, {stages} deep", warpgroups * 64, ROWS[class])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Columns and rows of a block, blocks that share the inner dimension, steps in flight.
    fn cut_of(shape: &GemmShape) -> Option<(usize, usize, usize, usize)> {
        cut(shape, 132).map(|cut| (cut.warpgroups * 64, ROWS[cut.class], cut.splits, cut.stages))
    }

    #[test]
    fn a_long_inner_dimension_is_shared_and_a_short_one_is_not() {
        let heads = |rows, inner, columns| GemmShape { batch: 16, ..GemmShape::linear(rows, inner, columns) };
        assert_eq!(cut_of(&GemmShape::linear(64, 2048, 3648)), Some((128, 64, 4, 8)));
        assert_eq!(cut_of(&GemmShape::linear(64, 2048, 2048)), Some((64, 64, 4, 6)));
        assert_eq!(cut_of(&GemmShape::linear(32, 2048, 3648)), Some((128, 32, 4, 8)));
        assert_eq!(cut_of(&GemmShape::linear(32, 2048, 2048)), Some((64, 32, 4, 8)));
        assert_eq!(cut_of(&GemmShape::linear(128, 2048, 3648)), Some((128, 128, 4, 5)));
        assert_eq!(cut_of(&GemmShape::linear(128, 2048, 2048)), Some((64, 128, 4, 3)));
        assert_eq!(cut_of(&GemmShape::linear(64, 1152, 896)), Some((64, 64, 2, 9)));
        assert_eq!(cut_of(&heads(64, 128, 512)), Some((64, 64, 1, 2)));
        assert_eq!(cut_of(&heads(32, 512, 128)), Some((64, 32, 1, 8)));
        assert_eq!(cut_of(&heads(64, 512, 128)), Some((64, 32, 1, 8)));
        assert_eq!(cut_of(&heads(128, 128, 512)), Some((128, 64, 1, 2)));
        assert_eq!(cut_of(&heads(128, 512, 128)), Some((64, 32, 1, 8)));
    }

    #[test]
    fn shared_memory_holds_the_ring_and_then_the_sums_or_what_others_push() {
        for rows in [17, 64, 128] {
            for (inner, columns) in [(2048, 3648), (2048, 2048), (128, 512), (64, 128)] {
                let Some(cut) = cut(&GemmShape::linear(rows, inner, columns), 132) else { continue };
                assert!(cut.stages >= 1 && cut.bytes <= RING_BYTES + ALIGN_BYTES, "{cut:?}");
                let (rows, columns) = (ROWS[cut.class], cut.warpgroups * 64);
                let ring = cut.stages * (rows + columns) * BOX * 2;
                let pushed = rows / cut.splits * columns * 4 * (cut.splits - 1);
                let sums = if cut.splits == 1 { rows * (columns + 4) * 4 } else { ring + pushed };
                assert!(cut.bytes >= ring.max(sums) + ALIGN_BYTES, "{cut:?}");
            }
        }
    }

    #[test]
    fn of_short_products_three_blocks_fill_a_multiprocessor() {
        let heads = |rows, inner, columns| {
            let shape = GemmShape { batch: 16, ..GemmShape::linear(rows, inner, columns) };
            cut(&shape, 132).unwrap()
        };
        for rows in [17, 32, 64, 128] {
            let short = heads(rows, 128, 512).bytes;
            assert!((3 * short..4 * short).contains(&(227 << 10)), "{short}");
            assert!(heads(rows, 512, 128).bytes > short);
        }
    }

    #[test]
    fn other_products_are_left_to_the_library() {
        let dense = GemmShape::linear(64, 512, 64);
        assert!(cut(&dense, 132).is_some());
        assert!(cut(&GemmShape::linear(128, 2048, 8192), 132).is_none());
        let own = [
            GemmShape { rows: 129, ..dense },
            GemmShape { columns: 100 << 10, out_stride: 100 << 10, ..dense },
            GemmShape { columns: 60, ..dense },
            GemmShape { inner: 96, ..dense },
        ];
        for shape in own.into_iter().chain(dense.for_the_library()) {
            assert!(cut(&shape, 132).is_none(), "{shape:?}");
        }
    }
}

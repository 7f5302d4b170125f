//! Products with few rows by a kernel that asks for its weight before its rows are there.
use super::{GemmShape, ProductType, WeightOrder};
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// Elements of the inner dimension that a warp takes at once.
const CHUNK: usize = 32;
/// Chunks of a warp: those there is a kernel for.
const CHUNKS: [usize; 4] = [1, 2, 4, 8];
const MAX_WARPS: usize = 16;

/// The kernels for all shapes.
#[derive(Clone, Debug)]
pub(super) struct FewProducts {
    /// By chunks a warp, then by tiles of eight rows.
    kernels: [[Kernel; 2]; 4],
}

/// A product that one of them computes.
#[derive(Clone, Debug)]
pub(super) struct FewProduct {
    kernel: Kernel,
    warps: usize,
}

impl FewProducts {
    /// Most rows.
    const MAX_ROWS: usize = 16;

    /// # Errors
    /// As [`Module::load`].
    pub(super) fn new(device: &Device) -> Result<Self, GpuError> {
        let module = Module::load(device, Source::FewProduct, &[])?;
        let [a, b, c, d] = [
            ["few_product_1_1", "few_product_1_2"],
            ["few_product_2_1", "few_product_2_2"],
            ["few_product_4_1", "few_product_4_2"],
            ["few_product_8_1", "few_product_8_2"],
        ];
        let made = |class: usize, names: [&'static str; 2]| -> Result<_, GpuError> {
            let most = shared_bytes(CHUNKS[class] * CHUNK * MAX_WARPS);
            let kernel = |name: &'static str| {
                let kernel = module.kernel(name, most)?;
                // Beside the decode kernel, which takes most of it.
                kernel.prefer_shared_memory()?;
                Ok::<_, GpuError>(kernel)
            };
            Ok([kernel(names[0])?, kernel(names[1])?])
        };
        let [a, b, c, d] = [made(0, a), made(1, b), made(2, c), made(3, d)];
        Ok(Self { kernels: [a?, b?, c?, d?] })
    }

    /// `None` for shapes that no kernel is made for.
    pub(super) fn plan(&self, shape: &GemmShape) -> Option<FewProduct> {
        let (class, warps) = cut(shape)?;
        let kernel =
            self.kernels[class][usize::from(shape.rows > 8)].with_shared_bytes(shared_bytes(shape.inner));
        Some(FewProduct { kernel, warps })
    }
}

/// Of a block: sixteen rows of the weight, each a little longer.
fn shared_bytes(inner: usize) -> usize {
    16 * (inner * 2 + 64)
}

/// Index into [`CHUNKS`], and how many warps share the inner dimension: as many as there can be.
fn cut(shape: &GemmShape) -> Option<(usize, usize)> {
    let GemmShape { rows, inner, columns, .. } = *shape;
    let plain = shape.order == WeightOrder::OutIn && shape.out == ProductType::Bf16 && !shape.accumulate;
    let dense = shape.weight_stride == inner && columns.is_multiple_of(16);
    // Sixteen bytes at once.
    let aligned = [shape.x_stride, shape.x_batch, shape.weight_batch].iter().all(|s| s.is_multiple_of(8));
    // Of a long product the library hides the waits of its blocks; ours does where one tile of rows is all there is.
    let long = inner * columns > 16 << 20 && rows > 8;
    if !plain || !dense || !aligned || long || rows > FewProducts::MAX_ROWS {
        return None;
    }
    let fits = |(class, &chunks): (usize, &usize)| {
        let warps = inner / (CHUNK * chunks);
        (inner.is_multiple_of(CHUNK * chunks) && (1..=MAX_WARPS).contains(&warps)).then_some((class, warps))
    };
    // Eight warps keep two blocks on a multiprocessor; more only where the inner dimension asks for it.
    let all: Vec<_> = CHUNKS.iter().enumerate().filter_map(fits).collect();
    all.iter().copied().find(|(_, warps)| *warps <= 8).or(all.last().copied())
}

impl FewProduct {
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
        let grid = ((shape.columns / 16) as u32, shape.batch as u32);
        let launch = Launch::new(&self.kernel, grid, (self.warps * 32) as u32).overlap(true);
        let launch = launch.region(x).region(weight).region(out).size(shape.rows)?;
        let launch = launch.size(shape.x_stride)?.size(shape.x_batch)?.size(shape.weight_batch)?;
        let launch = launch.size(shape.out_stride)?.size(shape.out_batch)?;
        // SAFETY: few_product's arguments; the caller checked the sizes.
        unsafe { launch.enqueue(stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inner_dimension_is_shared_by_up_to_eight_warps_where_that_is_enough() {
        let cut = |inner| cut(&GemmShape::linear(1, inner, 64)).map(|(class, warps)| (CHUNKS[class], warps));
        assert_eq!(cut(128), Some((1, 4)));
        assert_eq!(cut(512), Some((2, 8)));
        assert_eq!(cut(2048), Some((8, 8)));
        assert_eq!(cut(4096), Some((8, 16)));
        assert_eq!(cut(8192), None);
        assert_eq!(cut(100), None);
    }

    #[test]
    fn other_products_are_left_to_the_library() {
        let dense = GemmShape::linear(16, 512, 64);
        assert!(cut(&dense).is_some());
        let own = [
            GemmShape { rows: 17, ..dense },
            GemmShape { columns: 64 << 10, out_stride: 64 << 10, ..dense },
            GemmShape { columns: 72, ..dense },
            GemmShape { weight_stride: 520, ..dense },
        ];
        for shape in own.into_iter().chain(dense.for_the_library()) {
            assert!(cut(&shape).is_none(), "{shape:?}");
        }
    }
}

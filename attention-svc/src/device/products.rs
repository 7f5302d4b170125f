//! The matrix products of attention for some padded rows: what they are, and the fastest way to compute them.
use afd_gpu::ops::{GemmShape, Product, ProductKernels};
use afd_gpu::{GpuError, Region, Stream};

use crate::model::{AttentionShape, KernelAttention, KernelLayer, KernelModel, KernelShape};

/// Matrix products for some padded rows.
pub(super) struct Products {
    pub(super) projection: Product,
    /// W_UK and W_UV, head by head.
    pub(super) absorb: Option<(Product, Product)>,
    pub(super) out: Product,
    pub(super) head: Product,
}

/// The rows that they read and write, as in [`StageRows`](super::attention::StageRows).
pub(super) struct Operands<'a> {
    pub(super) x: &'a Region,
    pub(super) projected: &'a Region,
    pub(super) query: &'a Region,
    pub(super) latents: &'a Region,
    pub(super) attended: &'a Region,
    pub(super) delta: &'a Region,
    pub(super) logits: &'a Region,
}

/// Columns of the projection, and of what the output projection takes.
pub(super) fn widths(shape: &KernelShape) -> (usize, usize) {
    match shape.attention {
        AttentionShape::Gqa { heads, kv, dim } => ((heads + 2 * kv) * dim, heads * dim),
        AttentionShape::Mla(mla) => (mla.projected(), mla.attended()),
    }
}

/// W_UV, behind W_UK.
pub(super) fn of_values(up: &Region, shape: &KernelShape) -> Result<Region, GpuError> {
    let AttentionShape::Mla(mla) = shape.attention else { return Ok(up.clone()) };
    up.part(mla.heads * mla.nope * mla.latent * 2..up.len())
}

impl Products {
    /// For `rows` rows.
    pub(super) fn new(kernels: &ProductKernels, shape: &KernelShape, rows: usize) -> Result<Self, GpuError> {
        let product = |shape| Product::new(kernels, shape);
        let (projected, attended) = widths(shape);
        let absorb = match shape.attention {
            AttentionShape::Gqa { .. } => None,
            AttentionShape::Mla(mla) => Some((product(mla.keys(rows))?, product(mla.values(rows))?)),
        };
        Ok(Self {
            projection: product(GemmShape::linear(rows, shape.hidden, projected))?,
            absorb,
            out: product(GemmShape::linear(rows, attended, shape.hidden))?,
            head: product(GemmShape::linear(rows, shape.hidden, shape.vocab))?,
        })
    }

    /// Finds the fastest way to compute each, on rows that nobody needs.
    pub(super) fn tune(
        &mut self,
        stream: &Stream,
        model: &KernelModel,
        rows: &Operands<'_>,
    ) -> Result<(), GpuError> {
        let Operands { x, projected, query, latents, attended, delta, logits } = rows;
        let each = |weight: fn(&KernelLayer) -> &Region| model.layers.iter().map(weight).collect::<Vec<_>>();
        self.projection.tune(stream, x, &each(|layer| &layer.projection), projected)?;
        self.out.tune(stream, attended, &each(|layer| &layer.out), delta)?;
        self.head.tune(stream, x, &[&model.head], logits)?;
        if let Some((keys, values)) = &mut self.absorb {
            let up = |layer: &KernelLayer| match &layer.attention {
                KernelAttention::Mla { up, .. } => Some(up.clone()),
                KernelAttention::Gqa { .. } => None,
            };
            let ups: Vec<Region> = model.layers.iter().filter_map(up).collect();
            keys.tune(stream, projected, &ups.iter().collect::<Vec<_>>(), query)?;
            let behind = |up: &Region| of_values(up, &model.shape);
            let ups: Vec<Region> = ups.iter().map(behind).collect::<Result<_, _>>()?;
            values.tune(stream, latents, &ups.iter().collect::<Vec<_>>(), attended)?;
        }
        Ok(())
    }
}

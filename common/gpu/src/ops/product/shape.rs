//! What is multiplied by what.
use crate::GpuError;

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightOrder {
    /// `[columns, inner]`, as checkpoints do.
    OutIn,
    /// `[inner, columns]`.
    InOut,
}

/// Type of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProductType {
    /// Rounded.
    Bf16,
    /// As accumulated.
    F32,
}

/// A product `out[rows, columns] = x[rows, inner] · weight`, or as many of them as `batch`. Strides are in elements; a
/// batch stride is the distance between neighbouring products' operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmShape {
    /// Rows of `x`, bf16.
    pub rows: usize,
    /// Elements that are summed over.
    pub inner: usize,
    /// Columns of the result.
    pub columns: usize,
    /// How the weight, bf16, is stored.
    pub order: WeightOrder,
    /// Type of the result.
    pub out: ProductType,
    /// Whether the result is added to what is there.
    pub accumulate: bool,
    /// Products.
    pub batch: usize,
    /// From a row of `x` to the next.
    pub x_stride: usize,
    /// Between products.
    pub x_batch: usize,
    /// From a row of the weight, as stored, to the next.
    pub weight_stride: usize,
    /// Between products.
    pub weight_batch: usize,
    /// From a row of the result to the next.
    pub out_stride: usize,
    /// Between products.
    pub out_batch: usize,
}

impl GemmShape {
    /// One dense product by a weight as checkpoints store it, rounded.
    pub fn linear(rows: usize, inner: usize, columns: usize) -> Self {
        Self {
            rows,
            inner,
            columns,
            order: WeightOrder::OutIn,
            out: ProductType::Bf16,
            accumulate: false,
            batch: 1,
            x_stride: inner,
            x_batch: 0,
            weight_stride: inner,
            weight_batch: 0,
            out_stride: columns,
            out_batch: 0,
        }
    }

    /// What the library alone computes, made from a dense product of 512 elements by 64 columns that a kernel of ours does.
    #[cfg(test)]
    pub(super) fn for_the_library(self) -> [Self; 4] {
        [
            Self { accumulate: true, ..self },
            Self { out: ProductType::F32, ..self },
            Self { x_stride: 516, ..self },
            Self { order: WeightOrder::InOut, weight_stride: 64, ..self },
        ]
    }

    /// Bytes that `x`, the weight and the result reach over.
    pub(super) fn reach(&self) -> Result<[usize; 3], GpuError> {
        let Self { rows, inner, columns, batch, .. } = *self;
        let (stored_rows, stored_columns) = match self.order {
            WeightOrder::OutIn => (columns, inner),
            WeightOrder::InOut => (inner, columns),
        };
        let refuse = || GpuError::unsupported(format!("{self:?}"));
        let sizes = [rows, inner, columns, batch];
        if sizes.contains(&0)
            || self.x_stride < inner
            || self.weight_stride < stored_columns
            || self.out_stride < columns
        {
            return Err(refuse());
        }
        let span = |batch_stride: usize, rows: usize, stride: usize, columns: usize, element: usize| {
            let last = (batch - 1).checked_mul(batch_stride)?.checked_add((rows - 1).checked_mul(stride)?)?;
            last.checked_add(columns)?.checked_mul(element)
        };
        let element = match self.out {
            ProductType::Bf16 => 2,
            ProductType::F32 => 4,
        };
        let x = span(self.x_batch, rows, self.x_stride, inner, 2);
        let weight = span(self.weight_batch, stored_rows, self.weight_stride, stored_columns, 2);
        let out = span(self.out_batch, rows, self.out_stride, columns, element);
        Ok([x.ok_or_else(refuse)?, weight.ok_or_else(refuse)?, out.ok_or_else(refuse)?])
    }
}

/// Sizes of latent attention whose W_UK and W_UV are absorbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaSizes {
    /// Query heads.
    pub heads: usize,
    /// Elements of the latent.
    pub latent: usize,
    /// Elements of a query and a key that turn.
    pub rope: usize,
    /// Those that do not.
    pub nope: usize,
    /// Elements of a value.
    pub value: usize,
}

impl MlaSizes {
    /// Columns of the projection: every head's query, then latent and rope key.
    pub fn projected(&self) -> usize {
        self.heads * (self.nope + self.rope) + self.latent + self.rope
    }

    /// Columns of what the output projection takes.
    pub fn attended(&self) -> usize {
        self.heads * self.value
    }

    /// W_UK into the queries, head by head: from the projected rows to `[rows, heads, latent + rope]`, of whose ends it leaves
    /// the rope parts alone. `[heads, latent, nope]` is the weight.
    pub fn keys(&self, rows: usize) -> GemmShape {
        let Self { heads, latent, rope, nope, .. } = *self;
        GemmShape {
            batch: heads,
            x_stride: self.projected(),
            x_batch: nope + rope,
            weight_batch: latent * nope,
            out_stride: heads * (latent + rope),
            out_batch: latent + rope,
            ..GemmShape::linear(rows, nope, latent)
        }
    }

    /// W_UV into the result, head by head: `[rows, heads, latent]` to `[rows, heads, value]`. `[heads, value, latent]` is the
    /// weight.
    pub fn values(&self, rows: usize) -> GemmShape {
        let Self { heads, latent, value, .. } = *self;
        GemmShape {
            batch: heads,
            x_stride: heads * latent,
            x_batch: latent,
            weight_batch: value * latent,
            out_stride: heads * value,
            out_batch: value,
            ..GemmShape::linear(rows, latent, value)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_reach_as_far_as_their_strides_say() {
        let dense = GemmShape::linear(3, 64, 10);
        assert_eq!(dense.reach().unwrap(), [3 * 64 * 2, 10 * 64 * 2, 3 * 10 * 2]);
        // Heads of a query: three rows of four heads of 16, of which 8 elements count, by a weight a head.
        let heads = GemmShape {
            order: WeightOrder::InOut,
            out: ProductType::F32,
            batch: 4,
            x_stride: 64,
            x_batch: 16,
            weight_stride: 5,
            weight_batch: 40,
            out_stride: 20,
            out_batch: 5,
            ..GemmShape::linear(3, 8, 5)
        };
        assert_eq!(heads.reach().unwrap(), [(2 * 64 + 3 * 16 + 8) * 2, 4 * 40 * 2, 3 * 20 * 4]);
    }

    #[test]
    fn contradictions_are_refused() {
        let dense = GemmShape::linear(3, 64, 10);
        for shape in [
            GemmShape { rows: 0, ..dense },
            GemmShape { x_stride: 63, ..dense },
            GemmShape { weight_stride: 10, ..dense },
            GemmShape { out_stride: 9, ..dense },
            GemmShape { batch: 2, weight_batch: usize::MAX, ..dense },
        ] {
            assert!(matches!(shape.reach(), Err(GpuError::Unsupported { .. })), "{shape:?}");
        }
    }
}

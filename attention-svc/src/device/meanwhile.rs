//! What attention's device does while the FFN works on another: it brings into its second-level cache what attention of the next layer
//! reads first, or the head.
//!
//! Of the layer that is the cache of keys and values alone. Its weights were measured not to be worth it: the kernels that stand
//! ready behind the wait have fetched what they can hold of them.
use afd_gpu::ops::{Ahead, CachePart};
use afd_gpu::{GpuError, Region, Stream};

use super::attention::{Kernels, StageRows};
use crate::model::{AttentionShape, KernelAttention, KernelLayer, KernelModel, KernelShape};

/// How much of the second-level cache may be filled, in fifths: what is fetched beyond evicts itself.
const FIFTHS_OF_KEYS: usize = 4;
/// The same for the head, whose products read it once and in order.
const FIFTHS_OF_HEAD: usize = 2;

impl StageRows {
    /// Enqueues it, behind the rows of layer `index` on their way to the FFN, for a stage of `padded` rows.
    pub(super) fn fetch_next(
        &self,
        kernels: &Kernels,
        stream: &Stream,
        model: &KernelModel,
        index: usize,
        padded: usize,
    ) -> Result<(), GpuError> {
        let fifth = stream.device().cache_bytes() / 5;
        let Some(layer) = model.layers.get(index + 1) else {
            let bytes = (FIFTHS_OF_HEAD * fifth).min(model.head.len());
            let head = model.head.part(0..bytes / 16 * 16)?;
            return kernels.meanwhile.fetch(stream, Ahead::of([&head]), None);
        };
        let (cache, second, row_bytes) = cache_of(layer, &model.shape)?;
        let part = CachePart {
            cache,
            second,
            row_bytes,
            block_size: model.shape.block_size,
            block_table: &self.inputs.block_table,
            max_blocks: self.max_blocks(&model.shape),
            seq_lens: &self.inputs.seq_lens,
            batch: padded,
            room: FIFTHS_OF_KEYS * fifth,
        };
        kernels.meanwhile.fetch(stream, Ahead::default(), Some(&part))
    }
}

/// A layer's cache, in one part or two, and what a token takes in each, bytes.
fn cache_of<'a>(
    layer: &'a KernelLayer,
    shape: &KernelShape,
) -> Result<(&'a Region, Option<&'a Region>, usize), GpuError> {
    match (&layer.attention, shape.attention) {
        (KernelAttention::Mla { cache, .. }, AttentionShape::Mla(mla)) => {
            Ok((cache, None, (mla.latent + mla.rope) * 2))
        }
        (KernelAttention::Gqa { keys, values, .. }, AttentionShape::Gqa { kv, dim, .. }) => {
            Ok((keys, Some(values), kv * dim * 2))
        }
        _ => Err(GpuError::Unsupported { what: "mixed kinds of attention".into() }),
    }
}

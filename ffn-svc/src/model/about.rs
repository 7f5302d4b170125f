//! What is true of a shard wherever it is computed: which rows it takes, which it gives back, and what it owns of each
//! layer. The model on the CPU and the one on a GPU each have one of these.
use std::sync::Arc;

use afd_common::ids::{LayerIdx, Shard};
use tch::{Kind, Tensor};

use super::{ExpertCounts, FfnModelError, LayerSpec};

/// See the module's head.
#[derive(Clone, Debug)]
pub struct AboutShard {
    specs: Vec<LayerSpec>,
    hidden_size: usize,
    kind: Kind,
    shard: Shard,
    counts: Arc<ExpertCounts>,
}

impl AboutShard {
    /// Of layers like these, whose rows are `hidden_size` elements of `kind`; nothing is counted yet.
    pub(crate) fn new(specs: Vec<LayerSpec>, hidden_size: usize, kind: Kind, shard: Shard) -> Self {
        let counts = Arc::new(ExpertCounts::new(&specs));
        Self { specs, hidden_size, kind, shard, counts }
    }

    /// One entry per layer.
    pub fn specs(&self) -> &[LayerSpec] {
        &self.specs
    }

    /// Width of a row.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    /// Element type of the rows that come in: the compute dtype.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Element type of the rows that go out: f32 partial sums with more than one shard, else the compute dtype.
    pub fn out_kind(&self) -> Kind {
        if self.shard.count() > 1 { Kind::Float } else { self.kind }
    }

    /// Which part of every layer this is.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// How many rows each expert of this shard was given so far. Shared: metrics read it while the engine computes; of
    /// experts on a GPU its kernels count.
    pub fn expert_counts(&self) -> &Arc<ExpertCounts> {
        &self.counts
    }

    /// Whether these are rows that a layer takes: `[rows, hidden]` in the compute dtype.
    ///
    /// # Errors
    /// [`FfnModelError::Rows`] names what is expected and what came.
    pub(crate) fn check_rows(&self, layer: LayerIdx, hidden: &Tensor) -> Result<(), FfnModelError> {
        let (size, kind) = (hidden.size(), hidden.kind());
        if size.len() == 2 && size[1] == self.hidden_size as i64 && kind == self.kind {
            return Ok(());
        }
        let expected = format!("[rows, {}] {:?}", self.hidden_size, self.kind);
        Err(FfnModelError::Rows { layer, expected, found: format!("{size:?} {kind:?}") })
    }
}

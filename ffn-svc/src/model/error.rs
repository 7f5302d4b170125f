//! Why the FFN of a layer cannot be loaded or computed.
use afd_common::frame::SideKind;
use afd_common::ids::LayerIdx;
use afd_common::process::exit::Exit;
use afd_common::weights::WeightError;
use tch::TchError;

/// Why the FFN of a layer cannot be loaded or computed. A retry of the same call does not help.
#[derive(Debug, thiserror::Error)]
pub enum FfnModelError {
    /// A weight is missing or wrong; the message names the tensor.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The placement of experts is another model's, or another deployment's.
    #[error("the placement of experts {what}")]
    Placement {
        /// Found and expected.
        what: String,
    },
    /// The model has no such layer.
    #[error("{layer} of {count} layers")]
    UnknownLayer {
        /// As asked for.
        layer: LayerIdx,
        /// How many there are.
        count: usize,
    },
    /// The rows have another shape or element type.
    #[error("{layer}: rows are {found}, expected {expected}")]
    Rows {
        /// Which layer.
        layer: LayerIdx,
        /// Shape and dtype.
        expected: String,
        /// Shape and dtype.
        found: String,
    },
    /// The layer needs other side tensors.
    #[error("{layer}: side tensors are {found:?}, expected {expected}")]
    Side {
        /// Which layer.
        layer: LayerIdx,
        /// What the layer takes.
        expected: String,
        /// What came.
        found: SideKind,
    },
    /// A side tensor has another shape or element type.
    #[error("{layer}: `{name}` is {found}, expected {expected}")]
    SideShape {
        /// Which layer.
        layer: LayerIdx,
        /// The tensor's name.
        name: &'static str,
        /// Shape and dtype.
        expected: String,
        /// Shape and dtype.
        found: String,
    },
    /// The system gives no threads to compute with.
    #[error("compute threads: {0}")]
    Threads(std::io::Error),
    /// A row was routed to an expert that does not exist.
    #[error("{layer}: row {row} is routed to expert {expert} of {num_experts}")]
    UnknownExpert {
        /// Which layer.
        layer: LayerIdx,
        /// Index of the row.
        row: usize,
        /// As sent.
        expert: i64,
        /// How many there are.
        num_experts: usize,
    },
    /// The loops for few rows refused.
    #[error("{layer}: {source}")]
    FewRows {
        /// Which layer.
        layer: LayerIdx,
        /// Expected and found.
        source: afd_ffi::ShapeError,
    },
    /// A row of a layer that routes by token id has an id that the table does not know.
    #[error("{layer}: `input_ids`: row {row} is token {token} of {vocab_size}")]
    UnknownToken {
        /// Which layer.
        layer: LayerIdx,
        /// Index of the row.
        row: usize,
        /// As sent.
        token: i64,
        /// How many the table knows.
        vocab_size: usize,
    },
    /// The GPU refused.
    #[error(transparent)]
    Gpu(#[from] afd_gpu::GpuError),
    /// A tensor on the GPU has no memory that kernels can use.
    #[error("weights for the kernels: {0}")]
    DeviceMemory(#[from] afd_ffi::FfiError),
    /// libtorch refused.
    #[error("{layer}: {operation}: {source}")]
    Torch {
        /// Which layer.
        layer: LayerIdx,
        /// What was computed.
        operation: &'static str,
        /// libtorch's words.
        source: TchError,
    },
}

impl FfnModelError {
    /// How a process ends that cannot load a model for this reason.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Weights(_) | Self::Placement { .. } => Exit::Unusable,
            _ => Exit::Failed,
        }
    }
}

/// Says where an operation failed.
pub(crate) trait At<T> {
    fn at(self, layer: LayerIdx, operation: &'static str) -> Result<T, FfnModelError>;
}

impl<T> At<T> for Result<T, TchError> {
    fn at(self, layer: LayerIdx, operation: &'static str) -> Result<T, FfnModelError> {
        self.map_err(|source| FfnModelError::Torch { layer, operation, source })
    }
}

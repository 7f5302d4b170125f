//! Why attention cannot be loaded or computed.
use afd_common::ids::LayerIdx;
use afd_common::process::exit::Exit;
use afd_common::weights::WeightError;
use afd_ffi::ShapeError;
use tch::TchError;

/// Why attention cannot be loaded or computed. A retry of the same call does not help.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A weight is missing or wrong; the message names the tensor.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The configuration asks for something that is not served.
    #[error("config.json: `{field}`: {what}")]
    Unsupported {
        /// Its name.
        field: &'static str,
        /// The value and what would be accepted.
        what: String,
    },
    /// A stage contradicts itself, the cache or the model's length.
    #[error("stage: {what}")]
    Stage {
        /// Expected and found.
        what: String,
    },
    /// There is no memory for the cache.
    #[error("allocating the KV cache (--kv-cache-memory, --kv-cache-blocks): {source}")]
    CacheMemory {
        /// The system's words.
        source: afd_ffi::FfiError,
    },
    /// The threads of its loops cannot be started.
    #[error("starting compute threads (--threads): {0}")]
    Threads(std::io::Error),
    /// The cache was made for another model.
    #[error("{layer}: the KV cache has no such layer, or is another attention's")]
    Cache {
        /// Which layer.
        layer: LayerIdx,
    },
    /// Tensors do not fit one another or the stage.
    #[error("{place}: {source}")]
    Shape {
        /// Layer and operation.
        place: String,
        /// Expected and found.
        source: ShapeError,
    },
    /// A kernel, or memory for one, cannot be had.
    #[error("{place}: {what}")]
    Device {
        /// Layer and operation.
        place: String,
        /// The driver's or libtorch's words.
        what: String,
    },
    /// libtorch refused.
    #[error("{place}: {source}")]
    Torch {
        /// Layer and operation.
        place: String,
        /// libtorch's words.
        source: TchError,
    },
}

impl ModelError {
    /// How a process ends that cannot load a model for this reason.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Weights(_) | Self::Unsupported { .. } | Self::CacheMemory { .. } => Exit::Unusable,
            _ => Exit::Failed,
        }
    }
}

/// Says where an operation failed.
pub(super) trait At<T> {
    /// `place` is built only when there is an error to report.
    fn at(self, layer: LayerIdx, operation: &'static str) -> Result<T, ModelError>;
}

impl<T> At<T> for Result<T, TchError> {
    fn at(self, layer: LayerIdx, operation: &'static str) -> Result<T, ModelError> {
        self.map_err(|source| ModelError::Torch { place: format!("{layer}: {operation}"), source })
    }
}

impl<T> At<T> for Result<T, RowsError> {
    fn at(self, layer: LayerIdx, operation: &'static str) -> Result<T, ModelError> {
        self.map_err(|error| error.at_place(format!("{layer}: {operation}")))
    }
}

/// For what says nothing that would be of use but in its words.
macro_rules! at_on_device {
    ($($error:ty),*) => {$(
        impl<T> At<T> for Result<T, $error> {
            fn at(self, layer: LayerIdx, operation: &'static str) -> Result<T, ModelError> {
                let place = format!("{layer}: {operation}");
                self.map_err(|error| ModelError::Device { place, what: error.to_string() })
            }
        }
    )*};
}

at_on_device!(afd_gpu::GpuError, afd_ffi::FfiError, afd_ffi::cuda::CudaError, ffn_svc::model::FfnModelError);

/// Why rows cannot be computed.
#[derive(Debug)]
pub(super) enum RowsError {
    Shape(ShapeError),
    Torch(TchError),
}

impl From<ShapeError> for RowsError {
    fn from(error: ShapeError) -> Self {
        Self::Shape(error)
    }
}

impl From<TchError> for RowsError {
    fn from(error: TchError) -> Self {
        Self::Torch(error)
    }
}

impl RowsError {
    pub(super) fn at_place(self, place: String) -> ModelError {
        match self {
            Self::Shape(source) => ModelError::Shape { place, source },
            Self::Torch(source) => ModelError::Torch { place, source },
        }
    }
}

/// The same for what belongs to no layer.
pub(super) fn outside_layers(operation: &'static str) -> impl Fn(TchError) -> ModelError {
    move |source| ModelError::Torch { place: operation.into(), source }
}

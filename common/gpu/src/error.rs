//! Why the GPU cannot do what was asked.
use cudarc::cublaslt::result::CublasError;
use cudarc::driver::DriverError;

/// Failures of this crate's own faces; channels have [`StepError`](crate::channel::StepError).
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// No CUDA driver on this machine.
    #[error("no CUDA driver: libcuda.so was not found (ask for the CPU, or install the NVIDIA driver)")]
    NoDriver,
    /// A library of the CUDA installation cannot be loaded.
    #[error("{library} was not found on the library path")]
    NoLibrary {
        /// Its file name without a version.
        library: &'static str,
    },
    /// There are fewer devices than that.
    #[error("device cuda:{ordinal} of {count}")]
    NoDevice {
        /// What was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The driver refused. After an illegal address or a launch failure, everything on the device fails from then on.
    #[error("{what}: {source}")]
    Driver {
        /// What was tried.
        what: &'static str,
        /// The driver's words.
        source: DriverError,
    },
    /// cuBLASLt refused.
    #[error("{what}: cuBLASLt says {status}")]
    Blas {
        /// What was tried.
        what: &'static str,
        /// The library's words.
        status: String,
    },
    /// A kernel does not compile: a mistake in this crate.
    #[error("{file} does not compile: {log}")]
    Compile {
        /// Which kernel file.
        file: &'static str,
        /// The compiler's words.
        log: String,
    },
    /// Memory is smaller than the shapes need, or an address is not aligned.
    #[error("{what}: {found} bytes where {needed} are needed")]
    TooSmall {
        /// Which argument.
        what: &'static str,
        /// Bytes.
        found: usize,
        /// Bytes.
        needed: usize,
    },
    /// A shape that the kernels are not made for; another path must take it.
    #[error("not for these kernels: {what}")]
    Unsupported {
        /// Which dimension and its value.
        what: String,
    },
    /// The stream did not get there in time.
    #[error("{what} was not done after {waited_ms} ms")]
    Late {
        /// What was waited for.
        what: &'static str,
        /// How long.
        waited_ms: u128,
    },
}

impl GpuError {
    pub(crate) fn driver(what: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |source| Self::Driver { what, source }
    }

    pub(crate) fn blas(what: &'static str) -> impl FnOnce(CublasError) -> Self {
        move |status| Self::Blas { what, status: status.to_string() }
    }

    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into() }
    }
}

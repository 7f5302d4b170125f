//! Attention on a GPU: the stream that all of a rank's work runs on, whole decode steps on it, and the FFN on the same
//! device.
//!
//! In reading order: [`Decoder`] (a decode step and its graphs) → `inputs` (the host's numbers) → `attention` (one stage
//! through the layers, with its `products`, and what it does `meanwhile`) ⇢ [`StreamFfn`] (the FFN behind it) → `local_ffn`; → `outcome` (what was chosen).
//!
//! Whatever libtorch computes (prompts, and everything that our kernels are not made for) runs on [`Gpu::stream`],
//! because the engine's thread holds a guard for it: one stream, so nothing needs to be ordered by hand.
use std::sync::Arc;

use afd_common::config::device::DeviceChoice;
use afd_ffi::cuda::{CudaError, StreamGuard};
use afd_gpu::{Device, GpuError, Stream};

mod attention;
mod capture_sizes;
mod decoder;
mod inputs;
mod local_ffn;
mod meanwhile;
mod outcome;
mod products;
mod stream_ffn;
#[cfg(test)]
mod tests;

pub use capture_sizes::{CaptureSizes, MAX_CAPTURE_SIZE};
pub use decoder::{Decoder, GraphSettings};
pub use local_ffn::LocalFfn;
pub use stream_ffn::{HopRows, StepRun, StreamFfn, StreamHop, Summand};

/// A GPU and the stream that the engine's thread uses. Clones are the same.
#[derive(Clone)]
pub struct Gpu {
    device: Device,
    stream: Arc<Stream>,
}

impl Gpu {
    /// Opens the device that was asked for; `None` for the CPU. [`DeviceChoice::load`] comes first.
    ///
    /// # Errors
    /// [`GpuError`] when the driver refuses.
    pub fn open(choice: DeviceChoice) -> Result<Option<Self>, GpuError> {
        let DeviceChoice::Cuda(ordinal) = choice else { return Ok(None) };
        let device = Device::open(ordinal)?;
        Ok(Some(Self { stream: Arc::new(device.stream()?), device }))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where everything runs.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Makes libtorch use the stream on this thread, after what was loaded on others is there.
    ///
    /// # Errors
    /// [`CudaError`], or the device's.
    pub fn enter(&self) -> Result<StreamGuard, EnterError> {
        self.device.synchronize()?;
        Ok(StreamGuard::new(&self.stream)?)
    }
}

/// Why the engine's thread cannot use the device.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// libtorch refuses.
    #[error(transparent)]
    Torch(#[from] CudaError),
    /// The driver refuses.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

//! Attention on a GPU: the stream that all of a rank's work runs on, and the FFN on the same device.
//!
//! Whatever libtorch computes (prompts, and everything that our kernels are not made for) runs on [`Gpu::stream`],
//! because the engine's thread holds a guard for it: one stream, so nothing needs to be ordered by hand.
use afd_common::config::device::DeviceChoice;
use afd_ffi::cuda::{CudaError, StreamGuard};
use afd_gpu::{Device, GpuError, Stream};

mod local_ffn;

pub use local_ffn::LocalFfn;

/// A GPU and the stream that the engine's thread uses.
pub struct Gpu {
    device: Device,
    stream: Stream,
}

impl Gpu {
    /// Opens the device that was asked for; `None` for the CPU. [`DeviceChoice::load`] comes first.
    ///
    /// # Errors
    /// [`GpuError`] when the driver refuses.
    pub fn open(choice: DeviceChoice) -> Result<Option<Self>, GpuError> {
        let DeviceChoice::Cuda(ordinal) = choice else { return Ok(None) };
        let device = Device::open(ordinal)?;
        Ok(Some(Self { stream: device.stream()?, device }))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where everything runs.
    pub fn stream(&self) -> &Stream {
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

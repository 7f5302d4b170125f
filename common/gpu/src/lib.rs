//! CUDA without libtorch, behind safe faces: a [`Device`] with its streams, memory and captured graphs, kernels that are
//! compiled at run time for the device at hand, the operations they make up ([`ops`]), and channels between GPUs that a
//! stream drives ([`channel`]).
//!
//! Nothing here knows requests or layers' names. Nothing needs a GPU or a CUDA installation to build: the driver, NVRTC
//! and NCCL are looked up when they are first asked for, and asking without them is a [`GpuError`].
//!
//! # Who keeps memory alive
//! Work on a stream outlives the call that enqueued it. A [`Region`] owns its memory together with its clones; freeing
//! waits for the device; and a captured [`Graph`] keeps every region that its kernels were given.
//!
//! Every unsafe block says which rule it relies on and who keeps it.
// Kernels take raw addresses: their operations are the safe face, and check lengths against shapes first.

mod anchor;
pub mod channel;
mod device;
mod error;
mod graph;
mod kernels;
mod launch;
mod memory;
pub mod nccl;
pub mod ops;
pub mod random;
pub mod reference;
mod staging;
mod tensor_map;

pub use anchor::Anchor;
pub use device::{Completion, Device, Stream};
pub use error::GpuError;
pub use graph::Graph;
pub use kernels::{Kernel, Module, Source};
pub use launch::Launch;
pub use memory::{Element, HostWords, Region};
pub use staging::Staging;
pub use tensor_map::{MapShape, TensorMap};

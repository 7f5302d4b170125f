//! The one place with unsafe code, behind safe faces: checkpoint files mapped into memory ([`MappedFile`]), the memory
//! of a tensor as a slice ([`memory`]), loops for few rows on the CPU ([`cpu_attention`], [`cpu_rows`], [`cpu_linear`],
//! [`cpu_heads`], [`cpu_mlp`]) and the threads that share them ([`Crew`]), where threads may run ([`cpus`]), libtorch on a
//! GPU ([`cuda`]), control over this process ([`process`]), memory shared between processes ([`shm`]) with the sleep that
//! goes with it ([`futex`]), sockets that are read without waiting ([`socket`]), the checksums of what goes through both
//! ([`crc`], [`sum64`]), and a count of [`allocations`] for tests.
//!
//! Nothing here knows models, links or requests. Every unsafe block says which rule it relies on and who keeps it.

pub mod allocations;
pub mod cpu_attention;
pub mod cpu_heads;
pub mod cpu_linear;
pub mod cpu_mlp;
mod cpu_products;
pub mod cpu_rows;
pub mod cpus;
pub mod crc;
mod crew;
pub mod cuda;
mod exp;
pub mod futex;
mod mapped;
pub mod memory;
pub mod process;
pub mod shm;
mod simd;
pub mod socket;
pub mod sum64;
mod views;
mod zeroed;

pub use cpu_products::multiplies_bf16;
pub use crew::Crew;
pub use mapped::{MappedFile, Reads};
pub use views::ShapeError;
pub use zeroed::zeroed_for_life;

/// Why foreign memory cannot be used as asked.
#[derive(Debug, thiserror::Error)]
pub enum FfiError {
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: String,
        /// The system's words.
        source: std::io::Error,
    },
    /// The view would reach outside its memory.
    #[error("bytes {begin}..{end} of {len}")]
    OutOfRange {
        /// First byte.
        begin: usize,
        /// One past the last byte.
        end: usize,
        /// Bytes there are.
        len: usize,
    },
    /// The element type needs another alignment; copy instead.
    #[error("address is not a multiple of {align}")]
    Misaligned {
        /// What the element type needs, bytes.
        align: usize,
    },
    /// Only dense, contiguous CPU tensors have memory that can be seen as a slice.
    #[error("tensor {0} cannot be seen as a slice")]
    NotASlice(String),
    /// libtorch refused.
    #[error(transparent)]
    Torch(#[from] tch::TchError),
}

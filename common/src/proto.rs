//! Generated from `proto/afd/v1` by the build script, and the descriptor set for gRPC reflection.
#![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all)]

mod afd {
    pub mod v1 {
        tonic::include_proto!("afd.v1");
    }
}

mod google {
    pub mod rpc {
        tonic::include_proto!("google.rpc");
    }
}

/// Package `afd.v1`.
pub use afd::v1;
/// `google.rpc.Status`, as carried in step reports.
pub use google::rpc::Status as RpcStatus;

/// Encoded `FileDescriptorSet` of everything under `proto/`.
pub const DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Major version of the protocol; must be equal on both sides.
pub const PROTOCOL_MAJOR: u32 = 1;
/// Minor version of the protocol; the lower of both is spoken.
pub const PROTOCOL_MINOR: u32 = 0;

//! Compiles `proto/` into Rust with protox, so that no protoc needs to be installed, and keeps the descriptor set
//! for gRPC reflection.
use std::path::{Path, PathBuf};

use prost::Message;

const PROTOS: [&str; 6] = [
    "afd/v1/inference.proto",
    "afd/v1/control.proto",
    "afd/v1/layer_stage.proto",
    "afd/v1/membership.proto",
    "afd/v1/tensor.proto",
    "afd/v1/topology.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join("../proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let descriptors = protox::compile(PROTOS, [&root])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // Frames are not copied between the stream and the link.
    tonic_prost_build::configure()
        .bytes(".afd.v1.StreamStagesRequest.frame")
        .bytes(".afd.v1.StreamStagesResponse.frame")
        .compile_fds(descriptors)?;
    // Unit tests of this crate run against libtorch without LD_LIBRARY_PATH.
    let torch = std::env::var("DEP_TCH_LIBTORCH_LIB")?;
    println!("cargo:rustc-link-arg=-Wl,-rpath,{torch}");
    Ok(())
}

//! Lets this crate's binaries and tests find libtorch without LD_LIBRARY_PATH.
fn main() {
    let torch = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("set by torch-sys, a dependency of this crate");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{torch}");
    println!("cargo:rerun-if-changed=build.rs");
}

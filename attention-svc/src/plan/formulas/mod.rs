//! The arithmetic: one small function a formula, numbers in, a number out, everything in SI units. Nothing here knows a
//! profile, a model file or a layout; [`evaluate`](super::evaluate) puts them together.
//!
//! Sources are named by number: MegaScale-Infer (arXiv 2504.02263), Step-3 (2507.19427), "Revealing the Challenges"
//! (2602.09721), StepMesh. Formulas without one follow from counting bytes and operations.
pub mod attention;
pub mod exchange;
pub mod ffn;
pub mod memory;
pub mod pipeline;
pub mod routing;

/// Time of work that needs `flop` operations and `bytes` of memory traffic, s: the slower of the two (the roofline).
/// `rate` in operations/s, `bandwidth` in B/s.
pub fn roofline_s(flop: f64, rate: f64, bytes: f64, bandwidth: f64) -> f64 {
    (flop / rate).max(bytes / bandwidth)
}

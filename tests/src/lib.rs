//! What the tests of every kind share: [`oracle`] (the one place that decides "same tokens"), [`monolith`] (both halves
//! of a model in one loop, which the oracle trusts), [`fixtures`] (tiny checkpoints and what they must give), and
//! [`harness`] (real processes on loopback).
pub mod fixtures;
pub mod harness;
pub mod monolith;
pub mod oracle;

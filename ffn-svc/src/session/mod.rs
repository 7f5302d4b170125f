//! The FFN role's control plane: who has joined, what was agreed, which links and plans a session has.
//!
//! In reading order: [`handshake`] (what must agree), [`registry`] (who is who), [`plans`] (what is announced), all pure;
//! [`sessions`], `links` and `stream_links` (with [`ipc_wire`]), where they meet the clock and the engine; `steps` (one
//! session's stream), `trace` (spans of recorded steps) and [`control`] (the gRPC face); `status` (refusals as gRPC statuses);
//! [`in_process`], for an attention rank that needs none of it. No tensor passes through here.
pub mod control;
pub mod handshake;
pub mod in_process;
pub mod ipc_wire;
mod links;
pub mod plans;
pub mod registry;
pub mod sessions;
pub(crate) mod status;
mod steps;
mod stream_links;
mod trace;

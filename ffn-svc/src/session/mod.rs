//! The FFN role's control plane: who has joined, what was agreed, which links and plans a session has.
pub mod handshake;
pub mod plans;
pub mod registry;

//! What both roles share.
//!
//! In reading order: [`ids`] (the words of a hop), [`proto`] (the control plane's messages) and
//! [`spelling`] (what people read of them), [`config`] (what a
//! checkpoint says), [`weights`] (its tensors, mapped), [`layers`] (what both roles compute), [`placement`] and [`routing`]
//! (who serves which experts, and who chooses them), [`frame`] and [`link`] (how rows travel), [`lease`] (when a silent
//! peer is lost), [`net`] (the one listening port), [`process`] (how both binaries start and end), [`telemetry`] (logs
//! and metrics). Nothing here owns a request, a scheduler or an engine.
#![warn(missing_docs)]

pub mod config;
pub mod frame;
pub mod identity;
pub mod ids;
pub mod layers;
pub mod lease;
pub mod link;
pub mod net;
pub mod placement;
pub mod process;
pub mod proto;
pub mod routing;
pub mod spelling;
pub mod telemetry;
pub mod weights;

//! The FFN role. A hop's path, in reading order:
//!
//! [`service`] and [`session`] (join, links, plans) → [`hop_queue`] (keyed by layer) → [`engine`] (one OS thread, owns
//! the device) → [`model`] (router → experts, or dense; [`device`] on a GPU) → back over the link. [`serve`] puts them
//! together. It holds no request state: no scheduler, no KV cache, no sampling.
pub mod announce;
pub mod config;
pub mod device;
pub mod engine;
pub mod hop_queue;
pub mod model;
pub mod place;
pub mod probe;
pub mod rank;
pub mod serve;
pub mod service;
pub mod session;

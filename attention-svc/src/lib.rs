//! The attention role. A token's path, in reading order:
//!
//! `api` (HTTP and gRPC, one port) → `text` (tokenizer, chat template) → [`request`] → `scheduler` → `kv_cache` →
//! `engine` (one OS thread, owns the device) → [`model`] (attention of every layer) → `remote_ffn` ⇢ the FFN role ⇢
//! `sampler` → `text` (detokenizer) → `api`.
pub mod api;
pub mod bench;
pub mod cli;
pub mod config;
pub mod device;
pub mod doctor;
pub mod engine;
pub mod kv_cache;
pub mod membership;
pub mod model;
pub mod plan;
pub mod probe;
pub mod profile;
pub mod remote_ffn;
pub mod request;
pub mod sampler;
pub mod scheduler;
pub mod serve;
pub mod served;
pub mod text;

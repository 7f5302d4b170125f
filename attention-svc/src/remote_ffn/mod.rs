//! The way to the FFN role, without a parameter of its own.
//!
//! On a token's path: the engine dispatches a layer's rows ([`port`]), they are kept ([`kept`]), shared out over the shards
//! ([`routes`]) and their parts tracked ([`hop_table`]) until every partial sum is back. Beside it, in tokio: [`directory`]
//! finds the ranks behind `--ffn` and says how they stand ([`standing`], [`peer`]), one [`control`] task per rank joins
//! ([`joining`], [`roster`]), opens links and sends plans ([`talk`]; [`announce`] says which) while the rank keeps its
//! [lease](afd_common::lease); [`session`] is what these phases share. [`edge`] and [`life`] are what both sides say to each
//! other, [`settings`] what the port is told. Between GPUs a stream drives the links ([`stream_joining`], [`stream_edge`])
//! and whole steps are enqueued ([`streams`]). [`rehearsal`] warms ranks up that come late ([`warm_up`]). [`local`] puts the
//! FFN into this process instead (`--ffn local`), and [`connect`] puts the parts together.
pub mod announce;
pub mod clock;
pub mod connect;
pub mod control;
pub mod directory;
pub mod edge;
pub mod edges;
pub mod hop_table;
mod joining;
pub mod kept;
pub mod life;
pub mod local;
pub mod outstanding;
pub mod peer;
pub mod port;
pub mod recorder;
pub mod rehearsal;
pub mod roster;
pub mod routes;
pub mod session;
pub mod settings;
pub mod standing;
pub mod stats;
pub mod stream_edge;
pub mod stream_joining;
mod stream_times;
pub mod streams;
mod talk;
pub mod warm_up;

//! `attention-svc plan`: how many attention and FFN ranks, how many stages, or "don't".
//!
//! Not on a token's path. Pure modules: no async, no tensors, no clock. In reading order: `units` (how quantities are
//! written), [`shape`] and [`config_reader`] (the model), [`profile`] (the device), [`case`] (what is asked), [`formulas`]
//! (the arithmetic), [`stage`] and [`evaluate`] (one layout), [`search`] (all of them), [`verdict`] (the sentence),
//! [`sweep`], [`calibrate`] (measured instead of believed), [`report`] (table, JSON, SVG), [`cli`].
//!
//! # Symbols
//! | symbol | meaning | unit |
//! |---|---|---|
//! | `L`, `L_moe`, `h` | layers, those with a mixture, width | |
//! | `E`, `k`, `d`, `n_s` | experts, per token, their intermediate size, shared ones | |
//! | `S`, `kv` | context; cached bytes per token and layer | tokens; B |
//! | `n_A`, `n_F`, `R` | attention ranks, FFN ranks, colocated ranks; one rank is one device | |
//! | `b`, `m`, `x = b/m`, `X = n_A · x` | sequences per rank, stages, rows per rank and stage, rows of the pool | |
//! | `P`, `BW`, `W`, `α` | matrix rate, memory bandwidth, link bandwidth one way, link latency | op/s, B/s, B/s, s |
//! | `T_A`, `T_F`, `T_C` | one stage of one layer: attention, FFN, one direction of the exchange | s |
//!
//! # Where this differs from the papers it draws on
//! - *The link is a server too.* The usual cycle `max(m·T_A, m·T_F, T_A + T_F + 2T_C)` lets enough stages hide any
//!   exchange. Latency can be hidden, occupancy cannot: `m · (bytes / W)` bounds the cycle as well. Without it the dead
//!   zone would vanish with four stages.
//! - *Fill.* `(T_A + T_F + 2T_C) + T_f·(m·L − 1)` and its published upper bound `m·T_f·L` cannot both hold (the first is
//!   larger by `T_A + T_F + 2T_C − T_f`). The first is one step alone, the second a step among many. A step here is `L`
//!   cycles, as of many; what it would take longer alone is reported beside it (`fill_ms`).
//! - *Ranks that do not divide the experts* are counted by the fullest rank (`⌈E/n_F⌉`), not by the mean.
//! - *The head* is read once a step and counted.
//! - *Parallel attention within a sequence* (tensor, context) is not planned: an attention rank is one device.
//! - *The calibrated fits* for published tables: `tests` here say how far each cell is off.
pub mod calibrate;
pub mod calibration;
pub mod case;
pub mod cli;
pub mod config_reader;
pub mod evaluate;
pub mod figure;
pub mod formulas;
pub mod layout;
pub mod outcome;
pub mod profile;
pub mod report;
pub mod search;
pub mod shape;
pub mod stage;
pub mod sweep;
#[cfg(test)]
mod tests;
pub mod units;
pub mod verdict;

//! Real processes on loopback. One sentence each.
mod loss;
mod pair;
mod start;

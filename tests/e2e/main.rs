//! Real processes on loopback. One sentence each.
mod hash_routing;
mod loss;
mod pair;
mod start;

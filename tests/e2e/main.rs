//! Real processes on loopback. One sentence each.
mod bad_input;
mod experts;
mod hash_routing;
mod loss;
mod pair;
mod stages;
mod standing;
mod start;
mod streams;

//! Real processes on loopback. One sentence each.
mod bad_input;
mod doctor;
mod experts;
mod hash_routing;
mod loss;
mod measured;
mod pair;
mod stages;
mod standing;
mod start;
mod streams;
mod tokenizing;

//! Real processes on loopback. One sentence each.
mod bad_input;
mod convoy;
mod doctor;
mod experts;
mod hash_routing;
mod kills;
mod loss;
mod measured;
mod network;
mod pair;
mod scale;
mod stages;
mod standing;
mod start;
mod story;
mod streams;
mod tokenizing;

//! A whole FFN rank as its peers see it: a real server on a free port, a tiny checkpoint, real links.
mod life;
mod parity;
mod process;
mod refusals;
mod support;

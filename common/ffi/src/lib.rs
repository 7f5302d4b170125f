//! Unsafe code lives here.

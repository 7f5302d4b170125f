//! Role.

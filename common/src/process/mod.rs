//! What both binaries do alike as processes: how they [end](exit), what tells them to ([stop]), where they say that they
//! can be [reached](address_file), and the files that their commands [write](out_file) at their end.
pub mod address_file;
pub mod exit;
pub mod out_file;
pub mod stop;

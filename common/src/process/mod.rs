//! What both binaries do alike as processes: how they [end](exit), what tells them to ([stop]), and where they say that
//! they can be [reached](address_file).
pub mod address_file;
pub mod exit;
pub mod stop;

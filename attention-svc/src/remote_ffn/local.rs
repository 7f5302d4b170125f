//! Placeholder until the FFN engine lands.

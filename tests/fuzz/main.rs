//! What comes from outside, made wrong in every way a [driver] finds: frames, plans, bodies of requests, safetensors
//! headers, configurations, chat templates. Nothing may panic, run away, or be taken for what it is not.
mod checkpoint;
mod driver;
mod protocol;
mod requests;
mod template;

//! The API around an engine without a model: what clients see, on both faces.
mod bad_input;
mod fake;
mod grpc;
mod lifecycle;
mod openai;

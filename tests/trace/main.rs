//! What is seen of the services from outside: traces, in a collector of the test's own and in a real Jaeger, and metrics.
mod collector;
mod jaeger;
mod metrics;
mod outage;
mod real;
mod requests;
mod tree;

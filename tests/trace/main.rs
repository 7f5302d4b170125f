//! What is seen of requests from outside: traces over both services, in a collector of the test's own and in a real Jaeger.
mod collector;
mod jaeger;
mod outage;
mod real;
mod requests;
mod tree;

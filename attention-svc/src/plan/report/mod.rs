//! What people and programs see of a plan.
mod json;
mod svg;
mod table;

pub use json::{Plan, PlanError, Request};
pub use svg::picture;
pub use table::{sweep_table, table};

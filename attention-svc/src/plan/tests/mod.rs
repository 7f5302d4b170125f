//! What the planner must get right: published tables, measured floors, and properties that hold whatever the numbers.
mod acceptance;
mod properties;

//! Number formats and counter-based random numbers, in plain Rust.

mod dtype;

pub use dtype::DType;

//! Number formats and counter-based random numbers, in plain Rust.

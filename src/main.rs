//! The `moe8` program.
fn main() {}

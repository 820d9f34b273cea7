//! The kernels' own test, as the program runs it on the adapter at hand: [`gemm()`] compares every matrix kernel that the
//! adapter can run with the f64 product over a table of ragged cases, [`time()`] measures them.

mod data;
mod gemm;
mod time;

pub use gemm::{Outcome, gemm};
pub use time::{Timing, time};

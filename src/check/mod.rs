//! The kernels' own test, as the program runs it on the adapter at hand: [`gemm()`] compares every matrix kernel that the
//! adapter can run with the f64 product over a table of ragged cases, [`attention()`] does so for attention and its gradients,
//! [`time()`] measures products, [`tune()`] finds the fastest kernel of each class of them.

mod attention;
mod data;
mod gemm;
mod time;
mod tune;

pub use attention::attention;
pub use gemm::{Outcome, gemm};
pub use time::{Timing, time};
pub use tune::{Trial, tune};

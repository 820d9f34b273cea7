//! Measurements that can be believed: results checked first, random data, a warm device, and the clock named.
//!
//! A [`runner::Case`] is one op at one shape. The [`runner::Runner`] runs it once, compares sampled results with f64 on the host
//! ([`check`]), and only then measures: warm-up, then the median of repetitions that are each long enough for the clock.
//! A wrong result is a row that says so, without a time.

pub mod activations;
pub mod attention;
pub mod check;
pub mod data;
pub mod fused;
pub mod gemm;
pub mod memory;
pub mod moe;
pub mod profile;
pub mod recorded;
pub mod results;
pub mod row;
pub mod runner;
pub mod step;
pub mod suite;
pub mod tables;

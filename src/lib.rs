//! `moe8` trains Mixture-of-Experts models in emulated FP8 (e4m3, row-wise scales) on any adapter
//! that wgpu can open.
//!
//! Shape letters used everywhere: B batch, S sequence, T = B*S tokens, D model width, H heads,
//! F hidden width, E experts, K top-k (in a GEMM: the contraction), R = T*K routed rows,
//! V vocabulary; `d_x` is the gradient of `x`.
//!
//! The modules form layers; each may name only those above it in this list (a test holds this).

#![deny(missing_docs)]

pub mod error;
pub mod config;
pub mod num;
pub mod reference;
pub mod gpu;
pub mod tensor;
pub mod ops;
pub mod params;
pub mod comm;
pub mod autograd;
pub mod optim;
pub mod parallel;
pub mod nn;
pub mod train;
pub mod cli;

pub use error::{Error, Result};

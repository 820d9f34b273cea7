//! `moe8` trains Mixture-of-Experts models in emulated FP8 (e4m3, row-wise scales) on any adapter
//! that wgpu can open. README.md says what for; this page is a tour of the code.
//!
//! Shape letters used everywhere: B batch, S sequence, T = B*S tokens, D model width, H heads,
//! F hidden width, E experts, K top-k (in a GEMM: the contraction), R = T*K routed rows,
//! V vocabulary; `d_x` is the gradient of `x`.
//!
//! The heart is one op, a grouped GEMM on fp8 codes: rows in groups of any size, a weight matrix for each.
//!
//! ```
//! use moe8::gpu::{DeviceChoice, Gpu};
//! use moe8::num::DType;
//! use moe8::ops::fp8_linear::{self, Recipe};
//! use moe8::tensor::Tensor;
//!
//! let gpu = Gpu::open(&DeviceChoice::from_env())?;
//! let x = Tensor::from_f32(&gpu, "x", &[5, 8], DType::BF16, &[1.0; 5 * 8])?;
//! let w = Tensor::from_f32(&gpu, "w", &[3, 2, 8], DType::BF16, &[0.5; 3 * 2 * 8])?;
//! let ends = Tensor::from_u32(&gpu, "ends", &[2, 2, 5])?; // three groups, the second one empty
//! let y = fp8_linear::forward(&gpu, &x, &w, Some(&ends), Recipe::Rowwise)?;
//! assert_eq!(y.to_f32(&gpu)?, [4.0; 5 * 2]);
//! # Ok::<(), moe8::Error>(())
//! ```
//!
//! # A tour, from below
//!
//! The modules form layers: each may name only those before it in this list (a test holds it).
//!
//! - [`error`]: what a user can cause, with a hint. [`atomic`]: files that exist whole or not at all. [`config`]: one table
//!   of keys, torchtitan's.
//! - [`num`]: fp8 and bf16 as integer logic, scales, counter-based random numbers. [`reference`](mod@reference): every op as a plain
//!   loop, which judges the kernels. Neither knows of a GPU.
//! - [`gpu`]: adapters, memory, kernels, and the recorder: work is recorded, and runs at a flush. Only this module names wgpu.
//!   [`tensor`]: a shape and a dtype over memory, in rows of four-element *quads*.
//! - [`ops`]: forward and backward of every op as two functions that record work. Begin with [`ops::quantize`],
//!   [`ops::fp8_linear`] and [`ops::dispatch`].
//! - [`params`](mod@params): the table of a model's parameters, and where each rank's shard of each lies. [`comm`]: ranks behind one trait.
//! - [`autograd`]: a tape that calls ops and differentiates them by one table of rules.
//! - [`optim`]: AdamW and the learning-rate schedule. [`parallel`]: FSDP, with its hooks around the all-gather.
//! - [`nn`]: Llama 4 and the conversion of its linears and experts to fp8.
//! - [`train`]: one step ([`train::trainer`]) and a run ([`train::run`]), data, tokenizers, weight files, metrics.
//! - [`mod@bench`]: measured kernels and steps. [`check`]: the kernels' own test on the adapter at hand. [`cli`]: the program.
//!
//! The six programs in `examples/` walk the same way: a kernel, quantization, the grouped GEMM, an MoE layer, training, two
//! ranks. How tensors lie in memory, what a kernel is, and how a step runs is in ARCHITECTURE.md.

#![deny(missing_docs)]

pub mod error;
pub mod atomic;
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
pub mod bench;
pub mod check;
pub mod cli;

pub use error::{Error, Result};

/// The README's Rust is compiled and run with the documentation's examples.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

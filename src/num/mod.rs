//! Number formats and counter-based random numbers, in plain Rust.
//!
//! The fp8 rules are those of torchao (row-wise recipe, commit `36027d82d`) and of PyTorch's `c10`
//! conversions, written as integer logic so that a shader can follow them step by step.

pub mod bf16;
mod dtype;
pub mod e4m3;
pub mod e5m2;
pub mod formula;
mod fp8;
pub mod normal;
pub mod rng;
pub mod scale;

pub use dtype::DType;
pub use fp8::Fp8;

/// `m` shifted right by `shift` (1..=31) bits, rounded to nearest, ties to even. `m` must be below 2^24.
const fn shift_round_even(m: u32, shift: u32) -> u32 {
    let half = 1 << (shift - 1);
    (m + half - 1 + ((m >> shift) & 1)) >> shift
}

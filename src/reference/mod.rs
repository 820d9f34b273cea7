//! The oracles: each op as a plain function over slices, no GPU.
//!
//! Tensors are row-major and unpadded. Every function reads its inputs into f64, computes there in the order
//! of the loops as written, and rounds once at the end to the type of its inputs ([`Real`]): over f32 it
//! judges a kernel, over f64 finite differences judge it. Forward and backward stand side by side in one file
//! per op.

pub mod adamw;
pub mod attention;
pub mod clip;
pub mod compare;
pub mod cross_entropy;
pub mod dispatch;
pub mod elementwise;
pub mod embedding;
pub mod expert_bias;
pub mod fp8_linear;
pub mod gemm;
pub mod quantize;
pub mod rmsnorm;
pub mod rope;
pub mod router;
pub mod swiglu;

/// A float that the oracles take and give: f32 or f64.
pub trait Real: Copy + PartialOrd + std::fmt::Debug {
    /// The value in f64, exact.
    fn wide(self) -> f64;
    /// `x` rounded to this type.
    fn narrow(x: f64) -> Self;
}

impl Real for f32 {
    fn wide(self) -> f64 {
        self as f64
    }
    fn narrow(x: f64) -> Self {
        x as f32
    }
}

impl Real for f64 {
    fn wide(self) -> f64 {
        self
    }
    fn narrow(x: f64) -> Self {
        x
    }
}

/// Every element in f64.
pub fn widen<T: Real>(x: &[T]) -> Vec<f64> {
    x.iter().map(|v| v.wide()).collect()
}

/// Every element rounded to `T`.
pub fn narrow<T: Real>(x: &[f64]) -> Vec<T> {
    x.iter().map(|&v| T::narrow(v)).collect()
}

//! Forward and backward of each op as plain functions that record GPU work.
//!
//! An op checks shapes (a breach is a panic with both shapes: callers are ours), allocates its result, and records
//! its dispatches. It never waits for the device and never reads back.

pub mod adamw;
pub mod attention;
mod attention_coop;
pub mod clip;
pub mod cross_entropy;
pub mod dispatch;
pub mod elementwise;
pub mod embedding;
pub mod expert_bias;
pub mod fp8_linear;
pub mod gemm;
mod gemm_coop;
pub(crate) mod panels;
pub mod quantize;
mod quantize_wide;
pub mod rmsnorm;
pub mod rope;
pub mod router;
pub mod swiglu;

use crate::gpu::{Kernel, Variant};

/// Every kernel in every variant that the ops can ask for, for validation without a GPU.
pub fn kernels() -> Vec<(Kernel, Variant)> {
    [
        adamw::kernels(),
        attention::kernels(),
        attention_coop::kernels(),
        clip::kernels(),
        cross_entropy::kernels(),
        dispatch::kernels(),
        elementwise::kernels(),
        embedding::kernels(),
        expert_bias::kernels(),
        gemm::kernels(),
        gemm_coop::kernels(),
        panels::kernels(),
        quantize::kernels(),
        quantize_wide::kernels(),
        rmsnorm::kernels(),
        rope::kernels(),
        router::kernels(),
        swiglu::kernels(),
    ]
    .concat()
}

//! In what dtypes parameters and gradients are gathered, reduced and kept, and when gathered ones go.

use crate::num::DType;

/// torch's `MixedPrecisionPolicy`, and when gathered weights go.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Compute and all-gather dtype: f32 or bf16.
    pub param_dtype: DType,
    /// Dtype of gradients on the wire.
    pub reduce_dtype: DType,
    /// Free gathered weights between forward and backward, but for the last block's.
    pub reshard: bool,
    /// Whether a step adds up the gradients of several forward passes.
    pub accumulates: bool,
    /// Whether a parameter is wrapped: its grouped GEMM runs in fp8.
    pub wrapped: Vec<bool>,
}

impl Policy {
    /// The dtype that gradients are kept in. What one rank computes in one pass is the gradient, of which f32 would hold the same
    /// values; what is reduced or added up is f32.
    pub fn gradient_dtype(&self, ranks: usize) -> DType {
        if ranks == 1 && !self.accumulates { self.param_dtype } else { DType::F32 }
    }

    /// Whether whole parameters stay on the device in bf16 from step to step, so that the optimizer, which has each new weight at
    /// hand, may write them too: where one rank holds all of a parameter and nothing is freed.
    pub fn keeps_low(&self, ranks: usize) -> bool {
        ranks == 1 && self.param_dtype == DType::BF16 && !self.reshard
    }
}

//! Load balancing without an auxiliary loss: the bias that the router adds when it chooses.
//!
//! Definition: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024), in torchtitan's
//! form (July 2025), which takes out the mean of the change.
//! Tolerance: three f32 roundings, 2^-22 of `coeff` plus 2^-24 of the bias.

use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::tensor::Tensor;

crate::params! {
    struct ExpertBias {
        experts: u32,
        coeff: f32,
    }
}

const TEXT: &str = include_str!("../../shaders/expert_bias.wgsl");
const UPDATE: Kernel = Kernel { name: "expert_bias.update", text: TEXT, entry: "update" };
const ACCUMULATE: Kernel = Kernel { name: "expert_bias.accumulate", text: TEXT, entry: "accumulate" };

/// `bias += delta - mean(delta)` in place, `delta = coeff * sign(mean(counts) - counts)`. `bias` is flat f32 `[E]`,
/// `counts` flat u32 `[E]`, their sum below 2^32; the counts stay as they are.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn update(gpu: &Gpu, bias: &Tensor, counts: &Tensor, coeff: f32) -> Result<()> {
    launch(gpu, &UPDATE, bias, counts, coeff)
}

/// `total += counts` in place, both flat u32 `[E]`.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn accumulate(gpu: &Gpu, total: &Tensor, counts: &Tensor) -> Result<()> {
    launch(gpu, &ACCUMULATE, total, counts, 0.0)
}

#[track_caller]
fn launch(gpu: &Gpu, kernel: &Kernel, out: &Tensor, counts: &Tensor, coeff: f32) -> Result<()> {
    assert_eq!(out.shape(), counts.shape(), "{}: experts", kernel.name);
    let params = ExpertBias { experts: counts.numel() as u32, coeff };
    let bindings = [counts.read(), out.write()];
    gpu.dispatch(kernel, &variant(kernel), &params, &bindings, params.experts.div_ceil(64))
}

fn variant(kernel: &Kernel) -> Variant {
    let is = |k: &Kernel| u32::from(k.entry == kernel.entry);
    Variant::new().constant("UPDATE", is(&UPDATE)).constant("ACCUMULATE", is(&ACCUMULATE))
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    [UPDATE, ACCUMULATE].into_iter().map(|k| (k, variant(&k))).collect()
}

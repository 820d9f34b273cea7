//! SwiGLU: `h = silu(gate) * up`, the gated activation between the two halves of a feed-forward layer.
//!
//! Definition: Shazeer, "GLU Variants Improve Transformer" (2020); rounding as PyTorch 2.8 does it in eager mode, which
//! runs `silu` and the product as two ops: in bf16 `silu(gate)`, and in backward `d_h * up`, are rounded in between.
//! Tolerance against the reference: a few f32 roundings and the adapter's `exp` (WGSL allows `3 + 2 |x|` units in the
//! last place), 1e-5 of each value; in bf16 one unit in the last place of each rounding.

use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::ops::quantize::{Ready, Wish};
use crate::ops::quantize_rows::{self, Source};
use crate::tensor::Tensor;

crate::params! {
    struct Swiglu { quads: u32 }
}

const TEXT: &str =
    concat!(include_str!("../../shaders/lib/silu.wgsl"), include_str!("../../shaders/swiglu.wgsl"));
const FORWARD: Kernel = Kernel { name: "swiglu.forward", text: TEXT, entry: "forward" };
const BACKWARD: Kernel = Kernel { name: "swiglu.backward", text: TEXT, entry: "backward" };

/// Threads of a workgroup, and quads that each takes.
fn shape(software: bool) -> (usize, usize) {
    if software { (64, 1) } else { (256, 4) }
}

/// `h = silu(gate) * up`, all of one shape and dtype (f32 or bf16).
///
/// # Errors
/// The result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn forward(gpu: &Gpu, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    forward_for(gpu, gate, up, None).map(|(h, _)| h)
}

/// [`forward`], and what its readers wish of h's quantization, where one kernel can do both.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub(crate) fn forward_for(
    gpu: &Gpu,
    gate: &Tensor,
    up: &Tensor,
    wish: Option<Wish<'_>>,
) -> Result<(Tensor, Ready)> {
    same(gate, up);
    let h = Tensor::empty(gpu, "swiglu h", gate.shape(), gate.dtype())?;
    if let Some(ready) = quantize_rows::make(gpu, Source::Gated { gate, up }, &h, wish)? {
        return Ok((h, ready));
    }
    let (variant, params, groups) = launch(gate, gpu.caps().software);
    gpu.dispatch(&FORWARD, &variant, &params, &[gate.read(), up.read(), h.write()], groups)?;
    Ok((h, Ready::default()))
}

/// `(d_gate, d_up)` of [`forward`], from the gradient of `h`: [stacked](Tensor::stacked), if they can be.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward(gpu: &Gpu, d_h: &Tensor, gate: &Tensor, up: &Tensor) -> Result<(Tensor, Tensor)> {
    same(gate, up);
    same(gate, d_h);
    let [d_gate, d_up] = Tensor::empty_stack(gpu, "swiglu d_gate and d_up", gate.shape(), gate.dtype())?;
    let (variant, params, groups) = launch(gate, gpu.caps().software);
    let bindings = [gate.read(), up.read(), d_h.read(), d_gate.write(), d_up.write()];
    gpu.dispatch(&BACKWARD, &variant, &params, &bindings, groups)?;
    Ok((d_gate, d_up))
}

#[track_caller]
fn same(a: &Tensor, b: &Tensor) {
    let kind = |t: &Tensor| (t.rows(), t.cols(), t.dtype());
    assert_eq!(kind(a), kind(b), "swiglu: rows, columns and dtype of gate, of up or d_h");
}

fn variant(dtype: DType, software: bool) -> Variant {
    let (workgroup, each) = shape(software);
    Variant::new().constant("WG", workgroup as u32).constant("EACH", each as u32).quad("X", dtype)
}

fn launch(x: &Tensor, software: bool) -> (Variant, Swiglu, u32) {
    let (workgroup, each) = shape(software);
    let quads = x.rows() * x.quads();
    let groups = quads.div_ceil(workgroup * each) as u32;
    (variant(x.dtype(), software), Swiglu { quads: quads as u32 }, groups)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for kernel in [FORWARD, BACKWARD] {
        for dtype in [DType::F32, DType::BF16] {
            all.extend([false, true].map(|software| (kernel, variant(dtype, software))));
        }
    }
    all
}

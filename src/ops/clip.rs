//! The global gradient norm and the factor that clips it.
//!
//! Definition: `torch.nn.utils.clip_grad_norm_` (PyTorch 2.8), 2-norm.
//! Tolerance: the tree's error is at most `(ceil(log2 n) + 2) * 2^-24` relative for terms of one sign; the root and the
//! quotient add WGSL's 2.5 ulp each.

use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Sum {
        count: u32,
        stride: u32,
        threads: u32,
        out_at: u32,
        factor: f32,
    }
}

crate::params! {
    struct Clip {
        max_norm: f32,
    }
}

const TEXT: &str = include_str!("../../shaders/clip.wgsl");
const SUM: Kernel = Kernel { name: "clip.sum", text: TEXT, entry: "sum" };
const COEFFICIENT: Kernel = Kernel { name: "clip.main", text: TEXT, entry: "main" };

/// Quads that one thread adds.
const QUADS: usize = 16;
/// Stride of the loads in large inputs, and the number of quads from which an input is large.
const STRIDE: usize = 64;
const LARGE: usize = 4096;

/// The sum of the squares of all elements of all `parts` (f32, flat or of quads, or bf16 in whole quads), as flat `[1]`.
///
/// The order of the additions depends on the parts' lengths only, not on where they lie or on their dtype.
///
/// # Errors
/// Over the adapter's limits, or what the device reported.
#[track_caller]
pub fn sum_squares(gpu: &Gpu, parts: &[&Tensor]) -> Result<Tensor> {
    total(gpu, parts, true, 1.0)
}

/// The norm of which `sum_squares` is the square, and `min(1, max_norm / (norm + 1e-6))`; all flat `[1]`.
///
/// A NaN norm gives a NaN factor.
///
/// # Errors
/// As [`sum_squares`].
#[track_caller]
pub fn norm_and_coefficient(gpu: &Gpu, sum_squares: &Tensor, max_norm: f32) -> Result<(Tensor, Tensor)> {
    assert_eq!(sum_squares.shape(), [1], "clip: one sum of squares");
    let norm = Tensor::flat(gpu, "gradient norm", 1, DType::F32)?;
    let coefficient = Tensor::flat(gpu, "clip factor", 1, DType::F32)?;
    let bindings = [sum_squares.read(), norm.write(), coefficient.write()];
    gpu.dispatch(&COEFFICIENT, &variant([0, 0, 1]), &Clip { max_norm }, &bindings, 1)?;
    Ok((norm, coefficient))
}

/// `factor` times the sum of all elements of all `parts`, or of their squares.
#[track_caller]
pub(super) fn total(gpu: &Gpu, parts: &[&Tensor], square: bool, factor: f32) -> Result<Tensor> {
    assert!(!parts.is_empty(), "sum over no tensor");
    let mut left = partial_sums(gpu, parts, square, factor)?;
    while left.numel() > 1 {
        left = partial_sums(gpu, &[&left], false, factor)?;
    }
    Ok(left)
}

/// One level of the tree: the partial sums of all parts, one after another. `factor` only where one is left.
#[track_caller]
fn partial_sums(gpu: &Gpu, parts: &[&Tensor], square: bool, factor: f32) -> Result<Tensor> {
    let threads: usize = parts.iter().map(|t| plan(t).2).sum();
    let out = Tensor::flat(gpu, "partial sums", threads, DType::F32)?;
    let mut out_at = 0;
    for t in parts {
        let known = match t.dtype() {
            DType::F32 => true,
            dtype => dtype == DType::BF16 && t.bytes() % dtype.quad_bytes() as u64 == 0,
        };
        assert!(known, "sum over {:?} of {}: f32, or bf16 in whole quads", t.shape(), t.dtype());
        let (count, stride, own) = plan(t);
        let factor = if threads == 1 { factor } else { 1.0 };
        let [count, stride, own] = [count, stride, own].map(|n| u32::try_from(n).expect("below 2^32 values"));
        let params = Sum { count, stride, threads: own, out_at, factor };
        gpu.dispatch(
            &SUM,
            &sum_variant(t.dtype(), square),
            &params,
            &[t.read(), out.write()],
            own.div_ceil(64),
        )?;
        out_at += own;
    }
    Ok(out)
}

/// Values (padding included), stride and threads for one input.
fn plan(t: &Tensor) -> (usize, usize, usize) {
    let count = t.bytes() as usize / t.dtype().size();
    let quads = count.div_ceil(4).max(1);
    let stride = if quads >= LARGE { STRIDE } else { 1 };
    (count, stride, quads.div_ceil(QUADS * stride) * stride)
}

/// The variant with these switches: a sum, of squares, or the clip factor.
fn variant([sum, square, coefficient]: [u32; 3]) -> Variant {
    Variant::new().constant("SUM", sum).constant("SQUARE", square).constant("COEFFICIENT", coefficient)
}

fn sum_variant(x: DType, square: bool) -> Variant {
    variant([1, square.into(), 0]).quad("X", x)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = vec![(COEFFICIENT, variant([0, 0, 1])), (SUM, sum_variant(DType::F32, false))];
    all.extend([DType::F32, DType::BF16].map(|x| (SUM, sum_variant(x, true))));
    all
}

//! Root-mean-square norm of rows: `y = x * rstd * weight`, `rstd = 1 / sqrt(mean(x^2) + eps)`.
//!
//! Definition: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); precision as PyTorch 2.8's `rms_norm`,
//! which computes in f32 and rounds the result once to x's dtype.
//! Tolerance against the reference: f32 sums over a row, `cols * 2^-24` relative to the sum of magnitudes in the worst
//! case and 1e-6 of the largest value in practice, and one rounding to the dtype. `d_weight` sums over rows in f32:
//! `rows * 2^-24` of the sum of magnitudes.

use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Rmsnorm { rows: u32, cols: u32, eps: f32 }
}
crate::params! {
    struct Columns { rows: u32, quads: u32 }
}

const TEXT: &str = include_str!("../../shaders/rmsnorm.wgsl");
const FORWARD: Kernel = Kernel { name: "rmsnorm.forward", text: TEXT, entry: "forward" };
const BACKWARD: Kernel = Kernel { name: "rmsnorm.backward", text: TEXT, entry: "backward" };
const PARTIAL: Kernel = Kernel { name: "rmsnorm.partial", text: TEXT, entry: "partial" };
const TOTAL: Kernel = Kernel { name: "rmsnorm.total", text: TEXT, entry: "total" };

/// Rows that one thread sums for the weight's gradient: the same on every adapter, so that the order is.
const CHUNK: usize = 64;

/// `(y, rstd)`: `y` like `x` (T, D), f32 or bf16; `rstd` flat f32 `[T]` is what [`backward`] needs.
///
/// # Errors
/// The result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn forward(gpu: &Gpu, x: &Tensor, weight: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    assert_eq!(weight.numel(), x.cols(), "rmsnorm: weight {:?} of x {:?}", weight.shape(), x.shape());
    let y = Tensor::empty(gpu, "rmsnorm y", x.shape(), x.dtype())?;
    let rstd = Tensor::flat(gpu, "rmsnorm rstd", x.rows(), DType::F32)?;
    let shape = Threads::new(gpu.caps().software);
    let params = Rmsnorm { rows: x.rows() as u32, cols: x.cols() as u32, eps };
    let bindings = [x.read(), weight.read(), y.write(), rstd.write()];
    let groups = x.rows().div_ceil(shape.rows) as u32;
    gpu.dispatch(&FORWARD, &variant(x.dtype(), weight.dtype(), shape), &params, &bindings, groups)?;
    Ok((y, rstd))
}

/// `(d_x, d_weight)` of [`forward`]; `d_weight` has the weight's shape and dtype.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward(
    gpu: &Gpu,
    d_y: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor)> {
    assert_eq!(weight.numel(), x.cols(), "rmsnorm: weight {:?} of x {:?}", weight.shape(), x.shape());
    assert_eq!((d_y.rows(), d_y.cols()), (x.rows(), x.cols()), "rmsnorm: d_y and x");
    assert_eq!((d_y.dtype(), rstd.numel()), (x.dtype(), x.rows()), "rmsnorm: dtype of d_y, length of rstd");
    let d_x = Tensor::empty(gpu, "rmsnorm d_x", x.shape(), x.dtype())?;
    let shape = Threads::new(gpu.caps().software);
    let params = Rmsnorm { rows: x.rows() as u32, cols: x.cols() as u32, eps: 0.0 };
    let bindings = [x.read(), weight.read(), d_y.read(), rstd.read(), d_x.write()];
    let groups = x.rows().div_ceil(shape.rows) as u32;
    gpu.dispatch(&BACKWARD, &variant(x.dtype(), weight.dtype(), shape), &params, &bindings, groups)?;
    Ok((d_x, weight_gradient(gpu, d_y, x, weight, rstd)?))
}

fn weight_gradient(gpu: &Gpu, d_y: &Tensor, x: &Tensor, weight: &Tensor, rstd: &Tensor) -> Result<Tensor> {
    let shape = Threads::new(gpu.caps().software);
    let variant = variant(x.dtype(), weight.dtype(), shape);
    let chunks = x.rows().div_ceil(CHUNK);
    let quads = x.quads();
    let sums = Tensor::empty(gpu, "rmsnorm partial sums", &[chunks, 4 * quads], DType::F32)?;
    let params = Columns { rows: x.rows() as u32, quads: quads as u32 };
    let groups = (chunks * quads).div_ceil(shape.all()) as u32;
    let bindings = [x.read(), sums.write(), d_y.read(), rstd.read()];
    gpu.dispatch(&PARTIAL, &variant, &params, &bindings, groups)?;
    let d_weight = Tensor::empty(gpu, "rmsnorm d_weight", weight.shape(), weight.dtype())?;
    let params = Columns { rows: chunks as u32, quads: quads as u32 };
    let bindings = [sums.read(), d_weight.write()];
    gpu.dispatch(&TOTAL, &variant, &params, &bindings, quads.div_ceil(shape.all()) as u32)?;
    Ok(d_weight)
}

/// How a workgroup's threads share rows.
#[derive(Clone, Copy)]
struct Threads {
    rows: usize,
    lanes: usize,
}

impl Threads {
    fn new(software: bool) -> Threads {
        if software { Threads { rows: 8, lanes: 1 } } else { Threads { rows: 1, lanes: 64 } }
    }

    fn all(self) -> usize {
        self.rows * self.lanes
    }
}

fn variant(x: DType, weight: DType, shape: Threads) -> Variant {
    Variant::new()
        .constant("ROWS", shape.rows as u32)
        .constant("LANES", shape.lanes as u32)
        .constant("CHUNK", CHUNK as u32)
        .quad("X", x)
        .quad("W", weight)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for kernel in [FORWARD, BACKWARD, PARTIAL, TOTAL] {
        for software in [false, true] {
            for x in [DType::F32, DType::BF16] {
                for w in [DType::F32, DType::BF16] {
                    all.push((kernel, variant(x, w, Threads::new(software))));
                }
            }
        }
    }
    all
}

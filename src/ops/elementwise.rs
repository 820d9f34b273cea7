//! Sums, casts and scalings of tensors of one shape.
//!
//! Definition: the PyTorch operators of the same names on bf16 and f32: computed in f32, rounded once to the result's
//! dtype. So the results are bit-exact against f32 arithmetic on the host (a subnormal f32 result may come out zero:
//! WGSL lets adapters flush).

use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Elementwise {
        quads: u32,
        factor: f32,
    }
}

const MAIN: Kernel =
    Kernel { name: "elementwise", text: include_str!("../../shaders/elementwise.wgsl"), entry: "main" };

/// Threads of a workgroup, each one quad.
const WORKGROUP: usize = 256;

/// Which of the shader's expressions is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Add,
    Cast,
    Accumulate,
    Scale,
    Zero,
}

/// `a + b` in a's dtype.
///
/// # Errors
/// The result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn add(gpu: &Gpu, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = Tensor::empty(gpu, "sum", a.shape(), a.dtype())?;
    launch(gpu, Op::Add, &out, &[a, b], 1.0)?;
    Ok(out)
}

/// `x` as `dtype`, rounded to nearest even.
///
/// # Errors
/// As [`add`].
#[track_caller]
pub fn cast(gpu: &Gpu, x: &Tensor, dtype: DType) -> Result<Tensor> {
    let out = Tensor::empty(gpu, "cast", x.shape(), dtype)?;
    cast_into(gpu, x, &out)?;
    Ok(out)
}

/// Writes `x` into `out`, in out's dtype, rounded to nearest even.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn cast_into(gpu: &Gpu, x: &Tensor, out: &Tensor) -> Result<()> {
    launch(gpu, Op::Cast, out, &[x], 1.0)
}

/// `acc += x` in place; the dtypes may differ.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn add_into(gpu: &Gpu, acc: &Tensor, x: &Tensor) -> Result<()> {
    launch(gpu, Op::Accumulate, acc, &[x], 1.0)
}

/// `x *= factor` in place.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn scale_into(gpu: &Gpu, x: &Tensor, factor: f32) -> Result<()> {
    launch(gpu, Op::Scale, x, &[], factor)
}

/// Sets every element to 0; any dtype whose bytes are a multiple of 4, flat or of quads.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn zero(gpu: &Gpu, x: &Tensor) -> Result<()> {
    assert_eq!(x.bytes() % 4, 0, "zero: {:?} of {} is not whole words", x.shape(), x.dtype());
    // As f32 quads where they fit, else as words, which are what e4m3 quads are.
    let as_dtype = if x.bytes().is_multiple_of(16) { DType::F32 } else { DType::E4M3 };
    let stores = x.bytes() / as_dtype.quad_bytes() as u64;
    dispatch(gpu, &variant(Op::Zero, as_dtype, &[]), x, &[], stores, 0.0)
}

/// Checks shapes and dispatches. A flat tensor takes part if it is whole quads.
#[track_caller]
fn launch(gpu: &Gpu, op: Op, out: &Tensor, inputs: &[&Tensor], factor: f32) -> Result<()> {
    let quads = |t: &Tensor| {
        let size = t.dtype().quad_bytes() as u64;
        assert_eq!(t.bytes() % size, 0, "elementwise: flat {:?} is not whole quads", t.shape());
        t.bytes() / size
    };
    for t in inputs {
        let same = (t.rows(), t.cols(), quads(t)) == (out.rows(), out.cols(), quads(out));
        assert!(same, "elementwise {op:?}: shapes {:?} and {:?}", t.shape(), out.shape());
    }
    let dtypes: Vec<DType> = inputs.iter().map(|t| t.dtype()).collect();
    dispatch(gpu, &variant(op, out.dtype(), &dtypes), out, inputs, quads(out), factor)
}

fn dispatch(
    gpu: &Gpu,
    variant: &Variant,
    out: &Tensor,
    inputs: &[&Tensor],
    quads: u64,
    factor: f32,
) -> Result<()> {
    let params = Elementwise { quads: u32::try_from(quads).expect("a binding is below 2^32 quads"), factor };
    let mut bindings = vec![out.write()];
    bindings.extend(inputs.iter().map(|t| t.read()));
    gpu.dispatch(&MAIN, variant, &params, &bindings, params.quads.div_ceil(WORKGROUP as u32))
}

fn variant(op: Op, out: DType, inputs: &[DType]) -> Variant {
    let mut variant = Variant::new().constant("INPUTS", inputs.len() as u32).quad("OUT", out);
    for (name, dtype) in ["IN0", "IN1"].into_iter().zip(inputs) {
        variant = variant.quad(name, *dtype);
    }
    let ops = [
        ("ADD", Op::Add),
        ("CAST", Op::Cast),
        ("ACCUMULATE", Op::Accumulate),
        ("SCALE", Op::Scale),
        ("ZERO", Op::Zero),
    ];
    ops.into_iter().fold(variant, |v, (name, which)| v.constant(name, u32::from(op == which)))
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    use DType::{BF16, F32};
    let mut all = [F32, DType::E4M3].map(|x| variant(Op::Zero, x, &[])).to_vec();
    for out in [F32, BF16] {
        all.push(variant(Op::Scale, out, &[]));
        for x in [F32, BF16] {
            all.push(variant(Op::Cast, out, &[x]));
            all.push(variant(Op::Accumulate, out, &[x]));
            all.push(variant(Op::Add, out, &[out, x]));
        }
    }
    all.into_iter().map(|v| (MAIN, v)).collect()
}

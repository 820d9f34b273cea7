//! Rotary position embedding on adjacent pairs: elements `2i` and `2i + 1` of each head, seen as a complex number, are
//! turned by the angle `t * theta^(-2i / head_dim)`, `t` the position in the sequence.
//!
//! Definition: Su et al., "RoFormer" (2021); pairing and precision as torchtitan's Llama4 (July 2025): the frequency and
//! the angle are f32 numbers (at `t = 8191` that rounding moves the angle by up to 2^-12, so it is part of the
//! definition), cosine and sine of that angle are exact up to f32, the product is computed in f32 and rounded once.
//! Tolerance against the reference: 2^-22 of the pair's length (three f32 roundings), and one rounding to the dtype.

use super::Team;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;
use crate::{Error, Result};

crate::params! {
    struct Rope { rows: u32, row_quads: u32, head_quads: u32, seq: u32 }
}

const ROTATE: Kernel =
    Kernel { name: "rope.rotate", text: include_str!("../../shaders/rope.wgsl"), entry: "rotate" };

/// Quads that a thread takes at a time, at most.
const MOST_HELD: usize = 8;

/// Cosines and sines of positions `0..seq`: (seq, head_dim) f32, `cos, sin` of pair `i` at columns `2i, 2i + 1`.
///
/// # Errors
/// `head_dim` is not a multiple of 4; the table is over the adapter's limits.
pub fn table(gpu: &Gpu, seq: usize, head_dim: usize, theta: f32) -> Result<Tensor> {
    if head_dim == 0 || !head_dim.is_multiple_of(4) {
        return Err(Error::user(
            format!("rotary embedding of heads of {head_dim} elements, which is not a multiple of 4"),
            "choose model.args.dim and n_heads so that dim / n_heads is a multiple of 4",
        ));
    }
    let mut values = Vec::with_capacity(seq * head_dim);
    for t in 0..seq {
        for pair in 0..head_dim / 2 {
            let (sin, cos) = f64::from(angle(t, pair, head_dim, theta)).sin_cos();
            values.extend([cos as f32, sin as f32]);
        }
    }
    Tensor::from_f32(gpu, "rope table", &[seq, head_dim], DType::F32, &values)
}

/// The angle of `pair` at position `t`, rounded to f32 where upstream's f32 tensors round it.
fn angle(t: usize, pair: usize, head_dim: usize, theta: f32) -> f32 {
    let exponent = (2 * pair) as f32 / head_dim as f32;
    let power = f64::from(theta).powf(f64::from(exponent)) as f32;
    t as f32 * (1.0 / power)
}

/// `x` (T, H * head_dim), f32 or bf16, with every pair turned by its position, row `t % seq`.
///
/// # Errors
/// The result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn forward(gpu: &Gpu, x: &Tensor, table: &Tensor, seq: usize, head_dim: usize) -> Result<Tensor> {
    let y = Tensor::empty(gpu, "rope y", x.shape(), x.dtype())?;
    rotate(gpu, x, &y, table, seq, head_dim, false)?;
    Ok(y)
}

/// [`forward`] of queries and keys, in one launch where both are one stack; then so are the results.
pub(crate) fn forward_pair(
    gpu: &Gpu,
    [q, k]: [&Tensor; 2],
    table: &Tensor,
    seq: usize,
    head_dim: usize,
) -> Result<[Tensor; 2]> {
    let y = empty_pair(gpu, [q, k])?;
    rotate_pair(gpu, [q, k], y.each_ref(), table, seq, head_dim, false)?;
    Ok(y)
}

/// Tensors like queries and keys: a stack where that can be.
pub(crate) fn empty_pair(gpu: &Gpu, [q, k]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
    if q.shape() == k.shape() {
        return Tensor::empty_stack(gpu, "rope q and k", q.shape(), q.dtype());
    }
    let empty = |x: &Tensor| Tensor::empty(gpu, "rope y", x.shape(), x.dtype());
    Ok([empty(q)?, empty(k)?])
}

/// [`backward`] of queries and keys into `d_x`, in one launch where all are stacks.
pub(crate) fn backward_pair_into(
    gpu: &Gpu,
    d_y: [&Tensor; 2],
    d_x: [&Tensor; 2],
    table: &Tensor,
    seq: usize,
    head_dim: usize,
) -> Result<()> {
    rotate_pair(gpu, d_y, d_x, table, seq, head_dim, true)
}

/// Both rotations, as one of twice the rows where that is the same.
fn rotate_pair(
    gpu: &Gpu,
    x: [&Tensor; 2],
    y: [&Tensor; 2],
    table: &Tensor,
    seq: usize,
    head_dim: usize,
    back: bool,
) -> Result<()> {
    if let (Some(x), Some(y)) = (Tensor::stacked(&x), Tensor::stacked(&y)) {
        return rotate(gpu, &x, &y, table, seq, head_dim, back);
    }
    for (x, y) in x.into_iter().zip(y) {
        rotate(gpu, x, y, table, seq, head_dim, back)?;
    }
    Ok(())
}

/// The gradient of [`forward`]'s `x` from the gradient of its result: the same turn the other way.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward(gpu: &Gpu, d_y: &Tensor, table: &Tensor, seq: usize, head_dim: usize) -> Result<Tensor> {
    let d_x = Tensor::empty(gpu, "rope d_x", d_y.shape(), d_y.dtype())?;
    rotate(gpu, d_y, &d_x, table, seq, head_dim, true)?;
    Ok(d_x)
}

#[track_caller]
fn rotate(
    gpu: &Gpu,
    x: &Tensor,
    y: &Tensor,
    table: &Tensor,
    seq: usize,
    head_dim: usize,
    back: bool,
) -> Result<()> {
    assert!(
        table.rows() >= seq && table.cols() == head_dim && head_dim.is_multiple_of(4),
        "rope: table {:?} for positions below {seq} of heads of {head_dim}",
        table.shape()
    );
    assert!(
        x.cols().is_multiple_of(head_dim) && x.rows().is_multiple_of(seq),
        "rope: x {:?} is sequences of {seq} with heads of {head_dim}",
        x.shape()
    );
    assert_eq!((x.shape(), x.dtype()), (y.shape(), y.dtype()), "rope: x, y");
    let params = Rope {
        rows: x.rows() as u32,
        row_quads: x.quads() as u32,
        head_quads: (head_dim / 4) as u32,
        seq: seq as u32,
    };
    let team = Team::of(x.quads(), MOST_HELD, gpu.caps().software);
    let variant = variant(x.dtype(), back, team, head_dim / 4);
    let bindings = [x.read(), table.read(), y.write()];
    gpu.dispatch(&ROTATE, &variant, &params, &bindings, team.groups(x.rows()))
}

fn variant(dtype: DType, back: bool, team: Team, head_quads: usize) -> Variant {
    team.constants(Variant::new())
        .constant("ALIGNED", u32::from(team.lanes.is_multiple_of(head_quads)))
        .constant("SIGN", u32::from(back))
        .quad("X", dtype)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for team in Team::kinds() {
        for (dtype, back) in [(DType::F32, false), (DType::BF16, true)] {
            all.extend([4, 6].map(|head_quads| (ROTATE, variant(dtype, back, team, head_quads))));
        }
    }
    all
}

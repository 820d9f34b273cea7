//! Root-mean-square norm of rows: `y = x * rstd * weight`, `rstd = 1 / sqrt(mean(x^2) + eps)`.
//!
//! Definition: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); precision as PyTorch 2.8's `rms_norm`,
//! which computes in f32 and rounds the result once to x's dtype.
//! Tolerance against the reference: f32 sums over a row, `cols * 2^-24` relative to the sum of magnitudes in the worst
//! case and 1e-6 of the largest value in practice, and one rounding to the dtype. `d_weight` sums over rows in f32:
//! `rows * 2^-24` of the sum of magnitudes.

use super::Team;
use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::ops::quantize::{Ready, Wish};
use crate::ops::quantize_rows;
use crate::tensor::Tensor;

crate::params! {
    struct Rmsnorm { rows: u32, cols: u32, chunk: u32, eps: f32 }
}
crate::params! {
    struct Columns { rows: u32, quads: u32 }
}

const TEXT: &str =
    concat!(include_str!("../../shaders/lib/norm.wgsl"), include_str!("../../shaders/rmsnorm.wgsl"));
const FORWARD: Kernel = Kernel { name: "rmsnorm.forward", text: TEXT, entry: "forward" };
const BACKWARD: Kernel = Kernel { name: "rmsnorm.backward", text: TEXT, entry: "backward" };
const PARTIAL: Kernel = Kernel { name: "rmsnorm.partial", text: TEXT, entry: "partial" };
const TOTAL: Kernel = Kernel { name: "rmsnorm.total", text: TEXT, entry: "total" };

/// Rows that one thread of `partial` sums for the weight's gradient.
const CHUNK: usize = 64;
/// Quads that a thread keeps; longer rows are read twice.
const MOST_HELD: usize = 8;
/// Workgroups of a backward pass that sums the weight's gradient too: enough for a large GPU, few partial sums.
const WORKGROUPS: usize = 512;

/// What is normed: x, or with `sum` the sum of x and its first, which goes to its second. All but the weight (cols) are alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm<'a> {
    pub x: &'a Tensor,
    pub weight: &'a Tensor,
    pub sum: Option<[&'a Tensor; 2]>,
    pub eps: f32,
}

/// `(y, rstd)`: `y` like `x` (T, D), f32 or bf16; `rstd` flat f32 `[T]` is what [`backward`] needs.
///
/// # Errors
/// The result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn forward(gpu: &Gpu, x: &Tensor, weight: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    forward_for(gpu, Norm { x, weight, sum: None, eps }, None).map(|(y, rstd, _)| (y, rstd))
}

/// `(sum, y, rstd)`: `sum = a + b`, rounded to their dtype, and [`forward`] of it, in one pass.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn forward_of_sum(
    gpu: &Gpu,
    a: &Tensor,
    b: &Tensor,
    weight: &Tensor,
    eps: f32,
) -> Result<(Tensor, Tensor, Tensor)> {
    forward_of_sum_for(gpu, [a, b], weight, eps, None).map(|(sum, (y, rstd, _))| (sum, y, rstd))
}

/// [`forward_of_sum`] as [`forward_for`]: the sum, and what that gives of it.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub(crate) fn forward_of_sum_for(
    gpu: &Gpu,
    [a, b]: [&Tensor; 2],
    weight: &Tensor,
    eps: f32,
    wish: Option<Wish<'_>>,
) -> Result<(Tensor, (Tensor, Tensor, Ready))> {
    like(a, b, "a and b of a sum");
    let sum = Tensor::empty(gpu, "sum", a.shape(), a.dtype())?;
    let normed = forward_for(gpu, Norm { x: a, weight, sum: Some([b, &sum]), eps }, wish)?;
    Ok((sum, normed))
}

/// `(y, rstd)` as [`forward`], and what y's readers wish of its quantization, where one kernel can do both.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub(crate) fn forward_for(
    gpu: &Gpu,
    norm: Norm<'_>,
    wish: Option<Wish<'_>>,
) -> Result<(Tensor, Tensor, Ready)> {
    let Norm { x, weight, .. } = norm;
    assert_eq!(weight.numel(), x.cols(), "rmsnorm: weight {:?} of x {:?}", weight.shape(), x.shape());
    let y = Tensor::empty(gpu, "rmsnorm y", x.shape(), x.dtype())?;
    let wish = wish.filter(|_| weight.dtype() == x.dtype());
    if let Some((rstd, ready)) = quantize_rows::norm(gpu, norm, &y, wish)? {
        return Ok((y, rstd, ready));
    }
    let rstd = Tensor::flat(gpu, "rmsnorm rstd", x.rows(), DType::F32)?;
    launch_forward(gpu, norm, &y, &rstd)?;
    Ok((y, rstd, Ready::default()))
}

fn launch_forward(gpu: &Gpu, norm: Norm<'_>, y: &Tensor, rstd: &Tensor) -> Result<()> {
    let Norm { x, weight, sum, eps } = norm;
    let team = team(x.quads(), gpu.caps().software);
    let params = Rmsnorm { rows: x.rows() as u32, cols: x.cols() as u32, chunk: 1, eps };
    let mut bindings = vec![x.read(), weight.read(), y.write(), rstd.write()];
    if let Some([more, out]) = sum {
        bindings.extend([more.read(), out.write()]);
    }
    let flags = Flags { add: sum.is_some(), ..Flags::default() };
    let variant = variant([x.dtype(), weight.dtype()], team, flags);
    gpu.dispatch(&FORWARD, &variant, &params, &bindings, team.groups(x.rows()))
}

/// `(d_x, d_weight)` of [`forward`]; `d_weight` has the weight's shape and dtype. `so_far`, like x, is added to d_x.
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
    so_far: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let d_weight = Tensor::empty(gpu, "rmsnorm d_weight", weight.shape(), weight.dtype())?;
    let d_x = backward_into(gpu, d_y, x, weight, rstd, so_far, &d_weight)?;
    Ok((d_x, d_weight))
}

/// [`backward`] with the weight's gradient into `d_weight`, which is like the weight.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward_into(
    gpu: &Gpu,
    d_y: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    rstd: &Tensor,
    so_far: Option<&Tensor>,
    d_weight: &Tensor,
) -> Result<Tensor> {
    like(d_weight, weight, "the weight's gradient and the weight");
    assert_eq!(weight.numel(), x.cols(), "rmsnorm: weight {:?} of x {:?}", weight.shape(), x.shape());
    like(d_y, x, "d_y and x");
    so_far.inspect(|t| like(t, x, "the gradient so far and x"));
    assert_eq!(rstd.numel(), x.rows(), "rmsnorm: length of rstd");
    let software = gpu.caps().software;
    let team = team(x.quads(), software);
    let fused = !software && team.lanes * team.held >= x.quads();
    let flags = Flags { fused, onto: so_far.is_some(), ..Flags::default() };
    let chunk = if fused { x.rows().div_ceil(WORKGROUPS * team.rows) } else { 1 };
    let groups = x.rows().div_ceil(team.rows * chunk);
    let d_x = Tensor::empty(gpu, "rmsnorm d_x", x.shape(), x.dtype())?;
    let (rows, cols) = (x.rows() as u32, x.cols() as u32);
    let params = Rmsnorm { rows, cols, chunk: chunk as u32, eps: 0.0 };
    let sum_rows = if fused { groups } else { x.rows().div_ceil(CHUNK) };
    let sums = Tensor::empty(gpu, "rmsnorm partial sums", &[sum_rows, 4 * x.quads()], DType::F32)?;
    let mut bindings = vec![x.read(), weight.read(), d_y.read(), rstd.read(), d_x.write()];
    bindings.extend(fused.then(|| sums.write()));
    bindings.extend(so_far.map(Tensor::read));
    let kind = [x.dtype(), weight.dtype()];
    gpu.dispatch(&BACKWARD, &variant(kind, team, flags), &params, &bindings, groups as u32)?;
    let variant = variant(kind, team, Flags::default());
    if !fused {
        let params = Columns { rows, quads: x.quads() as u32 };
        let groups = (sum_rows * x.quads()).div_ceil(team.rows * team.lanes) as u32;
        let bindings = [x.read(), sums.write(), d_y.read(), rstd.read()];
        gpu.dispatch(&PARTIAL, &variant, &params, &bindings, groups)?;
    }
    let params = Columns { rows: sum_rows as u32, quads: x.quads() as u32 };
    let groups = x.quads().div_ceil(width(team)) as u32;
    gpu.dispatch(&TOTAL, &variant, &params, &[sums.read(), d_weight.write()], groups)?;
    Ok(d_x)
}

#[track_caller]
fn like(a: &Tensor, b: &Tensor, what: &str) {
    let kind = |t: &Tensor| (t.rows(), t.cols(), t.dtype());
    assert_eq!(kind(a), kind(b), "rmsnorm: rows, columns and dtype of {what}");
}

/// On software adapters a thread takes whole rows.
fn team(quads: usize, software: bool) -> Team {
    if software { Team { rows: 8, lanes: 1, held: 0 } } else { Team::of(quads, MOST_HELD, false) }
}

/// Threads that share a row of so many quads on GPUs.
pub(super) fn lanes(quads: usize) -> usize {
    team(quads, false).lanes
}

/// Quads of columns that a workgroup of `total` sums: all of 128 bytes on GPUs, one a thread on software adapters.
fn width(team: Team) -> usize {
    if team.lanes == 1 { team.rows } else { 8 }
}

/// What the row kernels do beside the norm.
#[derive(Clone, Copy, Default)]
struct Flags {
    add: bool,
    fused: bool,
    onto: bool,
}

fn variant([x, weight]: [DType; 2], team: Team, flags: Flags) -> Variant {
    team.constants(Variant::new())
        .constant("CHUNK", CHUNK as u32)
        .constant("WIDTH", width(team) as u32)
        .constant("TOGETHER", if team.lanes > 1 { 8 } else { 1 })
        .constant("TREE", u32::from(team.lanes > 1))
        .constant("ADD", u32::from(flags.add))
        .constant("FUSED", u32::from(flags.fused))
        .constant("ONTO", u32::from(flags.onto))
        .constant("PLAIN", u32::from(!flags.onto))
        .quad("X", x)
        .quad("W", weight)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    let teams = Team::kinds().into_iter().filter(|t| t.lanes * t.rows == 256).chain([team(1, true)]);
    for team in teams {
        for (x, w) in [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)] {
            let kind = [x, w];
            all.extend([PARTIAL, TOTAL].map(|k| (k, variant(kind, team, Flags::default()))));
            for on in [false, true] {
                all.push((FORWARD, variant(kind, team, Flags { add: on, ..Flags::default() })));
                let flags = Flags { fused: team.lanes > 1, onto: on, add: false };
                all.push((BACKWARD, variant(kind, team, flags)));
            }
        }
    }
    all
}

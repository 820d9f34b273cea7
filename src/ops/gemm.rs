//! Grouped GEMM: `nt` (fprop), `nn` (dgrad), `tn` (wgrad) over ragged groups of rows, any dtype in, f32 inside.
//!
//! Definition: torch `_grouped_mm` forms 2d-3d and 2d-2d (PyTorch 2.8), with two promises more: rows past the last
//! offset come out zero, and an empty group's weight gradient is zero.
//! Tolerance against the f64 product of the same operands: f32 accumulation, `K * 2^-24 * sum |a b|`, plus one
//! rounding to the output's dtype.

use super::choice::choose;
use super::gemm_choice::{Form, Product};
use super::panels::{Codes, Order};
use super::{gemm_coop, gemm_narrow, gemm_tiled};
use crate::Result;
use crate::gpu::{Binding, Caps, GemmKernel, Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;
use parts::Parts;

crate::params! {
    pub(super) struct Gemm {
        m: u32,
        n: u32,
        k: u32,
        groups: u32,
        row_step: u32,
        row_group: u32,
        col_step: u32,
        col_group: u32,
        run: u32,
        stack: u32,
    }
}

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/gemm_params.wgsl"),
    include_str!("../../shaders/lib/gemm_operands.wgsl"),
    include_str!("../../shaders/lib/gemm_store.wgsl"),
    include_str!("../../shaders/gemm.wgsl")
);
const SUM_TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/gemm_params.wgsl"),
    include_str!("../../shaders/lib/gemm_store.wgsl"),
    include_str!("../../shaders/gemm_sum.wgsl")
);
const NT: Kernel = Kernel { name: "gemm.nt", text: TEXT, entry: "nt" };
const NN: Kernel = Kernel { name: "gemm.nn", text: TEXT, entry: "nn" };
const TN: Kernel = Kernel { name: "gemm.tn", text: TEXT, entry: "tn" };
const SUM: Kernel = Kernel { name: "gemm_sum.sum", text: SUM_TEXT, entry: "sum" };

/// Edge of the tile that one thread computes.
const TILE: usize = 8;

/// De-scales of one operand, f32, multiplied into the result: one per row (or column) of the result, laid out group
/// after group where the operand is per group, or one for all.
#[derive(Clone, Copy, Debug)]
pub struct Scale<'a> {
    /// The factors.
    pub values: &'a Tensor,
    /// Elements between neighbouring rows (columns): 1, or 0 for one scale for all.
    pub step: usize,
    /// Elements between groups: 0 when the factors are not per group.
    pub group: usize,
}

impl<'a> Scale<'a> {
    /// One factor per row of the whole result.
    pub fn per_row(values: &'a Tensor) -> Self {
        Scale { values, step: 1, group: 0 }
    }

    /// `width` factors for each group.
    pub fn per_group(values: &'a Tensor, width: usize) -> Self {
        Scale { values, step: 1, group: width }
    }

    /// One factor for everything.
    pub fn tensorwise(values: &'a Tensor) -> Self {
        Scale { values, step: 0, group: 0 }
    }
}

/// What a GEMM needs beside its operands.
#[derive(Clone, Copy, Debug, Default)]
pub struct GemmOptions<'a> {
    /// Exclusive end row of each group (flat u32, one per group); `None` is one group of all rows.
    pub offs: Option<&'a Tensor>,
    /// De-scales of the result's rows and columns.
    pub scales: Option<(Scale<'a>, Scale<'a>)>,
    /// The kernel, from who has asked [`choose`] already to prepare operands for it; `None` asks here.
    pub kernel: Option<GemmKernel>,
}

/// `out(M, N) = A(M, K) W[g](N, K)^T`, rows in group g; W is (E, N, K), or (N, K) without groups.
///
/// # Errors
/// The result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn nt(gpu: &Gpu, a: &Tensor, w: &Tensor, out: DType, options: GemmOptions<'_>) -> Result<Tensor> {
    nt_of(gpu, &Codes::Rows(a.clone()), &Codes::Rows(w.clone()), out, options)
}

/// [`nt`] of operands that may lie in panels.
#[track_caller]
pub(crate) fn nt_of(gpu: &Gpu, a: &Codes, w: &Codes, out: DType, options: GemmOptions<'_>) -> Result<Tensor> {
    let n = w.shape()[w.shape().len() - 2];
    let result = Tensor::empty(gpu, "gemm result", &[a.rows(), n], out)?;
    nt_codes_into(gpu, a, w, &result, options)?;
    Ok(result)
}

/// [`nt_of`] into `result` (M, N).
#[track_caller]
pub(super) fn nt_codes_into(
    gpu: &Gpu,
    a: &Codes,
    w: &Codes,
    result: &Tensor,
    options: GemmOptions<'_>,
) -> Result<()> {
    let (n, k) = (w.shape()[w.shape().len() - 2], w.cols());
    assert_eq!(a.cols(), k, "gemm nt: A {:?} and W {:?} contract their last dimension", a.shape(), w.shape());
    let dims = Dims { m: a.rows(), n, k, groups: groups(w, n, options), stack: 1 };
    assert_eq!(result.numel(), dims.m * n, "gemm nt: result {:?} of {dims:?}", result.shape());
    launch(gpu, &NT, (a, w), result, dims, options, false)
}

/// `out(M, N) = A(M, K) W[g](K, N)`, rows in group g; W is (E, K, N), or (K, N) without groups.
///
/// # Errors
/// As [`nt`].
#[track_caller]
pub fn nn(gpu: &Gpu, a: &Tensor, w: &Tensor, out: DType, options: GemmOptions<'_>) -> Result<Tensor> {
    nn_of(gpu, &Codes::Rows(a.clone()), &Codes::Rows(w.clone()), out, options)
}

/// [`nn`] of operands that may lie in panels.
#[track_caller]
pub(crate) fn nn_of(gpu: &Gpu, a: &Codes, w: &Codes, out: DType, options: GemmOptions<'_>) -> Result<Tensor> {
    let result = Tensor::empty(gpu, "gemm result", &[a.rows(), w.cols()], out)?;
    nn_codes_into(gpu, a, w, &result, false, options)?;
    Ok(result)
}

/// [`nn`] into `result` (M, N).
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn nn_into(gpu: &Gpu, a: &Tensor, w: &Tensor, result: &Tensor, options: GemmOptions<'_>) -> Result<()> {
    nn_codes_into(gpu, &Codes::Rows(a.clone()), &Codes::Rows(w.clone()), result, false, options)
}

/// [`nn`] added to what is in `result` (M, N); rows past the last offset stay as they are.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn nn_onto(gpu: &Gpu, a: &Tensor, w: &Tensor, result: &Tensor, options: GemmOptions<'_>) -> Result<()> {
    nn_codes_into(gpu, &Codes::Rows(a.clone()), &Codes::Rows(w.clone()), result, true, options)
}

/// [`nn_into`], or [`nn_onto`] if `accumulate`, of operands that may lie in panels.
#[track_caller]
pub(crate) fn nn_codes_into(
    gpu: &Gpu,
    a: &Codes,
    w: &Codes,
    result: &Tensor,
    accumulate: bool,
    options: GemmOptions<'_>,
) -> Result<()> {
    let k = w.shape()[w.shape().len() - 2];
    assert_eq!(
        a.cols(),
        k,
        "gemm nn: A {:?} contracts W's {:?} last but one dimension",
        a.shape(),
        w.shape()
    );
    let dims = Dims { m: a.rows(), n: w.cols(), k, groups: groups(w, k, options), stack: 1 };
    assert_eq!(result.numel(), dims.m * dims.n, "gemm nn: result {:?} of {dims:?}", result.shape());
    launch(gpu, &NN, (a, w), result, dims, options, accumulate)
}

/// `out[g](M, N) = A_g(R_g, M)^T B_g(R_g, N)`; the result is (E, M, N), or (M, N) without groups.
///
/// # Errors
/// As [`nt`].
#[track_caller]
pub fn tn(gpu: &Gpu, a: &Tensor, b: &Tensor, out: DType, options: GemmOptions<'_>) -> Result<Tensor> {
    tn_of(gpu, &Codes::Rows(a.clone()), &Codes::Rows(b.clone()), out, options)
}

/// [`tn`] of operands that may lie in panels.
#[track_caller]
pub(crate) fn tn_of(gpu: &Gpu, a: &Codes, b: &Codes, out: DType, options: GemmOptions<'_>) -> Result<Tensor> {
    let mut shape = vec![a.cols(), b.cols()];
    if let Some(offs) = options.offs {
        shape.insert(0, offs.numel());
    }
    let result = Tensor::empty(gpu, "gemm result", &shape, out)?;
    tn_codes_into(gpu, a, b, &result, false, options)?;
    Ok(result)
}

/// [`tn`] into `result`, added to what is there if `accumulate`.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn tn_into(
    gpu: &Gpu,
    a: &Tensor,
    b: &Tensor,
    result: &Tensor,
    accumulate: bool,
    options: GemmOptions<'_>,
) -> Result<()> {
    tn_codes_into(gpu, &Codes::Rows(a.clone()), &Codes::Rows(b.clone()), result, accumulate, options)
}

/// [`tn_into`] of operands that may lie in panels.
#[track_caller]
pub(super) fn tn_codes_into(
    gpu: &Gpu,
    a: &Codes,
    b: &Codes,
    result: &Tensor,
    accumulate: bool,
    options: GemmOptions<'_>,
) -> Result<()> {
    assert_eq!(a.rows(), b.rows(), "gemm tn: A {:?} and B {:?} contract their rows", a.shape(), b.shape());
    let groups = options.offs.map_or(1, Tensor::numel);
    let dims = Dims { m: a.cols(), n: b.cols(), k: a.rows(), groups, stack: 1 };
    assert_eq!(result.numel(), groups * dims.m * dims.n, "gemm tn: result {:?} of {dims:?}", result.shape());
    launch(gpu, &TN, (a, b), result, dims, options, accumulate)
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub groups: usize,
    /// Results at once: see [`stack`].
    pub stack: usize,
}

impl Dims {
    /// As in [`Product::sizes`].
    fn sizes(self) -> [usize; 3] {
        [self.m, self.n, self.k]
    }
}

/// Number of groups: the offsets' and the weight's must agree.
#[track_caller]
fn groups(w: &Codes, rows: usize, options: GemmOptions<'_>) -> usize {
    let of_w = w.rows() / rows.max(1);
    let groups = options.offs.map_or(1, Tensor::numel);
    assert_eq!(groups, of_w, "gemm: groups in the offsets, groups in W {:?}", w.shape());
    groups
}

/// Threads of a workgroup over columns and rows. Software adapters run one workgroup per core, its threads as lanes.
fn workgroup(software: bool) -> (usize, usize) {
    if software { (8, 1) } else { (8, 8) }
}

/// Workgroups that fill a large GPU.
const FULL_GPU: usize = 512;

/// What a variant does beside multiplying.
#[derive(Clone, Copy, Default)]
pub(super) struct Flags {
    pub grouped: bool,
    pub scaled: bool,
    pub accumulate: bool,
    /// Whether the products of a stack are added up: short ones on matrix units.
    pub summed: bool,
}

fn variant(kinds: [DType; 3], flags: Flags, software: bool) -> Variant {
    let (wx, wy) = workgroup(software);
    sum_variant(kinds[2], flags)
        .constant("WX", wx as u32)
        .constant("WY", wy as u32)
        .quad("A", kinds[0])
        .quad("B", kinds[1])
}

fn sum_variant(out: DType, flags: Flags) -> Variant {
    Variant::new()
        .constant("GROUPED", flags.grouped.into())
        .constant("SCALED", flags.scaled.into())
        .constant("ACCUMULATE", flags.accumulate.into())
        .quad("OUT", out)
}

fn params(form: Form, dims: Dims, options: GemmOptions<'_>, run: usize) -> Gemm {
    let step = |pick: fn(&(Scale<'_>, Scale<'_>)) -> usize| options.scales.as_ref().map_or(0, pick) as u32;
    // A stack of weight gradients has its input in common.
    let is_shared = form == Form::Tn && dims.stack > 1;
    Gemm {
        m: dims.m as u32,
        n: dims.n as u32,
        k: dims.k as u32,
        groups: dims.groups as u32,
        row_step: step(|s| s.0.step),
        row_group: step(|s| s.0.group),
        col_step: step(|s| s.1.step),
        col_group: if is_shared { 0 } else { step(|s| s.1.group) },
        run: run as u32,
        stack: dims.stack as u32,
    }
}

/// Workgroups of a product whose groups are not cut, and how many fill a large adapter.
fn grid(form: Form, grouped: bool, dims: Dims, chosen: GemmKernel, caps: &Caps) -> (usize, usize) {
    let (wx, wy) = workgroup(caps.software);
    let ([height, width], full) = match chosen {
        GemmKernel::Scalar => ([TILE * wy, TILE * wx], FULL_GPU),
        GemmKernel::Tiled => ([gemm_tiled::TILE; 2], FULL_GPU / 2),
        GemmKernel::Narrow => (gemm_narrow::tile(form, dims.sizes()), 4 * FULL_GPU),
        GemmKernel::Coop => ([gemm_coop::tile(caps); 2], FULL_GPU / 2),
    };
    let heights = dims.m.div_ceil(height);
    // A stack of input gradients is one sum.
    let results = if form == Form::Nn { 1 } else { dims.stack };
    let heights = match grouped {
        _ if form == Form::Tn => dims.groups * heights,
        // Every group and the tail may end in one tile that is not full.
        true => heights + dims.groups,
        false => heights,
    };
    (results * heights * dims.n.div_ceil(width), full)
}

/// [`launch`] of bf16 operands on matrix units: both become halves, scaled along the contraction.
fn launch_halves(
    gpu: &Gpu,
    kernel: &Kernel,
    (a, b): (&Tensor, &Tensor),
    out: &Tensor,
    dims: Dims,
    options: GemmOptions<'_>,
    accumulate: bool,
) -> Result<()> {
    assert!(options.scales.is_none(), "gemm: bf16 operands with scales");
    let contracted = gemm_coop::contractions(kernel.entry, dims.stack, options.offs);
    let [a, b] = gemm_coop::halves(gpu, contracted, a, b, Order::Panels)?;
    let row = match kernel.entry {
        "nt" => Scale::per_row(&a.descale),
        "nn" if dims.stack == 1 => Scale::per_row(&a.descale),
        _ => Scale::per_group(&a.descale, dims.m),
    };
    let scales = Some((row, Scale::per_group(&b.descale, dims.n)));
    let options = GemmOptions { scales, kernel: Some(GemmKernel::Coop), ..options };
    launch(gpu, kernel, (&a.codes, &b.codes), out, dims, options, accumulate)
}

/// The kernel that computes a product, or one of a stack.
fn chosen(gpu: &Gpu, form: Form, operands: [&Codes; 2], dims: Dims, options: GemmOptions<'_>) -> GemmKernel {
    let operands = operands.map(|codes| codes.memory().dtype());
    let groups = options.offs.map(Tensor::numel);
    let product = Product { form, operands, sizes: dims.sizes(), groups };
    let kernel = options.kernel.unwrap_or_else(|| choose(gpu, &product));
    // As halves they have scales of their own, and the kernel takes one for each row and column.
    let has_two = operands[0] == DType::BF16 && options.scales.is_some();
    if kernel == GemmKernel::Coop && has_two { GemmKernel::Tiled } else { kernel }
}

fn launch(
    gpu: &Gpu,
    kernel: &Kernel,
    (a, b): (&Codes, &Codes),
    out: &Tensor,
    dims: Dims,
    options: GemmOptions<'_>,
    accumulate: bool,
) -> Result<()> {
    // Only a weight has a dimension for groups, and a stack of gradients one for results.
    let flat = match a {
        Codes::Rows(t) if t.shape().len() > 2 && (dims.stack == 1 || kernel.entry == "nt") => {
            Codes::Rows(t.reshape(&[t.rows(), t.cols()]))
        }
        _ => a.clone(),
    };
    let a = &flat;
    let in_panels = [a, b].iter().any(|codes| matches!(codes, Codes::Panels(_)));
    let chosen = chosen(gpu, Form::of(kernel.entry), [a, b], dims, options);
    assert!(chosen == GemmKernel::Coop || !in_panels, "gemm: operands in panels for {chosen:?}");
    if chosen != GemmKernel::Coop {
        return multiply(gpu, kernel, [a.memory(), b.memory()], out, dims, options, accumulate, chosen);
    }
    if a.memory().dtype() == DType::BF16 {
        return launch_halves(gpu, kernel, (a.memory(), b.memory()), out, dims, options, accumulate);
    }
    let [along_a, along_b] = gemm_coop::contractions(kernel.entry, dims.stack, options.offs);
    let (a, b) = (a.to_panels(gpu, along_a)?, b.to_panels(gpu, along_b)?);
    multiply(gpu, kernel, [a.memory(), b.memory()], out, dims, options, accumulate, chosen)
}

/// Records the product of two operands in memory as the kernel `chosen` wants them.
fn multiply(
    gpu: &Gpu,
    kernel: &Kernel,
    [a, b]: [&Tensor; 2],
    out: &Tensor,
    dims: Dims,
    options: GemmOptions<'_>,
    accumulate: bool,
    chosen: GemmKernel,
) -> Result<()> {
    let grouped = options.offs.is_some();
    let (caps, software) = (gpu.caps(), gpu.caps().software);
    let form = Form::of(kernel.entry);
    let (tiles, full) = grid(form, grouped, dims, chosen, &caps);
    // On a software adapter there is nothing to fill; the tiles in workgroup memory are there for tests only.
    let parts = if form == Form::Tn && !(software && chosen == GemmKernel::Scalar) {
        Parts::of(dims, grouped, tiles, full)
    } else {
        Parts::whole(dims.groups)
    };
    let tiles = if form == Form::Tn { tiles / dims.groups.max(1) * parts.most } else { tiles };
    let summed = form == Form::Nn && dims.stack > 1;
    let flags = Flags { grouped, scaled: options.scales.is_some(), accumulate, summed };
    let unused = a.read();
    let (row, col) = match options.scales {
        Some((row, col)) => (row.values.read(), col.values.read()),
        None => (unused.clone(), unused.clone()),
    };
    let offs = options.offs.map_or(unused, Tensor::read);
    let params = params(form, dims, options, parts.run);
    let depth = match (form, parts.run) {
        (Form::Nt | Form::Nn, _) => dims.k,
        (Form::Tn, 0) => dims.k.div_ceil(dims.groups.max(1)),
        (Form::Tn, run) => run,
    };
    // A stack takes the text of its products, which others of their sizes have brought into the caches.
    let short = gemm_coop::is_short(depth, if summed { tiles } else { tiles / dims.stack.max(1) });
    let product = |out: &Tensor, flags: Flags| {
        let bindings: [Binding; 6] =
            [a.read(), b.read(), offs.clone(), row.clone(), col.clone(), out.write()];
        let kinds = [a.dtype(), b.dtype(), out.dtype()];
        let (kernel, variant) = match chosen {
            GemmKernel::Scalar => (*kernel, variant(kinds, flags, software)),
            GemmKernel::Tiled => gemm_tiled::kernel(form, kinds, flags, software),
            GemmKernel::Narrow => gemm_narrow::kernel(form, kinds, dims.sizes(), flags),
            GemmKernel::Coop => gemm_coop::kernel(kernel.entry, short, [kinds[0], kinds[2]], flags, &caps),
        };
        gpu.dispatch(&kernel, &variant, &params, &bindings, tiles as u32)
    };
    if parts.run == 0 {
        return product(out, flags);
    }
    // The sum sees a stack of results as one with all their rows.
    let height = dims.stack * dims.m;
    let sums = Tensor::empty(gpu, "gemm parts", &[parts.most * height, dims.n], DType::F32)?;
    product(&sums, Flags { grouped, ..Flags::default() })?;
    let params = Gemm { m: height as u32, ..params };
    let quads = dims.groups * height * dims.n.div_ceil(4);
    let bindings: [Binding; 5] = [sums.read(), offs.clone(), row.clone(), col.clone(), out.write()];
    gpu.dispatch(&SUM, &sum_variant(out.dtype(), flags), &params, &bindings, quads.div_ceil(64) as u32)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    use DType::{BF16, E4M3, E5M2, F32};
    let operands = [(F32, F32), (BF16, BF16), (E4M3, E4M3), (E5M2, E4M3)];
    let mut all = Vec::new();
    for out in [F32, BF16] {
        for bits in 0..8u8 {
            let [grouped, scaled, accumulate] = [1, 2, 4].map(|bit| bits & bit != 0);
            let flags = Flags { grouped, scaled, accumulate, summed: false };
            all.push((SUM, sum_variant(out, flags)));
            for (a, b) in operands {
                for kernel in [NT, NN, TN] {
                    all.push((kernel, variant([a, b, out], flags, grouped)));
                }
                // Parts of groups, on GPUs.
                all.push((TN, variant([a, b, F32], Flags { grouped: true, ..Flags::default() }, false)));
            }
        }
    }
    all
}

mod parts;
mod stack;

pub(crate) use stack::{is_launch_bound, nn_summed, nt_stacked, tn_stacked};

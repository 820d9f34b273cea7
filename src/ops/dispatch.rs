//! From tokens to experts and back: the plan (a stable counting sort), rows gathered in expert order, results summed.
//!
//! T tokens with K chosen experts each are R = T * K *slots*, slot `t * K + k`. Sorted by expert, and within one
//! expert by slot, they are the R routed rows. Definition: torchtitan's MoE (July 2025), without its padding.
//! The plan is exact. Rows and sums are computed in f32 and rounded once; sums over k run in k order, from the base:
//! `(K + 1) * 2^-24` of the sum of magnitudes, plus the rounding. Weight gradients are dot products in f32:
//! `D * 2^-24 * sum |a b|` at worst.

use super::Team;
use crate::Result;
use crate::gpu::{Binding, Gpu, Kernel, Variant};
use crate::num::DType;
use crate::ops::quantize::{Ready, Wish};
use crate::ops::quantize_rows::{self, Source};
use crate::tensor::Tensor;

crate::params! {
    struct Dispatch {
        slots: u32,
        experts: u32,
        top_k: u32,
        cols: u32,
        chunk: u32,
    }
}

const TEXT: &str =
    concat!(include_str!("../../shaders/lib/lanes.wgsl"), include_str!("../../shaders/dispatch.wgsl"));
const COUNT: Kernel = Kernel { name: "dispatch.count", text: TEXT, entry: "count" };
const SCAN: Kernel = Kernel { name: "dispatch.scan", text: TEXT, entry: "scan" };
const PLACE: Kernel = Kernel { name: "dispatch.place", text: TEXT, entry: "place" };
const GATHER: Kernel = Kernel { name: "dispatch.gather", text: TEXT, entry: "gather" };
const SCATTER: Kernel = Kernel { name: "dispatch.scatter", text: TEXT, entry: "scatter" };
const COMBINE: Kernel = Kernel { name: "dispatch.combine", text: TEXT, entry: "combine" };
const PRODUCTS: Kernel = Kernel { name: "dispatch.products", text: TEXT, entry: "products" };

/// Which slot is which routed row.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Rows of each expert, flat u32 `[E]`.
    pub counts: Tensor,
    /// Exclusive end row of each expert, flat u32 `[E]`.
    pub offs: Tensor,
    /// Row to slot, flat u32 `[R]`.
    pub order: Tensor,
    /// Slot to row, the inverse, flat u32 `[R]`.
    pub slot: Tensor,
    /// K.
    pub top_k: usize,
}

/// Sorts the slots by expert, stable. `ids` is flat u32 `[R]`, each below `experts`, R a multiple of `top_k`.
///
/// # Errors
/// Over the adapter's limits, or what the device reported.
#[track_caller]
pub fn plan(gpu: &Gpu, ids: &Tensor, experts: usize, top_k: usize) -> Result<Plan> {
    let slots = ids.numel();
    assert_eq!(slots % top_k, 0, "dispatch: {slots} ids of {top_k} per token");
    let chunk = chunk(slots);
    let cells = slots.div_ceil(chunk) * experts;
    let index = |name: &str, n: usize| Tensor::flat(gpu, name, n, DType::U32);
    let histogram = index("histogram of chunks", cells)?;
    let plan = Plan {
        counts: index("rows of experts", experts)?,
        offs: index("offsets of experts", experts)?,
        order: index("slots by expert", slots)?,
        slot: index("rows by slot", slots)?,
        top_k,
    };
    let params = Dispatch {
        slots: slots as u32,
        experts: experts as u32,
        top_k: top_k as u32,
        cols: 0,
        chunk: chunk as u32,
    };
    let software = gpu.caps().software;
    let groups = cells.div_ceil(64) as u32;
    let run = |kernel: &Kernel, bindings: &[Binding], groups: u32| {
        gpu.dispatch(kernel, &variant(kernel, software), &params, bindings, groups)
    };
    run(&COUNT, &[ids.read(), histogram.write()], groups)?;
    run(&SCAN, &[histogram.write(), plan.counts.write(), plan.offs.write()], 1)?;
    let written = [plan.order.write(), plan.slot.write()];
    run(&PLACE, &[&[ids.read(), histogram.read(), plan.offs.read()][..], &written].concat(), groups)?;
    Ok(plan)
}

/// Routed rows `(R, D)`: `x[t] * weights[slot]`, rounded once to x's dtype. `x` is `(T, D)`, `weights` flat f32 `[R]`
/// by slot.
///
/// # Errors
/// As [`plan`].
#[track_caller]
pub fn gather(gpu: &Gpu, x: &Tensor, plan: &Plan, weights: Option<&Tensor>) -> Result<Tensor> {
    gather_for(gpu, x, plan, weights, None).map(|(rows, _)| rows)
}

/// [`gather`], and what the readers of the rows wish of their quantization, where one kernel can do both.
///
/// # Errors
/// As [`plan`].
#[track_caller]
pub(crate) fn gather_for(
    gpu: &Gpu,
    x: &Tensor,
    plan: &Plan,
    weights: Option<&Tensor>,
    wish: Option<Wish<'_>>,
) -> Result<(Tensor, Ready)> {
    let params = sizes(plan, x, "gather's tokens", x.rows() * plan.top_k);
    let out = Tensor::empty(gpu, "routed rows", &[plan.order.numel(), x.cols()], x.dtype())?;
    // Rows of one slot a token: of several the next kernel reads a token once, and the codes are made apart.
    let wish = wish.filter(|_| plan.top_k == 1);
    let source = Source::Routed { x, order: &plan.order, top_k: plan.top_k, weights };
    if let Some(ready) = quantize_rows::make(gpu, source, &out, wish)? {
        return Ok((out, ready));
    }
    // By token if it has several slots: the cache does not keep it for them.
    let (kernel, index, rows) =
        if plan.top_k > 1 { (SCATTER, &plan.slot, x.rows()) } else { (GATHER, &plan.order, out.rows()) };
    let mut bindings = vec![x.read(), index.read(), out.write()];
    bindings.extend(weights.map(Tensor::read));
    let team = Team::of(x.quads(), MOST_HELD / 2, gpu.caps().software);
    let flags = Flags { weighted: weights.is_some(), ..Flags::default() };
    let variant = rows_variant(&kernel, x.dtype(), team, flags);
    gpu.dispatch(&kernel, &variant, &params, &bindings, team.groups(rows))?;
    Ok((out, Ready::default()))
}

/// Gradients of [`gather`]: of x `(T, D)`, in d_rows' dtype, and of the weights if there were any, flat f32 `[R]`.
/// `so_far`, like d_x, is added to it.
///
/// # Errors
/// As [`plan`].
#[track_caller]
pub fn gather_backward(
    gpu: &Gpu,
    d_rows: &Tensor,
    x: &Tensor,
    plan: &Plan,
    weights: Option<&Tensor>,
    so_far: Option<&Tensor>,
) -> Result<(Tensor, Option<Tensor>)> {
    let team = Team::of(x.quads(), MOST_HELD, gpu.caps().software);
    // The weights' gradient in the same pass, if one team holds a whole row.
    if weights.is_some() && team.rows * team.lanes == 256 && team.lanes * team.held >= x.quads() {
        let dots = Tensor::flat(gpu, "weight gradients", d_rows.rows(), DType::F32)?;
        let d_x = combine_with(gpu, d_rows, plan, weights, so_far, Some((x, &dots)))?;
        return Ok((d_x, Some(dots)));
    }
    let d_x = combine(gpu, d_rows, plan, weights, so_far)?;
    Ok((d_x, weights.map(|_| products(gpu, x, d_rows, plan)).transpose()?))
}

/// `out[t] = base[t] + sum over k of weights[slot] * rows[slot's row]`, `(T, D)` in rows' dtype; `rows` is `(R, D)`,
/// `base` `(T, D)` of the same dtype.
///
/// # Errors
/// As [`plan`].
#[track_caller]
pub fn combine(
    gpu: &Gpu,
    rows: &Tensor,
    plan: &Plan,
    weights: Option<&Tensor>,
    base: Option<&Tensor>,
) -> Result<Tensor> {
    combine_with(gpu, rows, plan, weights, base, None)
}

/// [`combine`] that also writes `(tokens, dots)`: the dot product of each slot's token and row.
#[track_caller]
fn combine_with(
    gpu: &Gpu,
    rows: &Tensor,
    plan: &Plan,
    weights: Option<&Tensor>,
    base: Option<&Tensor>,
    dots: Option<(&Tensor, &Tensor)>,
) -> Result<Tensor> {
    let params = sizes(plan, rows, "combine's rows", rows.rows());
    let tokens = plan.slot.numel() / plan.top_k;
    let out = Tensor::empty(gpu, "combined rows", &[tokens, rows.cols()], rows.dtype())?;
    if let Some(base) = base {
        let same = (base.rows(), base.cols(), base.dtype()) == (tokens, rows.cols(), rows.dtype());
        assert!(same, "combine: base {:?} of {}, result {:?}", base.shape(), base.dtype(), out.shape());
    }
    let mut bindings = vec![rows.read(), plan.slot.read(), out.write()];
    bindings.extend(weights.map(Tensor::read));
    bindings.extend(base.map(Tensor::read));
    if let Some((tokens, dots)) = dots {
        assert_eq!(tokens.cols(), rows.cols(), "combine: {:?} and {:?}", tokens.shape(), rows.shape());
        bindings.extend([tokens.read(), dots.write()]);
    }
    let team = Team::of(rows.quads(), MOST_HELD, gpu.caps().software);
    let flags =
        Flags { weighted: weights.is_some(), based: base.is_some(), dots: dots.map(|(t, _)| t.dtype()) };
    let variant = rows_variant(&COMBINE, rows.dtype(), team, flags);
    gpu.dispatch(&COMBINE, &variant, &params, &bindings, team.groups(tokens))?;
    Ok(out)
}

/// Gradients of [`combine`]: of the rows `(R, D)`, in d_out's dtype, and of the weights if there were any, flat f32
/// `[R]`. The base's is `d_out` itself.
///
/// # Errors
/// As [`plan`].
#[track_caller]
pub fn combine_backward(
    gpu: &Gpu,
    d_out: &Tensor,
    rows: &Tensor,
    plan: &Plan,
    weights: Option<&Tensor>,
) -> Result<(Tensor, Option<Tensor>)> {
    combine_backward_for(gpu, d_out, rows, plan, weights, None)
        .map(|(d_rows, _, d_weights)| (d_rows, d_weights))
}

/// [`combine_backward`], and what the readers of the rows' gradient wish of its quantization, where one kernel can do both.
///
/// # Errors
/// As [`plan`].
#[track_caller]
pub(crate) fn combine_backward_for(
    gpu: &Gpu,
    d_out: &Tensor,
    rows: &Tensor,
    plan: &Plan,
    weights: Option<&Tensor>,
    wish: Option<Wish<'_>>,
) -> Result<(Tensor, Ready, Option<Tensor>)> {
    let (d_rows, ready) = gather_for(gpu, d_out, plan, weights, wish)?;
    Ok((d_rows, ready, weights.map(|_| products(gpu, d_out, rows, plan)).transpose()?))
}

/// For each slot the dot product of its token's vector and its row's, flat f32 `[R]`.
#[track_caller]
fn products(gpu: &Gpu, tokens: &Tensor, rows: &Tensor, plan: &Plan) -> Result<Tensor> {
    let params = sizes(plan, rows, "products' rows", rows.rows());
    assert_eq!(tokens.cols(), rows.cols(), "products: {:?} and {:?}", tokens.shape(), rows.shape());
    let out = Tensor::flat(gpu, "weight gradients", rows.rows(), DType::F32)?;
    let software = gpu.caps().software;
    let variant = variant(&PRODUCTS, software).quad("X", tokens.dtype()).quad("Y", rows.dtype());
    let (workgroup, lanes) = lanes(software);
    let groups = rows.rows().div_ceil(workgroup / lanes) as u32;
    let bindings = [tokens.read(), rows.read(), plan.slot.read(), out.write()];
    gpu.dispatch(&PRODUCTS, &variant, &params, &bindings, groups)?;
    Ok(out)
}

/// Slots of one chunk: about the root of all, so that counting and scanning take equally long.
fn chunk(slots: usize) -> usize {
    ((slots as f64).sqrt() as usize).next_power_of_two().max(32)
}

/// Checks that `slots` is the plan's and fills in the parameters of the row kernels.
#[track_caller]
fn sizes(plan: &Plan, of: &Tensor, what: &str, slots: usize) -> Dispatch {
    assert_eq!(slots, plan.order.numel(), "dispatch: {what} {:?}, slots of the plan", of.shape());
    Dispatch {
        slots: slots as u32,
        experts: plan.counts.numel() as u32,
        top_k: plan.top_k as u32,
        cols: of.cols() as u32,
        chunk: 0,
    }
}

/// Quads of a row that a thread of `combine` takes at a time, at most; of `gather` half as many.
const MOST_HELD: usize = 8;

/// Threads of a workgroup, and how many of them share one dot product or one expert's chunks.
fn lanes(software: bool) -> (usize, usize) {
    if software { (64, 1) } else { (256, 32) }
}

/// The variant that compiles the entry of `kernel`, with `workgroup` threads of which `lanes` share sums.
fn entry(kernel: &Kernel, (workgroup, tree): (usize, bool)) -> Variant {
    let names = ["COUNT", "SCAN", "PLACE", "GATHER", "SCATTER", "COMBINE", "PRODUCTS"];
    let all = Variant::new().constant("WG", workgroup as u32).constant("TREE", u32::from(tree));
    names
        .into_iter()
        .fold(all, |v, name| v.constant(name, u32::from(name.eq_ignore_ascii_case(kernel.entry))))
}

fn variant(kernel: &Kernel, software: bool) -> Variant {
    let (workgroup, lanes) = lanes(software);
    entry(kernel, (workgroup, lanes > 1)).constant("LANES", lanes as u32)
}

/// What `gather` and `combine` do beside moving rows: weights, a base, dot products with tokens of this dtype.
#[derive(Clone, Copy, Default)]
struct Flags {
    weighted: bool,
    based: bool,
    dots: Option<DType>,
}

fn rows_variant(kernel: &Kernel, x: DType, team: Team, flags: Flags) -> Variant {
    let variant = entry(kernel, (team.rows * team.lanes, flags.dots.is_some()));
    team.constants(variant)
        .constant("WEIGHTED", u32::from(flags.weighted))
        .constant("PLAIN", u32::from(!flags.weighted))
        .constant("BASED", u32::from(flags.based))
        .constant("DOTS", u32::from(flags.dots.is_some()))
        .quad("X", x)
        .quad("Y", flags.dots.unwrap_or(x))
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for software in [false, true] {
        for kernel in [COUNT, SCAN, PLACE] {
            all.push((kernel, variant(&kernel, software)));
        }
    }
    for x in [DType::F32, DType::BF16] {
        for y in [DType::F32, DType::BF16] {
            for software in [false, true] {
                all.push((PRODUCTS, variant(&PRODUCTS, software).quad("X", x).quad("Y", y)));
            }
        }
        for team in Team::kinds() {
            for (weighted, based) in [(false, false), (false, true), (true, false), (true, true)] {
                let flags = Flags { weighted, based, dots: None };
                for kernel in [GATHER, SCATTER] {
                    all.push((kernel, rows_variant(&kernel, x, team, flags)));
                }
                let dots = (weighted && team.rows * team.lanes == 256).then_some(x);
                all.push((COMBINE, rows_variant(&COMBINE, x, team, Flags { dots, ..flags })));
            }
        }
    }
    all
}

//! Quantization of bf16 by rows at the speed of memory, of rows in memory or of rows that are being made: the op that makes them
//! writes them, their codes and de-scales, and the tops of their columns in one pass. Same definition as [`super::quantize`], same
//! bits, for GPUs and tensors whose rows are whole units of eight columns and fit in registers.

use super::panels::{self, Codes, Order};
use super::quantize::{Quantized, Ready, Wish, formats, use_wide};
use super::quantize_choice::Axes;
use super::quantize_wide::{Groups, LANES, Tops, most_units, units};
use super::rmsnorm::{self, Norm};
use crate::Result;
use crate::gpu::{Binding, Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Lines { rows: u32, cols: u32, groups: u32, group_rows: u32, top_k: u32, rstd: u32, eps: f32 }
}

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/scales.wgsl"),
    include_str!("../../shaders/lib/panels.wgsl"),
    include_str!("../../shaders/lib/units.wgsl"),
    include_str!("../../shaders/lib/row_top.wgsl"),
    include_str!("../../shaders/lib/silu.wgsl"),
    include_str!("../../shaders/lib/norm.wgsl"),
    include_str!("../../shaders/lib/row_sources.wgsl"),
    include_str!("../../shaders/quantize_rows.wgsl")
);
const ROWS: Kernel = Kernel { name: "quantize_rows.rows", text: TEXT, entry: "rows" };
const GATED: Kernel = Kernel { name: "quantize_rows.gated", text: TEXT, entry: "rows" };
const ROUTED: Kernel = Kernel { name: "quantize_rows.routed", text: TEXT, entry: "rows" };
const NORMED: Kernel = Kernel { name: "quantize_rows.normed", text: TEXT, entry: "rows" };

/// Rows of a chunk where the tops of columns are taken too: of narrow rows that are there or only moved, and of all others.
const TOPS_CHUNKS: [usize; 2] = [64, 32];
/// Most units of a narrow row.
const NARROW: usize = 64;
/// Most units of a lane where rows are normed: those of two tensors are on their way beside the row.
const NORMED_UNITS: usize = 8;
/// At multiples of so many elements a part of a flat f32 tensor can be bound by itself.
const PART: usize = 64;

/// Where the rows come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    /// A tensor in memory: nothing is made.
    Memory(&'a Tensor),
    /// `silu(gate) * up`, both (M, K).
    Gated { gate: &'a Tensor, up: &'a Tensor },
    /// Rows of `x` (T, K) by slot, `order` from rows to slots of which each token has `top_k`, times the slot's weight if given.
    Routed { x: &'a Tensor, order: &'a Tensor, top_k: usize, weights: Option<&'a Tensor> },
    /// Rows that are normed. De-scales and, from element `rstd` on, the rows' factors go to `scales`, one binding: there are eight.
    Normed { norm: Norm<'a>, scales: &'a Tensor, rstd: usize },
}

impl Source<'_> {
    fn kind(&self) -> Kind {
        match self {
            Source::Memory(_) => Kind::Memory,
            Source::Gated { .. } => Kind::Gated,
            Source::Routed { weights, .. } => Kind::Routed { weighted: weights.is_some() },
            Source::Normed { norm, .. } => Kind::Normed { added: norm.sum.is_some() },
        }
    }

    fn inputs(&self) -> Vec<Binding> {
        match self {
            Source::Memory(x) => vec![x.read()],
            Source::Gated { gate, up } => vec![gate.read(), up.read()],
            Source::Routed { x, order, weights, .. } => {
                [x.read(), order.read()].into_iter().chain(weights.map(Tensor::read)).collect()
            }
            Source::Normed { norm: Norm { x, weight, sum, .. }, .. } => {
                [x.read(), weight.read()].into_iter().chain(sum.map(|[more, _]| more.read())).collect()
            }
        }
    }

    /// What it needs to know beside the sizes: slots of a token, where the factors begin, what is added to the mean square.
    fn parameters(&self) -> (u32, u32, f32) {
        match self {
            Source::Memory(_) | Source::Gated { .. } => (0, 0, 0.0),
            Source::Routed { top_k, .. } => (*top_k as u32, 0, 0.0),
            Source::Normed { norm, rstd, .. } => (0, *rstd as u32, norm.eps),
        }
    }
}

/// A source without its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Memory,
    Gated,
    Routed { weighted: bool },
    Normed { added: bool },
}

impl Kind {
    fn kernel(self) -> Kernel {
        match self {
            Kind::Memory => ROWS,
            Kind::Gated => GATED,
            Kind::Routed { .. } => ROUTED,
            Kind::Normed { .. } => NORMED,
        }
    }

    /// Tensors that it reads.
    fn inputs(self) -> u32 {
        match self {
            Kind::Memory => 1,
            Kind::Gated => 2,
            Kind::Routed { weighted: more } | Kind::Normed { added: more } => 2 + u32::from(more),
        }
    }

    /// Most units of a row that a lane holds, where it may hold `most` of one tensor.
    fn most(self, most: usize) -> usize {
        match self {
            Kind::Memory | Kind::Routed { .. } => most,
            Kind::Gated => most / 2,
            Kind::Normed { .. } => most.min(NORMED_UNITS),
        }
    }

    /// Most lanes of a row of `units` units.
    fn lanes(self, units: usize) -> usize {
        if matches!(self, Kind::Normed { .. }) { normed_team(units) } else { LANES }
    }

    fn constants(self, variant: Variant) -> Variant {
        let is = |yes: bool| u32::from(yes);
        let normed = matches!(self, Kind::Normed { .. });
        variant
            .constant("INPUTS", self.inputs())
            .constant("IN_MEMORY", is(self == Kind::Memory))
            .constant("MADE", is(self != Kind::Memory))
            .constant("GATED", is(self == Kind::Gated))
            .constant("ROUTED", is(matches!(self, Kind::Routed { .. })))
            .constant("WEIGHTED", is(self == Kind::Routed { weighted: true }))
            .constant("NORMED", is(normed))
            .constant("AT_ONCE", is(!normed))
            .constant("ADD", is(self == Kind::Normed { added: true }))
    }
}

/// How the work is cut.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Lanes of a workgroup, and those that share a row.
    lanes: usize,
    team: usize,
    /// Units of a row that a lane holds.
    units: usize,
    /// Rows of a chunk.
    chunk: usize,
    /// Whether teams hold whole rows without a remainder.
    whole: bool,
}

impl Shape {
    /// For rows of this kind, where a lane may hold `most` units; with the tops of columns or without.
    fn new(units: usize, most: usize, kind: Kind, tops: bool) -> Shape {
        match kind {
            Kind::Normed { .. } => Shape::normed(units, tops),
            _ if tops => Shape::tops(units, most, kind),
            _ => Shape::codes(units, most, kind),
        }
    }

    /// For codes alone: four units a lane, until a team is a typical subgroup; then as many as registers hold. Rows that are made want
    /// more lanes, each with fewer.
    fn codes(units: usize, most: usize, kind: Kind) -> Shape {
        let typical = if kind == Kind::Memory { 32 } else { LANES };
        let team = team(units, units.div_ceil(4).next_power_of_two().min(typical), most);
        Shape::of(LANES, team, units, LANES / team)
    }

    /// With the tops of columns: two or three units a lane, until a team is a typical subgroup, then from four to eight, and the
    /// next row's on their way. What is written out for each unit costs a launch that finds no code in the caches.
    fn tops(units: usize, most: usize, kind: Kind) -> Shape {
        let part = |share: usize| 1 << (units / share).max(1).ilog2();
        let start = part(2).min(32).max(part(4)).min(2 * LANES);
        let team = team(units, start, most);
        let lanes = if units > NARROW && team <= 32 { LANES } else { 2 * LANES };
        Shape::of(lanes, team, units, TOPS_CHUNKS[usize::from(units > NARROW || kind == Kind::Gated)])
    }

    /// As the norm's own kernel cuts rows: from 256 columns on with the team of the cut with tops.
    fn normed(units: usize, tops: bool) -> Shape {
        let (lanes, team) = (if tops { 2 * LANES } else { LANES }, normed_team(units));
        let chunk = if tops { TOPS_CHUNKS[usize::from(units > NARROW)] } else { lanes / team };
        Shape::of(lanes, team, units, chunk)
    }

    fn of(lanes: usize, team: usize, units: usize, chunk: usize) -> Shape {
        let per_lane = units.div_ceil(team);
        Shape { lanes, team, units: per_lane, chunk, whole: units == team * per_lane }
    }
}

/// Lanes of a row of `units` units: so many, or more where more than `most` units a lane would remain.
fn team(units: usize, mut team: usize, most: usize) -> usize {
    while units.div_ceil(team) > most {
        team *= 2;
    }
    team
}

/// Lanes of a normed row: half of those in the norm's own kernel, each with the quads of two of them.
fn normed_team(units: usize) -> usize {
    rmsnorm::lanes(2 * units) / 2
}

fn variant(
    kind: Kind,
    codes: DType,
    order: Order,
    shape: Shape,
    [grouped, tops, halves]: [bool; 3],
) -> Variant {
    let halves = halves && codes == DType::E4M3;
    kind.constants(formats(Variant::new(), codes))
        .constant("IN_PANELS", u32::from(order == Order::Panels))
        .constant("PANELS", panels::panels_per_block(codes) as u32)
        .constant("LANES", shape.lanes as u32)
        .constant("TEAM", shape.team as u32)
        .constant("UNITS", shape.units as u32)
        .constant("CHUNK", shape.chunk as u32)
        .constant("WHOLE", shape.whole.into())
        .constant("TOPS", tops.into())
        .constant("GROUPED", grouped.into())
        .constant("EVEN", (!grouped).into())
        .constant("HALVES", halves.into())
        .constant("EXACT", (!halves).into())
        .quad("X", DType::BF16)
        .quad("Q", codes)
}

/// Whether this kernel is to quantize the rows of `x` as they are made.
fn fits(gpu: &Gpu, x: &Tensor, kind: Kind, order: Order) -> bool {
    use_wide(gpu, x, Axes::Rows, order) && units(x) <= kind.lanes(units(x)) * kind.most(most_units(gpu))
}

/// The codes of rows in memory, and the tops of their columns if they are wished for.
///
/// # Errors
/// A result is over the adapter's limits, or what the device reported.
#[track_caller]
pub(super) fn in_memory(gpu: &Gpu, x: &Tensor, wish: Wish<'_>) -> Result<(Quantized<Codes>, Option<Tops>)> {
    quantize(gpu, Source::Memory(x), x, wish)
}

/// Writes the rows of `source` to `out`, and what is wished of them. `None`, and nothing is done, without a wish or where this
/// kernel cannot make it.
///
/// # Errors
/// As [`in_memory`].
#[track_caller]
pub(super) fn make(
    gpu: &Gpu,
    source: Source<'_>,
    out: &Tensor,
    wish: Option<Wish<'_>>,
) -> Result<Option<Ready>> {
    let Some(wish) = wish.filter(|w| fits(gpu, out, source.kind(), w.order)) else { return Ok(None) };
    let (rows, tops) = quantize(gpu, source, out, wish)?;
    Ok(Some(Ready { rows: Some(rows), tops }))
}

/// [`make`] of the normed rows `y`, with their factors, flat f32 (rows). Not for groups of rows: their ends would be a ninth binding.
///
/// # Errors
/// As [`in_memory`].
#[track_caller]
pub(super) fn norm(
    gpu: &Gpu,
    norm: Norm<'_>,
    y: &Tensor,
    wish: Option<Wish<'_>>,
) -> Result<Option<(Tensor, Ready)>> {
    let kind = Kind::Normed { added: norm.sum.is_some() };
    let even = |wish: &Wish<'_>| wish.tops.is_none_or(|groups| groups.offs.is_none());
    let Some(wish) = wish.filter(|w| even(w) && fits(gpu, y, kind, w.order)) else { return Ok(None) };
    let rstd = y.rows().next_multiple_of(PART);
    let scales = Tensor::flat(gpu, "de-scales and rstd", rstd + y.rows(), DType::F32)?;
    let (rows, tops) = quantize(gpu, Source::Normed { norm, scales: &scales, rstd }, y, wish)?;
    Ok(Some((scales.slice_flat(rstd, rstd + y.rows()), Ready { rows: Some(rows), tops })))
}

#[track_caller]
fn quantize(
    gpu: &Gpu,
    source: Source<'_>,
    x: &Tensor,
    wish: Wish<'_>,
) -> Result<(Quantized<Codes>, Option<Tops>)> {
    let (kind, Wish { dtype, order, tops }) = (source.kind(), wish);
    let shape = Shape::new(units(x), kind.most(most_units(gpu)), kind, tops.is_some());
    // Each weight has panels of its own.
    let weights = order == Order::Panels && x.shape().len() == 3;
    let groups = tops.unwrap_or_else(|| if weights { Groups::of_weight(x) } else { Groups::of_rows(None) });
    let scales = if let Source::Normed { scales, .. } = source { Some(scales) } else { None };
    let out = Quantized::of_rows(gpu, x, dtype, order, scales)?;
    let kept = tops.map(|groups| Tops::empty(gpu, x, groups, shape.chunk)).transpose()?;
    let mut bindings = source.inputs();
    bindings.extend(groups.offs.map(Tensor::read));
    bindings.extend([scales.unwrap_or(&out.descale).write(), out.codes.memory().write()]);
    bindings.extend(kept.as_ref().map(|tops| tops.memory().write()));
    bindings.extend((kind != Kind::Memory).then(|| x.write()));
    if let Source::Normed { norm: Norm { sum: Some([_, sum]), .. }, .. } = source {
        bindings.push(sum.write());
    }
    let (top_k, rstd, eps) = source.parameters();
    let params = Lines {
        rows: x.rows() as u32,
        cols: x.cols() as u32,
        groups: groups.count as u32,
        group_rows: groups.rows(x) as u32,
        top_k,
        rstd,
        eps,
    };
    let flags = [groups.offs.is_some(), tops.is_some(), gpu.caps().exact_halves];
    let variant = variant(kind, dtype, order, shape, flags);
    gpu.dispatch(&kind.kernel(), &variant, &params, &bindings, groups.chunks(x, shape.chunk) as u32)?;
    Ok((out, kept))
}

/// Every kind of variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    let widths = [(1, 4), (3, 20), (32, 4), (65, 20), (512, 4), (640, 20), (1280, 20)];
    let kinds = [
        (ROWS, Kind::Memory),
        (GATED, Kind::Gated),
        (ROUTED, Kind::Routed { weighted: false }),
        (ROUTED, Kind::Routed { weighted: true }),
        (NORMED, Kind::Normed { added: false }),
        (NORMED, Kind::Normed { added: true }),
    ];
    for (kernel, kind) in kinds {
        for (codes, halves) in [DType::E4M3, DType::F16].into_iter().flat_map(|c| [(c, true), (c, false)]) {
            for (i, (units, most)) in widths.into_iter().enumerate() {
                let most = kind.most(most);
                let shape = |tops| Shape::new(units.min(kind.lanes(units) * most), most, kind, tops);
                for order in [Order::Rows, Order::Panels].into_iter().take(1 + i % 2) {
                    all.push((kernel, variant(kind, codes, order, shape(false), [false, false, halves])));
                    // Normed rows have no groups.
                    let grouped =
                        [false, true].into_iter().take(if kernel.name == NORMED.name { 1 } else { 2 });
                    let flags = grouped.map(|grouped| [grouped, true, halves]);
                    all.extend(flags.map(|flags| (kernel, variant(kind, codes, order, shape(true), flags))));
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests;

//! Quantization of bf16 by columns at the speed of memory, for GPUs and tensors whose rows are whole units of eight columns: the
//! candidate next to [`super::quantize`]'s simple kernels, as [`super::quantize_rows`] by rows. Same definition, same bits.
//!
//! Where halves are known to be exact ([`Caps::exact_halves`](crate::gpu::Caps)), codes come by way of `pack2x16float`;
//! elsewhere from the exact encoder.

use super::panels::{self, Codes, Contraction, Order};
use super::quantize::{Quantized, formats};
use super::quantize_strips as strips;
use crate::Result;
use crate::gpu::{Gpu, Kernel, MatrixUnits, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Wide { rows: u32, cols: u32, groups: u32, group_rows: u32, blocks: u32 }
}

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/scales.wgsl"),
    include_str!("../../shaders/lib/panels.wgsl"),
    include_str!("../../shaders/lib/units.wgsl"),
    include_str!("../../shaders/lib/columns.wgsl"),
    include_str!("../../shaders/quantize_wide.wgsl")
);
const TOPS: Kernel = Kernel { name: "quantize_wide.tops", text: TEXT, entry: "main" };
const DESCALES: Kernel = Kernel { name: "quantize_wide.descales", text: TEXT, entry: "main" };
const CAST: Kernel = Kernel { name: "quantize_wide.cast", text: TEXT, entry: "main" };

/// Columns of a unit, and its bytes in bf16.
const UNIT: usize = 8;
const UNIT_BYTES: usize = 16;
/// Lanes of a workgroup.
pub(super) const LANES: usize = 128;
/// Most units that a lane holds at a time where registers are known to be many, and elsewhere (software drivers also take minutes to
/// compile what is written out many times).
const MANY_UNITS: usize = 20;
const FEW_UNITS: usize = 4;
/// Units of a tile that is cast into panels.
const PANEL_ACROSS: usize = 8;
/// Neighbouring rows that make a unit of steps in panels.
const STEPS: usize = 8;
/// Units of a tensor whose cast is longer than what its launch costs among others, which more code adds to.
const LONG: usize = 1 << 21;
/// Bytes of tops that all casts together may read before a pass that makes de-scales of them pays.
const TOPS_AGAIN: usize = 128 << 20;
/// Workgroups that keep a large GPU busy.
const BUSY: usize = 256;

/// Whether the kernels can quantize tensors like `x` here.
pub(super) fn can_run(gpu: &Gpu, x: &Tensor) -> bool {
    !gpu.caps().software && x.dtype() == DType::BF16 && x.quads() > 0 && x.quads().is_multiple_of(2)
}

/// Whether a lane is known to have registers for many units at a time.
pub(super) fn has_many_registers(gpu: &Gpu) -> bool {
    gpu.caps().coop == Some(MatrixUnits::Coop16)
}

/// Most units that a lane holds at a time.
pub(super) fn most_units(gpu: &Gpu) -> usize {
    if has_many_registers(gpu) { MANY_UNITS } else { FEW_UNITS }
}

/// Whether a row of `x` fits in the registers of a workgroup.
pub(super) fn fits_registers(gpu: &Gpu, x: &Tensor) -> bool {
    units(x) <= LANES * most_units(gpu)
}

/// Units of a row.
pub(super) fn units(x: &Tensor) -> usize {
    x.cols().div_ceil(UNIT)
}

/// The groups of rows whose columns have scales of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups<'a> {
    pub offs: Option<&'a Tensor>,
    pub count: usize,
    weights: bool,
}

impl<'a> Groups<'a> {
    /// By end rows, or one of all rows.
    pub fn of_rows(offs: Option<&'a Tensor>) -> Groups<'a> {
        Groups { offs, count: offs.map_or(1, Tensor::numel), weights: false }
    }

    /// The experts of a weight (E, N, K); one of (N, K).
    #[track_caller]
    pub fn of_weight(w: &Tensor) -> Groups<'a> {
        let shape = w.shape();
        assert!(shape.len() == 2 || shape.len() == 3, "weight {shape:?} is (N, K) or (E, N, K)");
        Groups { offs: None, count: if shape.len() == 3 { shape[0] } else { 1 }, weights: true }
    }

    /// What a product contracts of a tensor that is quantized along the columns of these groups.
    pub fn contraction(&self) -> Contraction<'a> {
        if self.weights { Contraction::WeightRows } else { Contraction::GroupRows(self.offs) }
    }

    /// Rows of each, where they are equal.
    pub fn rows(&self, x: &Tensor) -> usize {
        x.rows() / self.count.max(1)
    }

    /// Most chunks of `height` rows, as the shader counts them.
    pub fn chunks(&self, x: &Tensor, height: usize) -> usize {
        match self.offs {
            Some(_) => x.rows().div_ceil(height) + self.count,
            None => self.count * self.rows(x).div_ceil(height).max(1),
        }
    }
}

/// How the work is cut.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Lanes side by side in a tile.
    across: usize,
    /// Rows that a lane has in flight.
    batch: usize,
    /// Times eight rows that a lane casts into panels.
    turns: usize,
    /// Rows of a chunk, and of a tile that is cast.
    chunk: usize,
    cast: usize,
}

impl Shape {
    /// For columns: chunks as high as there are enough of them. Into panels, neighbouring lanes take rows, so that they fill
    /// whole sectors of memory between them, and tiles take whole blocks.
    fn columns(rows: usize, units: usize, most: usize, codes: DType, order: Order) -> Shape {
        let panels = order == Order::Panels;
        let across = units.next_power_of_two().min(if panels { PANEL_ACROSS } else { 32 });
        let blocks = units.div_ceil(across);
        let enough = |chunk: &usize| rows.div_ceil(*chunk) * blocks >= BUSY;
        let chunk = [128, 64].into_iter().find(enough).unwrap_or(32);
        // Codes are half as long as halves, and leave registers for rows of a second turn.
        let has_room = codes == DType::E4M3 && across == PANEL_ACROSS && most == MANY_UNITS;
        let turns = if has_room && rows * units >= LONG { 2 } else { 1 };
        let cast = if panels { LANES / across * STEPS * turns } else { chunk };
        Shape { across, batch: (most / 2).min(8), turns, chunk, cast }
    }
}

/// What a dispatch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// Leaves the tops of each chunk.
    Tops,
    /// Makes the de-scales of each group of them.
    Descales,
    /// Casts, by de-scales that are there, or that each tile makes of the tops if `merged`.
    Cast { merged: bool },
}

impl Pass {
    fn kernel(self) -> Kernel {
        match self {
            Pass::Tops => TOPS,
            Pass::Descales => DESCALES,
            Pass::Cast { .. } => CAST,
        }
    }

    /// The passes behind the tops of `chunks` chunks in so many groups, for casts in `tiles` tiles one below the other. Offsets may
    /// well put half of all rows into one group. Not into rows of codes: 154 us instead of 147 for both axes of 16384 x 5120 in 8 groups.
    fn casts([chunks, groups, tiles, units]: [usize; 4], ragged: bool, order: Order) -> &'static [Pass] {
        let of_group = if ragged && groups > 1 { chunks / 2 } else { chunks / groups.max(1) };
        if order == Order::Panels && tiles * of_group * units * UNIT_BYTES > TOPS_AGAIN {
            return &[Pass::Descales, Pass::Cast { merged: false }];
        }
        &[Pass::Cast { merged: true }]
    }

    /// What the pass looks at of the cut, so that its kernel serves other cuts too. Where there are only tops to read, few units side
    /// by side, and many lanes below each other.
    fn own(self, shape: Shape) -> Shape {
        let none = Shape { batch: 0, turns: 0, cast: 0, ..shape };
        match self {
            Pass::Tops => Shape { batch: shape.batch, ..none },
            Pass::Descales => Shape { across: shape.across.min(2), ..none },
            Pass::Cast { merged: true } => shape,
            Pass::Cast { merged: false } => Shape { chunk: 0, ..shape },
        }
    }
}

fn variant(pass: Pass, codes: DType, shape: Shape, order: Order, [grouped, halves]: [bool; 2]) -> Variant {
    let shape = pass.own(shape);
    let halves = halves && codes == DType::E4M3;
    let casts = matches!(pass, Pass::Cast { .. });
    let merged = pass == Pass::Cast { merged: true };
    let leaves = merged || pass == Pass::Descales;
    let in_panels = casts && order == Order::Panels;
    formats(Variant::new(), codes)
        .constant("TOPS", (pass == Pass::Tops).into())
        .constant("DESCALES", (pass == Pass::Descales).into())
        .constant("CASTS", casts.into())
        .constant("LEAVES_DESCALES", leaves.into())
        .constant("MERGED", merged.into())
        .constant("GIVEN", (!merged).into())
        .constant("IN_PANELS", in_panels.into())
        .constant("IN_ROWS", (!in_panels).into())
        .constant("PANELS", panels::panels_per_block(codes) as u32)
        .constant("LANES", LANES as u32)
        .constant("ACROSS", shape.across as u32)
        .constant("BATCH", shape.batch as u32)
        .constant("TURNS", shape.turns as u32)
        .constant("CHUNK", shape.chunk as u32)
        .constant("CAST", shape.cast as u32)
        .constant("GROUPED", grouped.into())
        .constant("HALVES", halves.into())
        .constant("EXACT", (!halves).into())
        .quad("X", DType::BF16)
        .quad("Q", codes)
}

/// The largest magnitudes of the columns of each chunk of rows, as bf16.
#[derive(Clone, Debug)]
pub(crate) struct Tops {
    memory: Tensor,
    chunk: usize,
}

impl Tops {
    /// Where they lie.
    pub(crate) fn memory(&self) -> &Tensor {
        &self.memory
    }

    /// Memory for those of `x`, in chunks of `chunk` rows of these groups.
    pub(super) fn empty(gpu: &Gpu, x: &Tensor, groups: Groups, chunk: usize) -> Result<Tops> {
        let shape = [groups.chunks(x, chunk), units(x) * UNIT];
        Ok(Tops { memory: Tensor::empty(gpu, "tops of columns", &shape, DType::BF16)?, chunk })
    }
}

/// As [`super::quantize::along_columns`]; x is read once where the tops of its columns are there already, and in one dispatch where
/// strips pay.
#[track_caller]
pub(super) fn columns(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    tops: Option<&Tops>,
    dtype: DType,
    order: Order,
) -> Result<Quantized<Codes>> {
    if tops.is_none()
        && let Some(made) = strips::columns(gpu, x, groups, dtype, order)?
    {
        return Ok(made);
    }
    let shape = Shape::columns(x.rows(), units(x), most_units(gpu), dtype, order);
    let shape = Shape { chunk: tops.map_or(shape.chunk, |tops| tops.chunk), ..shape };
    let [chunks, tiles] = [shape.chunk, shape.cast].map(|height| groups.chunks(x, height));
    let passes = Pass::casts([chunks, groups.count, tiles, units(x)], groups.offs.is_some(), order);
    run(gpu, x, groups, tops, (dtype, order), (shape, passes))
}

/// Codes in this cut, by these passes behind the tops.
#[track_caller]
fn run(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    tops: Option<&Tops>,
    (dtype, order): (DType, Order),
    (shape, passes): (Shape, &[Pass]),
) -> Result<Quantized<Codes>> {
    let out = Quantized::of_columns(gpu, x, groups, dtype, order)?;
    let tops = match tops {
        Some(tops) => tops.clone(),
        None => {
            let made = Tops::empty(gpu, x, groups, shape.chunk)?;
            by_columns(gpu, x, groups, &out, shape, &made.memory, Pass::Tops)?;
            made
        }
    };
    let chunks = groups.chunks(x, shape.chunk);
    assert_eq!(tops.memory.rows(), chunks, "quantization by columns: chunks of the tops, of the groups");
    for pass in passes {
        by_columns(gpu, x, groups, &out, shape, &tops.memory, *pass)?;
    }
    Ok(out)
}

fn by_columns(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    out: &Quantized<Codes>,
    shape: Shape,
    tops: &Tensor,
    pass: Pass,
) -> Result<()> {
    let (order, codes) = (out.codes.order(), out.codes.memory());
    let flags = [groups.offs.is_some(), gpu.caps().exact_halves];
    let variant = variant(pass, codes.dtype(), shape, order, flags);
    let offs = groups.offs.unwrap_or(x).read();
    let (bindings, heights) = match pass {
        Pass::Tops => (vec![offs, x.read(), tops.write()], groups.chunks(x, shape.chunk)),
        Pass::Descales => (vec![offs, tops.read(), out.descale.write()], groups.count),
        Pass::Cast { merged } => {
            let mut bindings = vec![offs, x.read(), codes.write()];
            bindings.extend(if merged {
                vec![tops.read(), out.descale.write()]
            } else {
                vec![out.descale.read()]
            });
            (bindings, groups.chunks(x, shape.cast))
        }
    };
    let blocks = units(x).div_ceil(pass.own(shape).across);
    let params = Wide {
        rows: x.rows() as u32,
        cols: x.cols() as u32,
        groups: groups.count as u32,
        group_rows: groups.rows(x) as u32,
        blocks: blocks as u32,
    };
    gpu.dispatch(&pass.kernel(), &variant, &params, &bindings, (blocks * heights) as u32)
}

/// Every kind of variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    let cast = |merged| (CAST, Pass::Cast { merged });
    let passes = [(TOPS, Pass::Tops), (DESCALES, Pass::Descales), cast(true), cast(false)];
    let widths = [(1, 4), (3, 20), (32, 4), (65, 20), (512, 4), (640, 20), (2560, 20)];
    for (codes, halves) in [DType::E4M3, DType::F16].into_iter().flat_map(|c| [(c, true), (c, false)]) {
        for (i, (units, most)) in widths.into_iter().enumerate() {
            for order in [Order::Rows, Order::Panels].into_iter().take(1 + i % 2) {
                let columns = Shape::columns(2048, units, most, codes, order);
                let flags = [true, false].map(|grouped| [grouped, halves]);
                for (kernel, pass) in passes {
                    all.extend(flags.map(|flags| (kernel, variant(pass, codes, columns, order, flags))));
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests;

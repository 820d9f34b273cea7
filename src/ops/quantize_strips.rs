//! Quantization of bf16 by columns, or along both axes, in one dispatch: a workgroup for each strip of columns of a group of rows. Same
//! definition as [`super::quantize`], same bits. [`super::quantize_wide`] asks it first, and cuts groups that are long or few into
//! tiles instead, in two dispatches.

use super::panels::{self, Codes, Order};
use super::quantize::{Quantized, formats};
use super::quantize_wide::{Groups, has_many_registers, units};
use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Strips { rows: u32, cols: u32, groups: u32, group_rows: u32 }
}

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/scales.wgsl"),
    include_str!("../../shaders/lib/panels.wgsl"),
    include_str!("../../shaders/lib/units.wgsl"),
    include_str!("../../shaders/lib/row_top.wgsl"),
    include_str!("../../shaders/lib/columns.wgsl"),
    include_str!("../../shaders/quantize_strips.wgsl")
);
const COLUMNS: Kernel = Kernel { name: "quantize_strips.columns", text: TEXT, entry: "main" };
const BOTH: Kernel = Kernel { name: "quantize_strips.both", text: TEXT, entry: "main" };

/// Neighbouring rows that a lane has at a time.
const BLOCK: usize = 8;
/// Lanes of a workgroup, at least and at most.
const LANES: [usize; 2] = [64, 256];
/// Most blocks of rows that a lane keeps, where registers are many.
const HELD: usize = 3;
/// Strips of all groups that pay where a group is too long for a launch to matter.
const ENOUGH: usize = 128;
/// Strips of one group that pay if it has most of the rows: into panels, and into rows of codes, which tiles write faster.
const ENOUGH_OF_ONE: [usize; 2] = [64, 160];
/// Rows of a group with which one launch matters more than anything else.
const SHORT: usize = 1024;
/// Most rows of a group for columns, and for both axes.
const LONGEST: [usize; 2] = [8192, 5120];
/// Bytes of x that a cache holds beside its codes, so that strips may write less than a sector of memory at a time.
const CACHED: usize = 16 << 20;

/// What is to be quantized, as far as the cut depends on it.
#[derive(Clone, Copy, Debug)]
struct Work {
    /// Rows of a group, on average, and units of a row.
    rows: usize,
    units: usize,
    groups: usize,
    /// Whether groups may have any size.
    ragged: bool,
    order: Order,
    /// Whether rows are quantized too.
    both: bool,
    /// Whether registers are known to be many.
    many: bool,
}

/// How the work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    lanes: usize,
    /// Units of a strip.
    across: usize,
    /// Blocks of rows that a lane keeps in registers.
    held: usize,
    /// Lanes that share a row, where rows are quantized too.
    team: usize,
}

impl Shape {
    /// As measured on the H200 (docs/log.md). `None` where strips do not pay.
    fn of(work: Work) -> Option<Shape> {
        let Work { rows, both, .. } = work;
        let longest = if work.many { LONGEST[usize::from(both)] } else { SHORT };
        // Into rows of codes, tiles are nearly as fast by uniform groups, and faster by ragged ones.
        let tiles_pay = both && work.ragged && work.order == Order::Rows;
        if rows > longest || tiles_pay {
            return None;
        }
        let across = work.across()?;
        let team = if both { work.team()? } else { 1 };
        let blocks = rows.div_ceil(BLOCK).max(1);
        let lanes = (across * blocks).next_power_of_two().clamp(LANES[0].max(team), LANES[1]);
        let held = if work.many { blocks.div_ceil(lanes / across).min(HELD) } else { 0 };
        Some(Shape { lanes, across, held, team })
    }
}

impl Work {
    /// Units of a strip: many, since reads of whole lines are faster, while there are strips enough.
    fn across(self) -> Option<usize> {
        let strips = |across: usize| self.units.div_ceil(across);
        let widest = if self.both || (SHORT < self.rows && self.rows <= 4 * SHORT) { 4 } else { 8 };
        let of_one = match self.ragged {
            true => ENOUGH_OF_ONE[usize::from(self.order == Order::Rows)],
            false => 1,
        };
        let enough = |across: usize| strips(across) * self.groups >= ENOUGH && strips(across) >= of_one;
        let across = [8, 4, 2].into_iter().filter(|across| *across <= widest).find(|across| enough(*across));
        let across = match across {
            Some(across) => across,
            None if self.ragged => 2,
            None => 1,
        };
        let is_short = self.rows <= SHORT && !self.ragged;
        // Both axes save a launch and a reading.
        let pays = enough(across) || is_short || (self.both && strips(across) * self.groups >= ENOUGH);
        let bytes = self.rows * self.groups * self.units * 16;
        let whole_sectors = across >= 4 || self.order == Order::Panels || bytes <= CACHED;
        (pays && whole_sectors).then_some(across)
    }

    /// Lanes that share a row: eight units each, until a team is a typical subgroup; then as many as registers hold.
    fn team(self) -> Option<usize> {
        let most = if self.many { 32 } else { 4 };
        let mut team = self.units.div_ceil(8).next_power_of_two().min(32);
        while self.units.div_ceil(team) > most {
            team *= 2;
        }
        (team <= LANES[1]).then_some(team)
    }
}

/// The codes of columns, of rows first if `both`.
type Results = (Option<Quantized<Codes>>, Quantized<Codes>);

/// As [`super::quantize_wide::columns`] without tops. `None`, and nothing is done, where strips do not pay.
///
/// # Errors
/// A result is over the adapter's limits, or what the device reported.
#[track_caller]
pub(super) fn columns(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    dtype: DType,
    order: Order,
) -> Result<Option<Quantized<Codes>>> {
    let shape = Shape::of(work(gpu, x, groups, order, false));
    Ok(shape.map(|shape| run(gpu, x, groups, (dtype, order), shape, false)).transpose()?.map(|(_, c)| c))
}

/// Whether [`columns`] would take `x`.
pub(super) fn take(gpu: &Gpu, x: &Tensor, groups: Groups, order: Order) -> bool {
    Shape::of(work(gpu, x, groups, order, false)).is_some()
}

/// As [`super::quantize::both_axes`]. `None`, and nothing is done, where strips do not pay.
///
/// # Errors
/// As [`columns`].
#[track_caller]
pub(super) fn both(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    dtype: DType,
    order: Order,
) -> Result<Option<(Quantized<Codes>, Quantized<Codes>)>> {
    let shape = Shape::of(work(gpu, x, groups, order, true));
    let made = shape.map(|shape| run(gpu, x, groups, (dtype, order), shape, true)).transpose()?;
    Ok(made.and_then(|(rows, columns)| Some((rows?, columns))))
}

fn work(gpu: &Gpu, x: &Tensor, groups: Groups, order: Order, both: bool) -> Work {
    let (rows, units, ragged) = (groups.rows(x), units(x), groups.offs.is_some());
    Work { rows, units, groups: groups.count, ragged, order, both, many: has_many_registers(gpu) }
}

#[track_caller]
fn run(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    (dtype, order): (DType, Order),
    shape: Shape,
    both: bool,
) -> Result<Results> {
    let columns = Quantized::of_columns(gpu, x, groups, dtype, order)?;
    let rows = both.then(|| Quantized::of_rows(gpu, x, dtype, order, None)).transpose()?;
    let offs = groups.offs.unwrap_or(x).read();
    let mut bindings = vec![x.read(), offs, columns.descale.write(), columns.codes.memory().write()];
    bindings.extend(rows.iter().flat_map(|rows| [rows.descale.write(), rows.codes.memory().write()]));
    let params = Strips {
        rows: x.rows() as u32,
        cols: x.cols() as u32,
        groups: groups.count as u32,
        group_rows: groups.rows(x) as u32,
    };
    // Rows past the last offset are one more group.
    let all = groups.count + usize::from(groups.offs.is_some());
    let strips = units(x).div_ceil(shape.across) * all;
    let tiles = if both { x.rows().div_ceil(shape.lanes / shape.team) + all } else { 0 };
    let flags = [groups.offs.is_some(), both, gpu.caps().exact_halves];
    let variant = variant(dtype, order, shape, units(x), flags);
    let kernel = if both { BOTH } else { COLUMNS };
    gpu.dispatch(&kernel, &variant, &params, &bindings, (strips + tiles) as u32)?;
    Ok((rows, columns))
}

fn variant(
    codes: DType,
    order: Order,
    shape: Shape,
    units: usize,
    [grouped, both, halves]: [bool; 3],
) -> Variant {
    let halves = halves && codes == DType::E4M3;
    let per_lane = if both { units.div_ceil(shape.team) } else { 1 };
    formats(Variant::new(), codes)
        .constant("IN_PANELS", u32::from(order == Order::Panels))
        .constant("PANELS", panels::panels_per_block(codes) as u32)
        .constant("LANES", shape.lanes as u32)
        .constant("ACROSS", shape.across as u32)
        .constant("HELD", shape.held as u32)
        .constant("LEAVES_DESCALES", 1)
        .constant("COLUMNS_ALONE", (!both).into())
        .constant("BOTH", both.into())
        .constant("TEAM", shape.team as u32)
        .constant("UNITS", per_lane as u32)
        .constant("GROUPED", grouped.into())
        .constant("HALVES", halves.into())
        .constant("EXACT", (!halves).into())
        .quad("X", DType::BF16)
        .quad("Q", codes)
}

/// Every kind of variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    let works = [(256, 32, 1), (768, 32, 1), (512, 640, 16), (2048, 64, 8), (2048, 640, 8), (5120, 256, 8)];
    for (codes, halves) in [DType::E4M3, DType::F16].into_iter().flat_map(|c| [(c, true), (c, false)]) {
        for (rows, units, groups) in works {
            for (i, order) in [Order::Rows, Order::Panels].into_iter().cycle().take(4).enumerate() {
                for (kernel, both) in [(COLUMNS, false), (BOTH, true)] {
                    let (ragged, many) = (i < 2, halves);
                    let work = Work { rows, units, groups, ragged, order, both, many };
                    if let Some(shape) = Shape::of(work) {
                        all.push((kernel, variant(codes, order, shape, units, [ragged, both, halves])));
                    }
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests;

//! Quantization of bf16 at the speed of memory: the candidate next to [`super::quantize`]'s simple kernels, for GPUs and tensors
//! whose rows are whole units of eight columns. Same definition, same bits.
//!
//! Where halves are known to be exact (see [`exact_halves`]), codes come by way of `pack2x16float`; elsewhere from the exact encoder.

use super::panels::{self, Codes, Contraction, Order};
use super::quantize::{Quantized, formats};
use crate::Result;
use crate::gpu::{Gpu, Kernel, MatrixUnits, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Wide { rows: u32, cols: u32, groups: u32, group_rows: u32, casts: u32, tops: u32 }
}

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/scales.wgsl"),
    include_str!("../../shaders/lib/panels.wgsl"),
    include_str!("../../shaders/lib/units.wgsl"),
    include_str!("../../shaders/quantize_wide.wgsl")
);
const ROWS: Kernel = Kernel { name: "quantize_wide.rows", text: TEXT, entry: "rows" };
const COLUMNS: Kernel = Kernel { name: "quantize_wide.columns", text: TEXT, entry: "columns" };

/// Columns of a unit: 16 bytes of bf16.
const UNIT: usize = 8;
/// Lanes of a workgroup.
const LANES: usize = 128;
/// Most units that a lane holds at a time where registers are known to be many, and elsewhere (software drivers also take minutes to
/// compile what is written out many times).
const MANY_UNITS: usize = 20;
const FEW_UNITS: usize = 4;
/// Rows of a chunk where rows and the tops of columns are taken together: of narrow and of wide rows.
const BOTH_CHUNKS: [usize; 2] = [64, 32];
/// Most units of a narrow row.
const NARROW: usize = 64;
/// Rows of a tile that is cast into panels: whole blocks of 64.
const PANEL_CAST: usize = 128;
/// Workgroups that keep a large GPU busy.
const BUSY: usize = 256;

/// Whether the kernels can quantize `x` here.
pub(super) fn can_run(gpu: &Gpu, x: &Tensor) -> bool {
    !gpu.caps().software && x.dtype() == DType::BF16 && x.quads() > 0 && x.quads().is_multiple_of(2)
}

/// Most units that a lane holds at a time.
fn most_units(gpu: &Gpu) -> usize {
    if gpu.caps().coop == Some(MatrixUnits::Coop16) { MANY_UNITS } else { FEW_UNITS }
}

/// Whether [`rows`] and [`both`] can hold a row of `x` in registers.
pub(super) fn fits_registers(gpu: &Gpu, x: &Tensor) -> bool {
    units(x) <= LANES * most_units(gpu)
}

fn units(x: &Tensor) -> usize {
    x.cols().div_ceil(UNIT)
}

/// Whether `pack2x16float` rounds to nearest even and keeps subnormal halves, which WGSL does not promise: seen where there are matrix
/// units of 16x16x16, and on the software adapters that stand in for a GPU in tests.
fn exact_halves(gpu: &Gpu) -> bool {
    gpu.caps().coop == Some(MatrixUnits::Coop16) || gpu.options().treat_as_hardware
}

/// The groups of rows whose columns have scales of their own.
#[derive(Clone, Copy)]
pub(super) struct Groups<'a> {
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
    fn rows(&self, x: &Tensor) -> usize {
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
    /// Lanes that share a row; lanes side by side in a tile of columns.
    team: usize,
    /// Units of a row that a lane holds.
    units: usize,
    /// Rows that a lane has in flight.
    batch: usize,
    /// Rows of a chunk, and of a tile that is cast.
    chunk: usize,
    cast: usize,
    /// Whether teams hold whole rows without a remainder.
    whole: bool,
}

impl Shape {
    /// For `rows` alone: four units a lane, until a team is a typical subgroup; then as many as registers hold.
    fn rows(units: usize, most: usize) -> Shape {
        let mut team = units.div_ceil(4).next_power_of_two().min(32);
        while units.div_ceil(team) > most {
            team *= 2;
        }
        let (per_lane, batch) = (units.div_ceil(team), 1);
        let chunk = batch * (LANES / team);
        Shape { team, units: per_lane, batch, chunk, cast: chunk, whole: units == team * per_lane }
    }

    /// For `rows` with the tops of columns: up to four rows at a time.
    fn both(units: usize, most: usize) -> Shape {
        let chunk = BOTH_CHUNKS[usize::from(units > NARROW)];
        let mut team = units.div_ceil(4).next_power_of_two().min(LANES);
        while units.div_ceil(team) > most {
            team *= 2;
        }
        let per_lane = units.div_ceil(team);
        let batch = (most / per_lane).clamp(1, 2);
        Shape { team, units: per_lane, batch, chunk, cast: chunk, whole: units == team * per_lane }
    }

    /// For columns: chunks as high as there are enough of them. Into panels, neighbouring lanes take rows, so that they fill
    /// whole sectors of memory between them, and tiles take whole blocks.
    fn columns(rows: usize, units: usize, most: usize, order: Order) -> Shape {
        let panels = order == Order::Panels;
        let team = units.next_power_of_two().min(if panels { 8 } else { 32 });
        let blocks = units.div_ceil(team);
        let enough = |chunk: &usize| rows.div_ceil(*chunk) * blocks >= BUSY;
        let chunk = [128, 64].into_iter().find(enough).unwrap_or(32);
        let cast = if panels { PANEL_CAST } else { chunk };
        Shape { team, units: 1, batch: (most / 2).min(8), chunk, cast, whole: units.is_multiple_of(team) }
    }
}

fn variant(codes: DType, shape: Shape, order: Order, [grouped, tops, halves]: [bool; 3]) -> Variant {
    let halves = halves && codes == DType::E4M3;
    formats(Variant::new(), codes)
        .constant("IN_PANELS", u32::from(order == Order::Panels))
        .constant("PANELS", panels::panels_per_block(codes) as u32)
        .constant("LANES", LANES as u32)
        .constant("TEAM", shape.team as u32)
        .constant("ACROSS", shape.team as u32)
        .constant("UNITS", shape.units as u32)
        .constant("BATCH", shape.batch as u32)
        .constant("CHUNK", shape.chunk as u32)
        .constant("CAST", shape.cast as u32)
        .constant("WHOLE", shape.whole.into())
        .constant("TOPS", tops.into())
        .constant("GROUPED", grouped.into())
        .constant("HALVES", halves.into())
        .constant("EXACT", (!halves).into())
        .quad("X", DType::BF16)
        .quad("Q", codes)
}

fn params(x: &Tensor, groups: Groups) -> Wide {
    Wide {
        rows: x.rows() as u32,
        cols: x.cols() as u32,
        groups: groups.count as u32,
        group_rows: groups.rows(x) as u32,
        casts: 0,
        tops: 0,
    }
}

/// As [`super::quantize::along_rows`].
#[track_caller]
pub(super) fn rows(gpu: &Gpu, x: &Tensor, dtype: DType, order: Order) -> Result<Quantized<Codes>> {
    let out = Quantized::of_rows(gpu, x, dtype, order)?;
    let shape = Shape::rows(units(x), most_units(gpu));
    let variant = variant(dtype, shape, order, [false, false, exact_halves(gpu)]);
    // Each weight has panels of its own.
    let weights = order == Order::Panels && x.shape().len() == 3;
    let groups = if weights { Groups::of_weight(x) } else { Groups::of_rows(None) };
    let bindings = [x.read(), x.read(), out.descale.write(), out.codes.memory().write()];
    let tiles = groups.chunks(x, shape.chunk) as u32;
    gpu.dispatch(&ROWS, &variant, &params(x, groups), &bindings, tiles)?;
    Ok(out)
}

/// As [`super::quantize::along_columns`].
#[track_caller]
pub(super) fn columns(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    dtype: DType,
    order: Order,
) -> Result<Quantized<Codes>> {
    let shape = Shape::columns(x.rows(), units(x), most_units(gpu), order);
    let tops = tops(gpu, x, groups, shape)?;
    let out = Quantized::of_columns(gpu, x, groups, dtype, order)?;
    for passes in [Pass::Tops, Pass::Cast] {
        by_columns(gpu, x, groups, &out, shape, &tops, passes)?;
    }
    Ok(out)
}

/// One array of tops for each chunk.
fn tops(gpu: &Gpu, x: &Tensor, groups: Groups, shape: Shape) -> Result<Tensor> {
    Tensor::empty(gpu, "tops of columns", &[groups.chunks(x, shape.chunk), units(x) * UNIT], DType::BF16)
}

/// What a dispatch over tiles of columns does.
#[derive(Clone, Copy)]
enum Pass {
    Tops,
    Cast,
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
    let order = if matches!(out.codes, Codes::Rows(_)) { Order::Rows } else { Order::Panels };
    let codes = out.codes.memory();
    let variant = variant(codes.dtype(), shape, order, [groups.offs.is_some(), false, exact_halves(gpu)]);
    let offs = groups.offs.unwrap_or(x).read();
    let bindings = [x.read(), offs, out.descale.write(), codes.write(), tops.write()];
    let blocks = units(x).div_ceil(shape.team);
    let (casts, height) = match pass {
        Pass::Tops => (0, shape.chunk),
        Pass::Cast => (blocks, shape.cast),
    };
    let params = Wide { casts: casts as u32, tops: (blocks - casts) as u32, ..params(x, groups) };
    gpu.dispatch(&COLUMNS, &variant, &params, &bindings, (blocks * groups.chunks(x, height)) as u32)
}

/// As [`super::quantize::both`].
#[track_caller]
pub(super) fn both(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    dtype: DType,
    order: Order,
) -> Result<(Quantized<Codes>, Quantized<Codes>)> {
    let by_row = Quantized::of_rows(gpu, x, dtype, order)?;
    let shape = Shape::both(units(x), most_units(gpu));
    let columns = Shape::columns(x.rows(), units(x), most_units(gpu), order);
    let columns = Shape { chunk: shape.chunk, ..columns };
    let tops = tops(gpu, x, groups, shape)?;
    let variant = variant(dtype, shape, order, [groups.offs.is_some(), true, exact_halves(gpu)]);
    let bindings = [
        x.read(),
        groups.offs.unwrap_or(x).read(),
        by_row.descale.write(),
        by_row.codes.memory().write(),
        tops.write(),
    ];
    let tiles = groups.chunks(x, shape.chunk) as u32;
    gpu.dispatch(&ROWS, &variant, &params(x, groups), &bindings, tiles)?;
    let by_column = Quantized::of_columns(gpu, x, groups, dtype, order)?;
    by_columns(gpu, x, groups, &by_column, columns, &tops, Pass::Cast)?;
    Ok((by_row, by_column))
}

/// Every kind of variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    let widths = [(1, 4), (3, 20), (32, 4), (65, 20), (512, 4), (640, 20), (2560, 20)];
    for (codes, halves) in [DType::E4M3, DType::F16].into_iter().flat_map(|c| [(c, true), (c, false)]) {
        for (i, (units, most)) in widths.into_iter().enumerate() {
            for order in [Order::Rows, Order::Panels].into_iter().take(1 + i % 2) {
                let rows = Shape::rows(units, most);
                all.push((ROWS, variant(codes, rows, order, [false, false, halves])));
                for grouped in [true, false] {
                    let both = Shape::both(units, most);
                    all.push((ROWS, variant(codes, both, order, [grouped, true, halves])));
                    let columns = Shape::columns(2048, units, most, order);
                    all.push((COLUMNS, variant(codes, columns, order, [grouped, false, halves])));
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{Groups, Order};
    use crate::gpu::{DeviceChoice, Gpu, Options};
    use crate::num::rng::Stream;
    use crate::num::{DType, bf16};
    use crate::ops::panels::{Codes, Contraction};
    use crate::ops::quantize::Quantized;
    use crate::tensor::Tensor;

    fn bytes(gpu: &Gpu, codes: &Codes) -> Vec<u8> {
        let (buffer, offset) = codes.memory().memory();
        gpu.download(buffer, offset, codes.memory().bytes()).unwrap()
    }

    /// In panels the codes are those that lie row by row, put in panels afterwards; poisoned memory shows what is not written.
    #[test]
    fn panels_hold_the_codes_of_rows() {
        let options = Options { treat_as_hardware: true, poison: true, ..Options::default() };
        let gpu = Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter");
        let ends = Tensor::from_u32(&gpu, "ends", &[0, 3, 70, 70, 134, 200]).unwrap();
        let offs = Groups::of_rows(Some(&ends));
        let weights = Groups { offs: None, count: 3, weights: true };
        for (shape, groups, dtype) in
            [(vec![230, 72], offs, DType::E4M3), (vec![3, 66, 24], weights, DType::F16)]
        {
            let numel: usize = shape.iter().product();
            let stream = Stream::new(0, "x");
            let mut values: Vec<f32> = (0..numel as u64).map(|i| bf16::round(stream.normal(i))).collect();
            values[5 * shape[shape.len() - 1] + 3] = f32::NAN;
            let x = Tensor::from_f32(&gpu, "x", &shape, DType::BF16, &values).unwrap();
            assert!(super::can_run(&gpu, &x));
            let same = |a: &Quantized<Codes>, b: &Quantized<Codes>, along: Contraction<'_>| {
                let b_codes = b.codes.to_panels(&gpu, along).unwrap();
                assert!(matches!(a.codes, Codes::Panels(_)) && matches!(b.codes, Codes::Rows(_)));
                assert_eq!(bytes(&gpu, &a.codes), bytes(&gpu, &b_codes), "{along:?} {shape:?} {dtype}");
                let bits = |t: &Tensor| -> Vec<u32> {
                    t.to_f32(&gpu).unwrap().iter().map(|v| v.to_bits()).collect()
                };
                assert_eq!(bits(&a.descale), bits(&b.descale));
            };
            let orders = [Order::Panels, Order::Rows];
            let [rows, by_rows] = orders.map(|o| super::rows(&gpu, &x, dtype, o).unwrap());
            same(&rows, &by_rows, Contraction::Columns);
            let [columns, by_columns] = orders.map(|o| super::columns(&gpu, &x, groups, dtype, o).unwrap());
            same(&columns, &by_columns, groups.contraction());
            let (rows, columns) = super::both(&gpu, &x, groups, dtype, Order::Panels).unwrap();
            same(&rows, &by_rows, Contraction::Columns);
            same(&columns, &by_columns, groups.contraction());
        }
    }
}

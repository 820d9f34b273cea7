//! Quantization to fp8: along rows, along the columns of each group of rows, or with one scale per tensor.
//!
//! Definition: torchao `prototype/moe_training` and `float8` (commit `36027d82d`): `s = F / max(amax, 1e-12)` in f64,
//! to f32, rounded down to a power of two in the row-wise recipes; `q = fp8(clamp(x * s))`, ties to even. Here the
//! scale is made of the bits of amax (see the shader), so codes and scales are equal bit for bit to
//! `reference::quantize`, with one exception: what an infinity poisons has the de-scale NaN, not infinity.
//! A NaN or an infinity poisons its own row, group's column or tensor, and no other.

use crate::Result;
use crate::gpu::{Gpu, Kernel, QuantizeKernel, Variant};
use crate::num::DType;
use crate::ops::choice::choose;
use crate::ops::panels::{Codes, Contraction, Order};
use crate::ops::quantize_choice::{Axes, Quantization};
use crate::ops::quantize_rows as by_rows;
use crate::ops::quantize_strips as strips;
use crate::ops::quantize_wide::{self as wide, Groups, Tops};
use crate::tensor::Tensor;

crate::params! {
    struct Quantize { rows: u32, cols: u32, groups: u32, group_rows: u32 }
}
crate::params! {
    struct Init { n: u32, word: u32 }
}
crate::params! {
    struct Rounding { pow2: u32 }
}

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/scales.wgsl"),
    include_str!("../../shaders/quantize.wgsl")
);
const ROWS: Kernel = Kernel { name: "quantize.rows", text: TEXT, entry: "rows" };
const INIT: Kernel = Kernel { name: "quantize.init", text: TEXT, entry: "init" };
const COL_TOP: Kernel = Kernel { name: "quantize.col_top", text: TEXT, entry: "col_top" };
const COL_CAST: Kernel = Kernel { name: "quantize.col_cast", text: TEXT, entry: "col_cast" };
const TENSOR_TOP: Kernel = Kernel { name: "quantize.tensor_top", text: TEXT, entry: "tensor_top" };
const TENSOR_SCALE: Kernel = Kernel { name: "quantize.tensor_scale", text: TEXT, entry: "tensor_scale" };
const TENSOR_CAST: Kernel = Kernel { name: "quantize.tensor_cast", text: TEXT, entry: "tensor_cast" };

/// Bits of the de-scale of zeros: `2^-48` under e4m3, `2^-110` for halves.
fn floor(codes: DType) -> u32 {
    if codes == DType::F16 { 17 << 23 } else { (127 - 48) << 23 }
}

/// Whether the kernels at the speed of memory are to quantize `x`.
pub(super) fn use_wide(gpu: &Gpu, x: &Tensor, axes: Axes, order: Order) -> bool {
    choose(gpu, &Quantization::in_order(gpu, x, axes, order)) == QuantizeKernel::Wide
}

/// A tensor in fp8, and what undoes its scales.
#[derive(Clone, Debug)]
pub struct Quantized<Codes = Tensor> {
    /// E4M3 or E5M2, in the shape of the quantized tensor.
    pub codes: Codes,
    /// Flat f32: `1/s` for each multiplier `s` from high precision to fp8. NaN where the input was not finite.
    pub descale: Tensor,
}

/// What products want of a tensor that they will read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    /// Codes along its rows: e4m3, or halves.
    pub dtype: DType,
    /// Their order.
    pub order: Order,
    /// The tops of the columns of these groups, for codes along its columns later.
    pub tops: Option<Groups<'a>>,
}

/// What the kernel that made a tensor left of its quantization, so that it is not read again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ready {
    /// Its codes along rows.
    pub rows: Option<Quantized<Codes>>,
    /// The largest magnitudes of its columns, for codes along columns.
    pub tops: Option<Tops>,
}

impl Quantized<Codes> {
    /// Memory for the codes of `x` and a de-scale per row, the first of `scales` if given.
    pub(super) fn of_rows(
        gpu: &Gpu,
        x: &Tensor,
        dtype: DType,
        order: Order,
        scales: Option<&Tensor>,
    ) -> Result<Self> {
        let codes = Codes::empty(gpu, x.shape(), dtype, Contraction::Columns, order)?;
        let descale = match scales {
            Some(scales) => scales.slice_flat(0, x.rows()),
            None => Tensor::flat(gpu, "fp8 de-scales", x.rows(), DType::F32)?,
        };
        Ok(Quantized { codes, descale })
    }

    /// Memory for the codes of `x` and a de-scale per group and column.
    pub(super) fn of_columns(
        gpu: &Gpu,
        x: &Tensor,
        groups: Groups,
        dtype: DType,
        order: Order,
    ) -> Result<Self> {
        let codes = Codes::empty(gpu, x.shape(), dtype, groups.contraction(), order)?;
        let scales = groups.count * x.cols();
        Ok(Quantized { codes, descale: Tensor::flat(gpu, "fp8 de-scales", scales, DType::F32)? })
    }

    /// Number `i` of `count` equal parts of a stack, as [`Codes::part`], with its de-scales.
    #[track_caller]
    pub(super) fn part(&self, i: usize, count: usize) -> Self {
        let each = self.descale.numel() / count;
        let descale = self.descale.slice_flat(i * each, (i + 1) * each);
        Quantized { codes: self.codes.part(i, count), descale }
    }

    fn to_panels(&self, gpu: &Gpu, contraction: Contraction<'_>) -> Result<Self> {
        Ok(Quantized { codes: self.codes.to_panels(gpu, contraction)?, descale: self.descale.clone() })
    }

    fn into_rows(self) -> Quantized {
        Quantized { codes: self.codes.into_rows(), descale: self.descale }
    }
}

impl From<Quantized> for Quantized<Codes> {
    fn from(q: Quantized) -> Self {
        Quantized { codes: Codes::Rows(q.codes), descale: q.descale }
    }
}

/// One power-of-two scale per row, e4m3: de-scales (rows). Of a weight (E, N, K): along K, de-scales (E*N).
///
/// # Errors
/// A result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn rowwise(gpu: &Gpu, x: &Tensor) -> Result<Quantized> {
    along_rows(gpu, x, DType::E4M3, Order::Rows).map(Quantized::into_rows)
}

/// [`rowwise`] to `dtype`, in the order that a product wants. F16 is for matrix units: rows scaled by a power of two into its
/// range, so that bf16 values keep all their bits down to `2^-29` of the row's largest, and are off by at most `2^-39` of it below.
#[track_caller]
pub(crate) fn along_rows(gpu: &Gpu, x: &Tensor, dtype: DType, order: Order) -> Result<Quantized<Codes>> {
    if use_wide(gpu, x, Axes::Rows, order) {
        return Ok(by_rows::in_memory(gpu, x, Wish { dtype, order, tops: None })?.0);
    }
    let out = Quantized::of_rows(gpu, x, dtype, Order::Rows, None)?;
    let shape = Shape::rows(x.quads(), gpu.caps().software);
    let variant = variant([x.dtype(), dtype], shape, false);
    let params = Quantize::of(x, 0);
    let bindings = [out.descale.write(), x.read(), out.codes.memory().write()];
    let tiles = x.rows().div_ceil(shape.lanes / shape.team);
    gpu.dispatch(&ROWS, &variant, &params, &bindings, tiles as u32)?;
    if order == Order::Panels { out.to_panels(gpu, Contraction::Columns) } else { Ok(out) }
}

/// What is wished of `x`, which somebody made before: nothing where its columns are read only once anyway.
#[track_caller]
pub(crate) fn ready(gpu: &Gpu, x: &Tensor, wish: Wish<'_>) -> Result<Ready> {
    let wide = |axes| use_wide(gpu, x, axes, wish.order);
    let read_again =
        |groups: Groups| wide(Axes::Rows) && wide(Axes::Columns) && !strips::take(gpu, x, groups, wish.order);
    if !wish.tops.is_some_and(read_again) {
        return Ok(Ready::default());
    }
    let (rows, tops) = by_rows::in_memory(gpu, x, wish)?;
    Ok(Ready { rows: Some(rows), tops })
}

/// One power-of-two scale per group of rows and column, e4m3: de-scales (G*cols) at `g * cols + column`.
///
/// `offs` are the exclusive end rows of the groups (flat u32, G); `None` is one group of all rows. Rows past the last
/// offset get the code 0; a group without rows has the de-scale `2^-48`.
///
/// # Errors
/// As [`rowwise`].
#[track_caller]
pub fn colwise(gpu: &Gpu, x: &Tensor, offs: Option<&Tensor>) -> Result<Quantized> {
    along_columns(gpu, x, offs, DType::E4M3, Order::Rows).map(Quantized::into_rows)
}

/// [`colwise`] to `dtype`, as [`along_rows`].
#[track_caller]
pub(crate) fn along_columns(
    gpu: &Gpu,
    x: &Tensor,
    offs: Option<&Tensor>,
    dtype: DType,
    order: Order,
) -> Result<Quantized<Codes>> {
    columns(gpu, x, Groups::of_rows(offs), None, dtype, order)
}

/// A weight (E, N, K), or (N, K), for a GEMM that contracts N: one power-of-two scale per expert and k, e4m3;
/// de-scales (E*K) at `e * K + k`.
///
/// # Errors
/// As [`rowwise`].
#[track_caller]
pub fn weight_colwise(gpu: &Gpu, w: &Tensor) -> Result<Quantized> {
    along_weight_columns(gpu, w, DType::E4M3, Order::Rows).map(Quantized::into_rows)
}

/// [`weight_colwise`] to `dtype`, as [`along_rows`].
#[track_caller]
pub(crate) fn along_weight_columns(
    gpu: &Gpu,
    w: &Tensor,
    dtype: DType,
    order: Order,
) -> Result<Quantized<Codes>> {
    columns(gpu, w, Groups::of_weight(w), None, dtype, order)
}

/// Codes along the columns of `groups`, whose `tops` somebody may have left: of the same groups.
#[track_caller]
pub(super) fn columns(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    tops: Option<&Tops>,
    dtype: DType,
    order: Order,
) -> Result<Quantized<Codes>> {
    if use_wide(gpu, x, Axes::Columns, order) {
        return wide::columns(gpu, x, groups, tops, dtype, order);
    }
    let out = Quantized::of_columns(gpu, x, groups, dtype, Order::Rows)?;
    let shape = Shape::columns(gpu.caps().software);
    let variant = variant([x.dtype(), dtype], shape, groups.offs.is_some());
    init(gpu, &variant, &out.descale, floor(dtype), shape)?;
    let params = Quantize::of(x, groups.count);
    let tiles = (groups.chunks(x, shape.chunk) * x.quads().div_ceil(shape.lanes)) as u32;
    let [scales, x, offs] = [out.descale.write(), x.read(), groups.offs.unwrap_or(x).read()];
    gpu.dispatch(&COL_TOP, &variant, &params, &[scales.clone(), x.clone(), offs.clone()], tiles)?;
    gpu.dispatch(&COL_CAST, &variant, &params, &[scales, x, offs, out.codes.memory().write()], tiles)?;
    if order == Order::Panels { out.to_panels(gpu, groups.contraction()) } else { Ok(out) }
}

/// [`rowwise`] and [`colwise`] of one tensor, in fewer passes over it.
///
/// # Errors
/// As [`rowwise`].
#[track_caller]
pub fn both(gpu: &Gpu, x: &Tensor, offs: Option<&Tensor>) -> Result<(Quantized, Quantized)> {
    both_axes(gpu, x, Groups::of_rows(offs), DType::E4M3, Order::Rows)
        .map(|(a, b)| (a.into_rows(), b.into_rows()))
}

/// [`rowwise`] and [`weight_colwise`] of one weight, in fewer passes over it.
///
/// # Errors
/// As [`rowwise`].
#[track_caller]
pub fn weight_both(gpu: &Gpu, w: &Tensor) -> Result<(Quantized, Quantized)> {
    both_axes(gpu, w, Groups::of_weight(w), DType::E4M3, Order::Rows)
        .map(|(a, b)| (a.into_rows(), b.into_rows()))
}

/// [`both`] to `dtype`, as [`along_rows`].
#[track_caller]
pub(super) fn both_axes(
    gpu: &Gpu,
    x: &Tensor,
    groups: Groups,
    dtype: DType,
    order: Order,
) -> Result<(Quantized<Codes>, Quantized<Codes>)> {
    if use_wide(gpu, x, Axes::Both, order) {
        if let Some(made) = strips::both(gpu, x, groups, dtype, order)? {
            return Ok(made);
        }
        let (rows, tops) = by_rows::in_memory(gpu, x, Wish { dtype, order, tops: Some(groups) })?;
        return Ok((rows, wide::columns(gpu, x, groups, tops.as_ref(), dtype, order)?));
    }
    Ok((along_rows(gpu, x, dtype, order)?, columns(gpu, x, groups, None, dtype, order)?))
}

/// One scale for the whole tensor, not rounded to a power of two, to `dtype` (e4m3 or e5m2): de-scale (1).
///
/// # Errors
/// As [`rowwise`].
#[track_caller]
pub fn tensorwise(gpu: &Gpu, x: &Tensor, dtype: DType) -> Result<Quantized> {
    whole(gpu, x, dtype, false)
}

/// One power-of-two scale for the whole tensor, e4m3: de-scale (1).
///
/// # Errors
/// As [`rowwise`].
#[track_caller]
pub fn tensorwise_pow2(gpu: &Gpu, x: &Tensor) -> Result<Quantized> {
    whole(gpu, x, DType::E4M3, true)
}

#[track_caller]
fn whole(gpu: &Gpu, x: &Tensor, dtype: DType, pow2: bool) -> Result<Quantized> {
    let codes = Tensor::empty(gpu, "fp8 codes", x.shape(), dtype)?;
    // 1/s, the bits of the largest magnitude, s.
    let scales = Tensor::flat(gpu, "fp8 de-scale", 3, DType::F32)?;
    let shape = Shape::tensor(gpu.caps().software);
    let variant = variant([x.dtype(), dtype], shape, false);
    init(gpu, &variant, &scales, 0, shape)?;
    let params = Quantize::of(x, 0);
    let tiles = (x.rows() * x.quads()).div_ceil(shape.lanes * shape.chunk) as u32;
    gpu.dispatch(&TENSOR_TOP, &variant, &params, &[scales.write(), x.read()], tiles)?;
    gpu.dispatch(&TENSOR_SCALE, &variant, &Rounding { pow2: u32::from(pow2) }, &[scales.write()], 1)?;
    gpu.dispatch(&TENSOR_CAST, &variant, &params, &[scales.write(), x.read(), codes.write()], tiles)?;
    Ok(Quantized { codes, descale: scales.slice_flat(0, 1) })
}

/// Sets all `scales` to the bits `word`.
fn init(gpu: &Gpu, variant: &Variant, scales: &Tensor, word: u32, shape: Shape) -> Result<()> {
    let n = scales.numel();
    let params = Init { n: n as u32, word };
    gpu.dispatch(&INIT, variant, &params, &[scales.write()], n.div_ceil(shape.lanes) as u32)
}

impl Quantize {
    /// Of `groups` groups of equal height, where the kernel does not read offsets.
    fn of(x: &Tensor, groups: usize) -> Quantize {
        Quantize {
            rows: x.rows() as u32,
            cols: x.cols() as u32,
            groups: groups as u32,
            group_rows: (x.rows() / groups.max(1)) as u32,
        }
    }
}

/// How the work is cut: lanes of a workgroup, lanes that share a row (or the tensor's maximum), rows or quads a lane.
#[derive(Clone, Copy, Debug)]
struct Shape {
    lanes: usize,
    team: usize,
    chunk: usize,
}

impl Shape {
    /// On GPUs enough lanes a row that neighbours read neighbours, and few that idle.
    fn rows(quads: usize, software: bool) -> Shape {
        let (lanes, team) = match quads {
            _ if software => (8, 1),
            0..=4 => (256, 1),
            5..=32 => (256, 16),
            33..=128 => (256, 64),
            _ => (256, 256),
        };
        Shape { lanes, team, chunk: 1 }
    }

    fn columns(software: bool) -> Shape {
        let (lanes, chunk) = if software { (8, 64) } else { (64, 32) };
        Shape { lanes, team: 1, chunk }
    }

    fn tensor(software: bool) -> Shape {
        let (lanes, team, chunk) = if software { (8, 1, 64) } else { (256, 256, 8) };
        Shape { lanes, team, chunk }
    }
}

fn variant([x, codes]: [DType; 2], shape: Shape, grouped: bool) -> Variant {
    assert!(matches!(x, DType::F32 | DType::BF16), "quantization of a {x} tensor");
    formats(Variant::new(), codes)
        .constant("LANES", shape.lanes as u32)
        .constant("TEAM", shape.team as u32)
        .constant("CHUNK", shape.chunk as u32)
        .constant("GROUPED", u32::from(grouped))
        .quad("X", x)
        .quad("Q", codes)
}

/// Adds what the shaders know of the dtype of the codes.
pub(super) fn formats(variant: Variant, codes: DType) -> Variant {
    // The largest value of the format is 1.75 * 2^top.
    let (top, largest) = match codes {
        DType::E4M3 => (8, 448f64),
        DType::E5M2 | DType::F16 => (15, 57344f64),
        other => panic!("quantization to {other}"),
    };
    variant
        .constant("TOP", top)
        .constant("LOWEST", if codes == DType::F16 { 32 } else { 87 })
        .constant("FP8", u32::from(codes != DType::F16))
        .constant("HALF", u32::from(codes == DType::F16))
        .constant("CEILING", ((largest / 1e-12) as f32).to_bits())
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for x in [DType::F32, DType::BF16] {
        for codes in [DType::E4M3, DType::F16] {
            for (quads, software) in [(0, true), (0, false), (5, false), (33, false), (129, false)] {
                all.push((ROWS, variant([x, codes], Shape::rows(quads, software), false)));
            }
            for (software, grouped) in [(true, true), (true, false), (false, true), (false, false)] {
                let columns = variant([x, codes], Shape::columns(software), grouped);
                all.extend([INIT, COL_TOP, COL_CAST].map(|kernel| (kernel, columns.clone())));
            }
        }
        for software in [true, false] {
            for codes in [DType::E4M3, DType::E5M2] {
                let tensor = variant([x, codes], Shape::tensor(software), false);
                all.extend([INIT, TENSOR_TOP, TENSOR_SCALE, TENSOR_CAST].map(|k| (k, tensor.clone())));
            }
        }
    }
    all
}

#[cfg(test)]
pub(super) mod oracle;

//! Operands of products on matrix units in panels: the order of memory that those kernels read fastest.
//!
//! Along the contraction an operand is cut into blocks of 64 steps, padded by zeros, and a block into panels that hold 32
//! bytes of every row, row after row (`shaders/lib/panels.wgsl`). Only [`super::gemm`] and what prepares its operands know
//! panels; codes elsewhere lie row by row.

use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Geometry { rows: u32, cols: u32, groups: u32, group_rows: u32 }
}

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/panels.wgsl"),
    include_str!("../../shaders/panels.wgsl")
);
const ALONG: Kernel = Kernel { name: "panels.along", text: TEXT, entry: "along" };
const ACROSS: Kernel = Kernel { name: "panels.across", text: TEXT, entry: "across" };

/// Steps of a block: the contraction is padded to a multiple of it.
pub(super) const BLOCK: usize = 64;
/// Threads of a workgroup.
const LANES: usize = 256;

/// What a product contracts of an operand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Contraction<'a> {
    /// Its columns.
    Columns,
    /// The rows of each weight of (E, K, N), or (K, N).
    WeightRows,
    /// The rows of each group that the offsets give; `None` is one group of all rows.
    GroupRows(Option<&'a Tensor>),
}

/// How a quantizer lays out what it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Row by row.
    Rows,
    /// In panels of what a product contracts.
    Panels,
}

/// Codes or halves in panels.
#[derive(Clone, Debug)]
pub(crate) struct Panels {
    memory: Tensor,
    shape: Vec<usize>,
}

/// An operand of a product: codes or numbers row by row, or in panels.
#[derive(Clone, Debug)]
pub(crate) enum Codes {
    Rows(Tensor),
    Panels(Panels),
}

impl Codes {
    /// Memory for an operand of this shape and dtype.
    ///
    /// # Errors
    /// Over the adapter's limits, or out of memory.
    pub(super) fn empty(
        gpu: &Gpu,
        shape: &[usize],
        dtype: DType,
        contraction: Contraction<'_>,
        order: Order,
    ) -> Result<Codes> {
        if order == Order::Rows {
            return Ok(Codes::Rows(Tensor::empty(gpu, "fp8 codes", shape, dtype)?));
        }
        let layout = Layout::of(shape, contraction);
        let per_block = panels_per_block(dtype);
        let in_memory = [layout.blocks * per_block, layout.rows, BLOCK / per_block];
        let memory = Tensor::empty(gpu, "panels", &in_memory, dtype)?;
        Ok(Codes::Panels(Panels { memory, shape: shape.to_vec() }))
    }

    /// The tensor of an operand that lies row by row.
    ///
    /// # Panics
    /// In panels.
    pub(crate) fn into_rows(self) -> Tensor {
        match self {
            Codes::Rows(t) => t,
            Codes::Panels(p) => panic!("codes {:?} lie in panels", p.shape),
        }
    }

    /// The operand's shape, however it lies in memory.
    pub(crate) fn shape(&self) -> &[usize] {
        match self {
            Codes::Rows(t) => t.shape(),
            Codes::Panels(p) => &p.shape,
        }
    }

    pub(crate) fn cols(&self) -> usize {
        self.shape().last().copied().unwrap_or(1)
    }

    /// All dimensions but the last as one.
    pub(crate) fn rows(&self) -> usize {
        self.shape().iter().rev().skip(1).product()
    }

    /// How it lies in memory.
    pub(crate) fn order(&self) -> Order {
        if let Codes::Rows(_) = self { Order::Rows } else { Order::Panels }
    }

    /// The memory, with a dtype and a shape of its own.
    pub(crate) fn memory(&self) -> &Tensor {
        match self {
            Codes::Rows(t) => t,
            Codes::Panels(p) => &p.memory,
        }
    }

    /// Number `i` of a stack of `count`: (...) of (count, ...), and (E, ...) of (count * E, ...), each of which lies by itself in memory.
    /// The first byte must suit the adapter's binding alignment.
    ///
    /// # Panics
    /// There are no such parts.
    #[track_caller]
    pub(crate) fn part(&self, i: usize, count: usize) -> Codes {
        let (first, rest) = self.shape().split_first().expect("a stack has a dimension");
        assert!(i < count && first.is_multiple_of(count), "part {i} of {count} of {:?}", self.shape());
        let each = (*first != count).then_some(first / count);
        let shape: Vec<usize> = each.into_iter().chain(rest.iter().copied()).collect();
        let memory = self.memory();
        let rows = memory.rows() / count;
        let memory = memory.slice_rows(i * rows, (i + 1) * rows);
        match self {
            Codes::Rows(_) => Codes::Rows(memory.reshape(&shape)),
            Codes::Panels(_) => Codes::Panels(Panels { memory, shape }),
        }
    }

    /// The same operand in panels for such a contraction; itself if it is already.
    ///
    /// # Errors
    /// The panels are over the adapter's limits, or what the device reported.
    pub(crate) fn to_panels(&self, gpu: &Gpu, contraction: Contraction<'_>) -> Result<Codes> {
        match self {
            Codes::Panels(_) => Ok(self.clone()),
            Codes::Rows(t) => pack(gpu, t, contraction),
        }
    }
}

/// How an operand of this shape lies in panels.
struct Layout {
    /// Weights, or groups of rows.
    groups: usize,
    /// Blocks of all groups.
    blocks: usize,
    /// Rows along the contraction, of one group: the operand's own, or its columns.
    rows: usize,
}

impl Layout {
    fn of(shape: &[usize], contraction: Contraction<'_>) -> Layout {
        let (cols, leading) = shape.split_last().map_or((1, &[][..]), |(c, l)| (*c, l));
        let all: usize = leading.iter().product();
        let weights = if shape.len() == 3 { shape[0] } else { 1 };
        let each = all / weights.max(1);
        match contraction {
            Contraction::Columns => {
                Layout { groups: weights, blocks: weights * cols.div_ceil(BLOCK), rows: each }
            }
            Contraction::WeightRows => {
                Layout { groups: weights, blocks: weights * each.div_ceil(BLOCK), rows: cols }
            }
            Contraction::GroupRows(None) => Layout { groups: 1, blocks: all.div_ceil(BLOCK), rows: cols },
            Contraction::GroupRows(Some(offs)) => {
                let groups = offs.numel();
                Layout { groups, blocks: all / BLOCK + groups, rows: cols }
            }
        }
    }
}

/// `x` (codes or halves, row by row) in panels.
fn pack(gpu: &Gpu, x: &Tensor, contraction: Contraction<'_>) -> Result<Codes> {
    let layout = Layout::of(x.shape(), contraction);
    let panels = layout.blocks * panels_per_block(x.dtype());
    let packed = Codes::empty(gpu, x.shape(), x.dtype(), contraction, Order::Panels)?;
    let memory = packed.memory();
    let params = Geometry {
        rows: x.rows() as u32,
        cols: x.cols() as u32,
        groups: layout.groups as u32,
        group_rows: (x.rows() / layout.groups.max(1)) as u32,
    };
    let offs = match contraction {
        Contraction::GroupRows(offs) => offs,
        _ => None,
    };
    let variant = variant(x.dtype(), offs.is_some());
    if let Contraction::Columns = contraction {
        let strips = (panels / layout.groups.max(1)).div_ceil(4);
        let tiles = x.rows().div_ceil(LANES / 8) * strips;
        gpu.dispatch(&ALONG, &variant, &params, &[x.read(), memory.write()], tiles as u32)?;
    } else {
        let tiles = panels * x.quads().div_ceil(LANES / 2);
        let bindings = [x.read(), memory.write(), offs.unwrap_or(x).read()];
        gpu.dispatch(&ACROSS, &variant, &params, &bindings, tiles as u32)?;
    }
    Ok(packed)
}

/// Panels of a block: each holds 32 bytes of a row.
pub(super) fn panels_per_block(dtype: DType) -> usize {
    BLOCK * dtype.size() / 32
}

fn variant(dtype: DType, grouped: bool) -> Variant {
    let half = u32::from(dtype == DType::F16);
    Variant::new()
        .constant("LANES", LANES as u32)
        .constant("GROUPED", u32::from(grouped))
        .constant("F8", 1 - half)
        .constant("F16", half)
        .constant("QUADS", 4 - 2 * half)
        .constant("PANELS", panels_per_block(dtype) as u32)
        .quad("Q", dtype)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for dtype in [DType::E4M3, DType::E5M2, DType::F16] {
        all.push((ALONG, variant(dtype, false)));
        all.extend([false, true].map(|grouped| (ACROSS, variant(dtype, grouped))));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, Codes, Contraction, panels_per_block};
    use crate::gpu::{DeviceChoice, Gpu, Options};
    use crate::num::DType;
    use crate::num::rng::Stream;
    use crate::tensor::Tensor;

    /// Byte `byte` of step `step` of row `row`, whose group's panels begin at `block`: where it lies among the panels.
    fn place(dtype: DType, rows: usize, block: usize, row: usize, step: usize, byte: usize) -> usize {
        let per_panel = 32 / dtype.size();
        let panel = block * panels_per_block(dtype) + step / per_panel;
        (panel * rows + row) * 32 + step % per_panel * dtype.size() + byte
    }

    /// Every element of every group in its place, zeros after the group's last step, on a tensor of these bytes.
    fn check(gpu: &Gpu, shape: &[usize], dtype: DType, ends: Option<&[u32]>, columns: bool) {
        let (size, cols) = (dtype.size(), shape[shape.len() - 1]);
        let all: usize = shape[..shape.len() - 1].iter().product();
        let tensor = Tensor::empty(gpu, "codes", shape, dtype).unwrap();
        let padded = 4 * tensor.quads();
        let stream = Stream::new(0, "bytes");
        let bytes: Vec<u8> = (0..all * padded * size)
            .map(|i| if i / size % padded < cols { (stream.word(i as u64) % 255) as u8 + 1 } else { 0 })
            .collect();
        gpu.upload(tensor.memory().0, tensor.memory().1, &bytes).unwrap();
        let offs = ends.map(|ends| Tensor::from_u32(gpu, "ends", ends).unwrap());
        let weights = if shape.len() == 3 { shape[0] } else { 1 };
        let each = all / weights;
        let contraction = match offs.as_ref() {
            _ if columns => Contraction::Columns,
            None if shape.len() == 3 => Contraction::WeightRows,
            offs => Contraction::GroupRows(offs),
        };
        let panels = Codes::Rows(tensor).to_panels(gpu, contraction).unwrap();
        assert_eq!(panels.shape(), shape);
        let memory = panels.memory();
        let got = gpu.download(memory.memory().0, memory.memory().1, memory.bytes()).unwrap();
        // Groups as first block, first and end of the contraction, and first row.
        let equal = (0..weights).map(|g| match columns {
            true => (g * cols.div_ceil(BLOCK), 0, cols, g * each),
            false => (g * each.div_ceil(BLOCK), g * each, (g + 1) * each, 0),
        });
        let starts = |ends: &[u32]| -> Vec<(usize, usize, usize, usize)> {
            let start = |g: usize| if g == 0 { 0 } else { ends[g - 1] as usize };
            ends.iter().enumerate().map(|(g, e)| (start(g) / BLOCK + g, start(g), *e as usize, 0)).collect()
        };
        let rows = if columns { each } else { cols };
        for (block, first, end, base) in ends.map_or_else(|| equal.collect(), starts) {
            for row in 0..rows {
                for step in 0..(end - first).next_multiple_of(BLOCK) {
                    for byte in 0..size {
                        let (r, c) = if columns { (base + row, step) } else { (first + step, row) };
                        let inside = first + step < end;
                        let want = if inside { bytes[(r * padded + c) * size + byte] } else { 0 };
                        let at = place(dtype, rows, block, row, step, byte);
                        assert_eq!(got[at], want, "{shape:?} {dtype} {ends:?}: row {row}, step {step}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_element_has_its_place() {
        let choice = DeviceChoice::from_env();
        let gpu =
            Gpu::open_with(&choice, Options { poison: true, ..Options::default() }).expect("an adapter");
        for dtype in [DType::E4M3, DType::F16] {
            for shape in [vec![1, 1], vec![33, 70], vec![5, 128], vec![3, 66, 9]] {
                check(&gpu, &shape, dtype, None, true);
                check(&gpu, &shape, dtype, None, false);
            }
            check(&gpu, &[200, 33], dtype, Some(&[0, 1, 64, 65, 129, 193, 193]), false);
            check(&gpu, &[70, 5], dtype, Some(&[70, 70]), false);
        }
    }
}

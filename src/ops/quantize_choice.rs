//! Which kernels quantize a tensor along an axis: the simple ones, or those at the speed of memory.

use super::choice::{Call, Candidate};
use super::panels::Order;
use super::quantize_wide as wide;
use crate::gpu::{Gpu, QuantizeKernel};
use crate::num::DType;
use crate::tensor::Tensor;

/// Along what scales are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axes {
    /// A scale per row.
    Rows,
    /// One per column of a group of rows.
    Columns,
    /// Both, from one tensor.
    Both,
}

impl Axes {
    /// All three.
    pub const ALL: [Axes; 3] = [Axes::Rows, Axes::Columns, Axes::Both];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Axes::Rows => "rows",
            Axes::Columns => "columns",
            Axes::Both => "both",
        }
    }
}

/// Most columns of tensors that are tuned as narrow ones.
const NARROW: usize = 512;

/// A quantization, as far as the choice depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    axes: Axes,
    cols: usize,
    in_panels: bool,
    /// Whether the wide kernels can quantize it; if not, why.
    wide: Result<(), &'static str>,
}

impl Quantization {
    /// Of `x` into rows of codes.
    pub fn of(gpu: &Gpu, x: &Tensor, axes: Axes) -> Quantization {
        Quantization::in_order(gpu, x, axes, Order::Rows)
    }

    /// Of a tensor with `cols` columns that any kernel can quantize: for its names.
    pub fn of_width(cols: usize, axes: Axes) -> Quantization {
        Quantization { axes, cols, in_panels: false, wide: Ok(()) }
    }

    pub(super) fn in_order(gpu: &Gpu, x: &Tensor, axes: Axes, order: Order) -> Quantization {
        let wide = match () {
            () if x.dtype() != DType::BF16 => Err("operands that are not bf16"),
            () if gpu.caps().software => Err("a software adapter"),
            () if !wide::can_run(gpu, x) => Err("rows that are not whole units of eight columns"),
            () if axes != Axes::Columns && !wide::fits_registers(gpu, x) => {
                Err("rows longer than registers hold")
            }
            () => Ok(()),
        };
        Quantization { axes, cols: x.cols(), in_panels: order == Order::Panels, wide }
    }
}

impl Call for Quantization {
    type Kernel = QuantizeKernel;

    const TABLE: &'static [Candidate<Quantization>] = &[
        Candidate { kernel: QuantizeKernel::Wide, can_run: |_, call| call.wide, pays: |_, _| Ok(()) },
        Candidate { kernel: QuantizeKernel::Simple, can_run: |_, _| Ok(()), pays: |_, _| Ok(()) },
    ];

    fn name(kernel: QuantizeKernel) -> &'static str {
        kernel.name()
    }

    fn named(gpu: &Gpu) -> Option<QuantizeKernel> {
        gpu.options().quantizer
    }

    fn op(&self) -> String {
        format!("quantize {}", self.axes.name())
    }

    /// Panels are no class to tune: the wide kernels write them, the codes of the others are copied into them.
    fn size(&self) -> &'static str {
        match (self.cols <= NARROW, self.in_panels) {
            (true, false) => "narrow",
            (false, false) => "wide",
            (true, true) => "narrow-in-panels",
            (false, true) => "wide-in-panels",
        }
    }
}

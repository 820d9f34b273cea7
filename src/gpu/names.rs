//! The kernels of ops that have several, as `--kernel` names them.

use crate::{Error, Result};

/// The implementations of a matrix product, as `--kernel` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmKernel {
    /// Register tiles in f32: every adapter, every dtype.
    Scalar,
    /// Tiles in workgroup memory, in f32: every adapter, operands of f32, bf16 or fp8; for GPUs.
    Tiled,
    /// In f32, where one size is at most 16: every adapter; for GPUs.
    Narrow,
    /// Matrix units.
    Coop,
}

impl GemmKernel {
    /// All of them.
    pub const ALL: [GemmKernel; 4] =
        [GemmKernel::Scalar, GemmKernel::Tiled, GemmKernel::Narrow, GemmKernel::Coop];

    /// The name that `--kernel` takes.
    pub fn name(self) -> &'static str {
        match self {
            GemmKernel::Scalar => "scalar",
            GemmKernel::Tiled => "tiled",
            GemmKernel::Narrow => "narrow",
            GemmKernel::Coop => "coop",
        }
    }

    /// The kernel of this name.
    ///
    /// # Errors
    /// No such kernel.
    pub fn parse(name: &str) -> Result<GemmKernel> {
        GemmKernel::ALL.into_iter().find(|kernel| kernel.name() == name).ok_or_else(|| {
            Error::user(
                format!("no kernel is named {name:?}"),
                "--kernel takes scalar, tiled, narrow or coop (products and attention), simple or wide (quantizers); without it the \
                 best one for the adapter is used",
            )
        })
    }
}

/// The implementations of the quantizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizeKernel {
    /// Any adapter, any width.
    Simple,
    /// Sixteen bytes a load, rows in registers: bf16 on GPUs.
    Wide,
}

impl QuantizeKernel {
    /// Both.
    pub const ALL: [QuantizeKernel; 2] = [QuantizeKernel::Simple, QuantizeKernel::Wide];

    /// The name that `--kernel` takes.
    pub fn name(self) -> &'static str {
        match self {
            QuantizeKernel::Simple => "simple",
            QuantizeKernel::Wide => "wide",
        }
    }
}

/// The names of the kernels of an op, or of a class of its calls: see `ops::choice`.
pub fn kernels_of(op: &str) -> Vec<&'static str> {
    match op.split(' ').next() {
        Some("quantize") => QuantizeKernel::ALL.map(QuantizeKernel::name).into(),
        Some("attention") => [GemmKernel::Scalar, GemmKernel::Coop].map(GemmKernel::name).into(),
        _ => GemmKernel::ALL.map(GemmKernel::name).into(),
    }
}

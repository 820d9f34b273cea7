//! Which kernel computes attention: a thread a position, or matrix units.

use super::attention::Shape;
use super::attention_coop;
use super::choice::{Call, Candidate, operands};
use crate::gpu::{GemmKernel, Gpu, MatrixUnits};
use crate::num::DType;

/// Which half of attention. Both kernels of one give what either of the other takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// [`super::attention::forward`].
    Forward,
    /// [`super::attention::backward`].
    Backward,
}

impl Pass {
    /// Both.
    pub const ALL: [Pass; 2] = [Pass::Forward, Pass::Backward];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        }
    }
}

/// A call of attention, as far as the choice depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Forward or backward.
    pub pass: Pass,
    /// Of the operands.
    pub dtype: DType,
    /// Their sizes.
    pub shape: Shape,
}

/// The largest heads of each class that is tuned apart, and its name.
pub const HEADS: [(usize, &str); 4] = [(16, "d16"), (32, "d32"), (64, "d64"), (usize::MAX, "d128")];
/// Fewer positions than a fragment has are no class to tune.
const SHORT: usize = 16;

fn coop_can_run(gpu: &Gpu, call: &Attention) -> Result<(), &'static str> {
    #[cfg(test)]
    if super::emulation::fragments().is_some() {
        return Ok(());
    }
    let caps = gpu.caps();
    match () {
        () if gpu.options().no_coop => Err("--no-coop"),
        () if caps.coop.is_none() => Err("no matrix units that moe8 can use"),
        () if !caps.subnormal_halves => Err("the driver loses small halves"),
        () if !attention_coop::can_run(&caps, call.dtype, call.shape.head_dim) => {
            Err("no kernel for such operands on the matrix units")
        }
        () if attention_coop::padded_bytes(call.shape) > caps.max_binding.min(caps.max_buffer) => {
            Err("q, k and v padded to whole tiles are over the largest binding")
        }
        () => Ok(()),
    }
}

/// By rule only where it has run: fragments of 8x8, and subgroups of 64 lanes, went through an emulation, and no adapter.
fn coop_pays(gpu: &Gpu, call: &Attention) -> Result<(), &'static str> {
    match () {
        () if gpu.caps().coop == Some(MatrixUnits::Coop8) => {
            Err("never run on matrix units of 8x8x8; `moe8 tune` takes it if it is right and faster")
        }
        () if gpu.caps().subgroup_max != 32 => {
            Err("never run in such subgroups; `moe8 tune` takes it if it is right and faster")
        }
        () if call.shape.seq < SHORT => Err("fewer positions than a fragment has"),
        () => Ok(()),
    }
}

impl Call for Attention {
    type Kernel = GemmKernel;

    const TABLE: &'static [Candidate<Attention>] = &[
        Candidate { kernel: GemmKernel::Coop, can_run: coop_can_run, pays: coop_pays },
        Candidate { kernel: GemmKernel::Scalar, can_run: |_, _| Ok(()), pays: |_, _| Ok(()) },
    ];

    fn name(kernel: GemmKernel) -> &'static str {
        kernel.name()
    }

    fn named(gpu: &Gpu) -> Option<GemmKernel> {
        #[cfg(test)]
        if super::emulation::fragments().is_some() {
            return Some(GemmKernel::Coop);
        }
        gpu.options().kernel
    }

    fn op(&self) -> String {
        format!("attention {} {}", self.pass.name(), operands(self.dtype))
    }

    fn size(&self) -> &'static str {
        let of_heads = HEADS.iter().find(|(most, _)| self.shape.head_dim <= *most);
        if self.shape.seq < SHORT { "short" } else { of_heads.map_or("d128", |(_, name)| *name) }
    }
}

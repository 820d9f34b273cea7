//! Cross entropy of the next token over one chunk of tokens, its gradient in place of the logits, and the mean loss.
//!
//! Definition: `torch.nn.functional.cross_entropy` (PyTorch 2.8) on logits upcast to f32.
//! Tolerance: loss 2e-6 absolute plus 1e-6 relative, gradient 3e-6 of `scale` (WGSL allows `exp` and `log` a few ulp of
//! their argument's size), plus one rounding of the gradient to the logits' dtype. The mean is a tree of f32 sums: `1e-6`
//! relative at worst, 1e-7 in practice.

use super::Team;
use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct CrossEntropy {
        rows: u32,
        vocab: u32,
        scale: f32,
    }
}

const MAIN: Kernel = Kernel {
    name: "cross_entropy",
    text: concat!(
        include_str!("../../shaders/lib/lanes.wgsl"),
        include_str!("../../shaders/cross_entropy.wgsl")
    ),
    entry: "main",
};

/// Writes each token's loss and replaces its logits by their gradient, `(softmax - one-hot) * scale`.
///
/// `logits` is `(C, V)` f32 or bf16, `labels` flat u32 `[C]`, each below V, `losses` flat f32 `[C]`.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn forward_backward(
    gpu: &Gpu,
    logits: &Tensor,
    labels: &Tensor,
    losses: &Tensor,
    scale: f32,
) -> Result<()> {
    launch(gpu, logits, labels, losses, Some(scale))
}

/// Writes each token's loss and leaves the logits as they are.
///
/// # Errors
/// As [`forward_backward`].
#[track_caller]
pub fn forward(gpu: &Gpu, logits: &Tensor, labels: &Tensor, losses: &Tensor) -> Result<()> {
    launch(gpu, logits, labels, losses, None)
}

/// The mean of flat f32 `losses`, as flat `[1]`; the order of the additions is fixed.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub fn mean(gpu: &Gpu, losses: &Tensor) -> Result<Tensor> {
    super::clip::total(gpu, &[losses], false, (1.0 / losses.numel() as f64) as f32)
}

#[track_caller]
fn launch(gpu: &Gpu, logits: &Tensor, labels: &Tensor, losses: &Tensor, scale: Option<f32>) -> Result<()> {
    let rows = logits.rows();
    let same = labels.shape() == [rows] && losses.shape() == [rows];
    assert!(same, "cross entropy: logits {:?}, {labels:?}, {losses:?}", logits.shape());
    let software = gpu.caps().software;
    let params =
        CrossEntropy { rows: rows as u32, vocab: logits.cols() as u32, scale: scale.unwrap_or_default() };
    let bindings = [labels.read(), logits.write(), losses.write()];
    let team = team(logits.quads(), software);
    let variant = variant(logits.dtype(), scale.is_some(), team, logits.quads());
    gpu.dispatch(&MAIN, &variant, &params, &bindings, team.groups(rows))
}

/// Threads that share a row, at most.
const MOST_LANES: usize = 256;
/// Quads of a row that a thread holds, if the row fits, and that it takes at a time if not.
const MOST_HELD: usize = 16;
const BLOCK: usize = 8;

/// On software adapters a thread takes whole rows. On GPUs it has 8 to 16 quads, as far as rows are long enough.
fn team(quads: usize, software: bool) -> Team {
    if software {
        return Team { rows: 8, lanes: 1, held: 0 };
    }
    let lanes = (1usize << (quads / 8).max(1).ilog2()).clamp(16, MOST_LANES);
    let held = quads.div_ceil(lanes);
    Team { rows: (128 / lanes).max(1), lanes, held: if held > MOST_HELD { BLOCK } else { held } }
}

fn variant(x: DType, gradient: bool, team: Team, quads: usize) -> Variant {
    let fast = team.lanes > 1;
    let once = team.lanes * team.held >= quads;
    team.constants(Variant::new())
        .constant("WG", (team.rows * team.lanes) as u32)
        .constant("TREE", u32::from(fast))
        .constant("FAST", u32::from(fast))
        .constant("SIMPLE", u32::from(!fast))
        .constant("ONCE", u32::from(once))
        .constant("TWICE", u32::from(!once))
        .constant("NARROW", u32::from(x == DType::BF16))
        .constant("WIDE", u32::from(x != DType::BF16))
        .constant("GRADIENT", u32::from(gradient))
        .quad("X", x)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for x in [DType::F32, DType::BF16] {
        for gradient in [false, true] {
            all.push((MAIN, variant(x, gradient, team(8, true), 8)));
            for quads in [1, 64, 564, 4096, 8192] {
                all.push((MAIN, variant(x, gradient, team(quads, false), quads)));
            }
        }
    }
    all
}

//! AdamW over a flat f32 segment in one dispatch.
//!
//! Definition: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, as
//! `torch.optim.AdamW` (PyTorch 2.8) computes it; all state in f32, the new parameter also in bf16 where that is asked for.
//! Tolerance against the same formula in f64: a few f32 roundings of each state (1e-6 relative on m and v), and of
//! the update, whose division and square root WGSL allows 2.5 ulp each: 2e-6 of lr plus 2^-23 of the parameter.

use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct AdamW {
        quads: u32,
        keep: f32,
        beta1: f32,
        rest1: f32,
        beta2: f32,
        rest2: f32,
        step_size: f32,
        correct2: f32,
        eps: f32,
    }
}

const MAIN: Kernel = Kernel { name: "adamw", text: include_str!("../../shaders/adamw.wgsl"), entry: "main" };

/// What a gradient may be.
const GRADIENTS: [DType; 2] = [DType::F32, DType::BF16];

/// The hyper-parameters of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment; above 0, so that padding (0 / 0) stays 0.
    pub eps: f32,
    /// Decoupled weight decay: the parameter loses `lr * weight_decay` of itself.
    pub weight_decay: f32,
    /// Number of this step, from 1.
    pub step: u32,
}

/// What a step writes; of one length in whole quads (a flat segment or a tensor of quads).
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// The parameter, f32.
    pub param: &'a Tensor,
    /// The parameter in bf16, for the products: only written, with what [`cast`](super::elementwise::cast) would make of `param`
    /// after the step, bit for bit.
    pub low: Option<&'a Tensor>,
    /// First moment, f32.
    pub m: &'a Tensor,
    /// Second moment, f32.
    pub v: &'a Tensor,
}

/// Updates `state` in place from `coefficient[0] * grad`.
///
/// `grad` is f32 or bf16, as long as the state; `coefficient` is flat `[1]`: the clip factor. They must all lie in different
/// buffers.
///
/// # Errors
/// What the device reported.
///
/// # Panics
/// On other dtypes, or lengths that differ.
#[track_caller]
pub fn step(gpu: &Gpu, state: &State<'_>, grad: &Tensor, coefficient: &Tensor, cfg: &Step) -> Result<()> {
    let State { param, low, m, v } = *state;
    for t in [param, m, v] {
        assert_eq!(t.dtype(), DType::F32, "adamw: state {:?} is f32", t.shape());
    }
    assert!(GRADIENTS.contains(&grad.dtype()), "adamw: gradient {:?} of {}", grad.shape(), grad.dtype());
    let quads = |t: &Tensor| {
        let size = t.dtype().quad_bytes() as u64;
        assert_eq!(t.bytes() % size, 0, "adamw: segment {:?} is whole quads", t.shape());
        t.bytes() / size
    };
    if let Some(low) = low {
        assert_eq!(low.dtype(), DType::BF16, "adamw: copy {:?} is bf16", low.shape());
    }
    for t in [grad, m, v].into_iter().chain(low) {
        assert_eq!(quads(t), quads(param), "adamw: {:?} and {:?}", t.shape(), param.shape());
    }
    let params = params(cfg, quads(param));
    let mut bindings = vec![grad.read(), coefficient.read(), param.write(), m.write(), v.write()];
    bindings.extend(low.map(Tensor::write));
    let variant = variant(grad.dtype(), low.is_some());
    gpu.dispatch(&MAIN, &variant, &params, &bindings, params.quads.div_ceil(256))
}

/// The shader's numbers, rounded once from f64.
fn params(cfg: &Step, quads: u64) -> AdamW {
    assert!(cfg.step > 0 && cfg.eps > 0.0, "adamw: steps count from 1 and eps is above 0: {cfg:?}");
    let [lr, beta1, beta2] = [cfg.lr, cfg.beta1, cfg.beta2].map(f64::from);
    let power = |beta: f64| beta.powf(f64::from(cfg.step));
    AdamW {
        quads: u32::try_from(quads).expect("a binding is below 2^32 quads"),
        keep: (1.0 - lr * f64::from(cfg.weight_decay)) as f32,
        beta1: cfg.beta1,
        rest1: (1.0 - beta1) as f32,
        beta2: cfg.beta2,
        rest2: (1.0 - beta2) as f32,
        step_size: (lr / (1.0 - power(beta1))) as f32,
        correct2: (1.0 / (1.0 - power(beta2))) as f32,
        eps: cfg.eps,
    }
}

fn variant(grad: DType, copies: bool) -> Variant {
    let variant = Variant::new().constant("COPIES", copies.into()).quad("G", grad);
    if copies { variant.quad("LOW", DType::BF16) } else { variant }
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let both = |grad| [false, true].map(|copies| (MAIN, variant(grad, copies)));
    GRADIENTS.into_iter().flat_map(both).collect()
}

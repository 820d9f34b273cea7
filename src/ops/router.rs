//! The router of an MoE layer: logits to scores, scores to the top-k experts and their weights.
//!
//! Definition: torchtitan's `TokenChoiceTopKRouter` (July 2025; `route_norm` and `route_scale` from August). The bias
//! moves the choice only: "Auxiliary-Loss-Free Load Balancing" (Wang et al., 2024).
//! Tolerance: the chosen experts are those of the f32 scores, so they may differ from another implementation's where
//! two scores are within 1e-6 of each other. Scores: 2e-6 relative for logits within +-20 (WGSL allows `exp`
//! `3 + 2 |x|` ulp), plus one rounding of the gradient to its dtype.

use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Router {
        tokens: u32,
        experts: u32,
        top_k: u32,
        scale: f32,
    }
}

const TEXT: &str = include_str!("../../shaders/router.wgsl");
const FORWARD: Kernel = Kernel { name: "router.forward", text: TEXT, entry: "forward" };
const BACKWARD: Kernel = Kernel { name: "router.backward", text: TEXT, entry: "backward" };

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreFunc {
    /// Softmax over the experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// What a router computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// Experts E.
    pub experts: usize,
    /// Experts chosen per token, K, at most E.
    pub top_k: usize,
    /// Logits to scores.
    pub func: ScoreFunc,
    /// Divide the K weights by their sum (plus 1e-20).
    pub norm: bool,
    /// Factor on the weights, after that.
    pub scale: f32,
}

/// What a router decided for T tokens.
#[derive(Clone, Debug)]
pub struct Routing {
    /// Scores of all experts, `(T, E)` f32.
    pub scores: Tensor,
    /// Chosen experts, best first, flat u32 `[T * K]`.
    pub ids: Tensor,
    /// Their weights, flat f32 `[T * K]`.
    pub weights: Tensor,
}

/// Routes T tokens: `logits` `(T, E)` f32 or bf16, `bias` flat f32 `[E]`.
///
/// The K largest of score + bias are chosen, equal ones by the lower index, NaN first; the weights are made of the
/// scores without the bias.
///
/// # Errors
/// A result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn forward(gpu: &Gpu, logits: &Tensor, bias: &Tensor, spec: Spec) -> Result<Routing> {
    assert_eq!(logits.cols(), spec.experts, "router: logits {:?}, experts", logits.shape());
    assert_eq!(bias.shape(), [spec.experts], "router: bias, experts");
    assert!(0 < spec.top_k && spec.top_k <= spec.experts, "router: top_k of {spec:?}");
    let tokens = logits.rows();
    let routing = Routing {
        scores: Tensor::empty(gpu, "router scores", &[tokens, spec.experts], DType::F32)?,
        ids: Tensor::flat(gpu, "chosen experts", tokens * spec.top_k, DType::U32)?,
        weights: Tensor::flat(gpu, "router weights", tokens * spec.top_k, DType::F32)?,
    };
    let written = [routing.scores.write(), routing.ids.write(), routing.weights.write()];
    let bindings = [&[logits.read(), bias.read()][..], &written].concat();
    let variant = variant("FORWARD", spec.func, spec.norm, logits.dtype());
    let params = params(spec, tokens);
    gpu.dispatch(&FORWARD, &variant, &params, &bindings, params.tokens.div_ceil(64))?;
    Ok(routing)
}

/// The logits' gradient `(T, E)` in `dtype`, from the weights' gradient, flat f32 `[T * K]`.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward(
    gpu: &Gpu,
    d_weights: &Tensor,
    routing: &Routing,
    spec: Spec,
    dtype: DType,
) -> Result<Tensor> {
    let tokens = routing.scores.rows();
    assert_eq!(d_weights.shape(), [tokens * spec.top_k], "router: d_weights for {tokens} tokens, {spec:?}");
    let out = Tensor::empty(gpu, "router gradient", routing.scores.shape(), dtype)?;
    let bindings = [d_weights.read(), routing.scores.read(), routing.ids.read(), out.write()];
    let params = params(spec, tokens);
    let variant = variant("BACKWARD", spec.func, spec.norm, dtype);
    gpu.dispatch(&BACKWARD, &variant, &params, &bindings, params.tokens.div_ceil(64))?;
    Ok(out)
}

fn params(spec: Spec, tokens: usize) -> Router {
    Router {
        tokens: tokens as u32,
        experts: spec.experts as u32,
        top_k: spec.top_k as u32,
        scale: spec.scale,
    }
}

fn variant(which: &str, func: ScoreFunc, norm: bool, x: DType) -> Variant {
    Variant::new()
        .constant("FORWARD", u32::from(which == "FORWARD"))
        .constant("BACKWARD", u32::from(which == "BACKWARD"))
        .constant("SIGMOID", u32::from(func == ScoreFunc::Sigmoid))
        .constant("NORM", u32::from(norm))
        .quad("X", x)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for func in [ScoreFunc::Softmax, ScoreFunc::Sigmoid] {
        for norm in [false, true] {
            for x in [DType::F32, DType::BF16] {
                all.push((FORWARD, variant("FORWARD", func, norm, x)));
                all.push((BACKWARD, variant("BACKWARD", func, norm, x)));
            }
        }
    }
    all
}

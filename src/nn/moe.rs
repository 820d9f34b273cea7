//! The mixture-of-experts layer of torchtitan's Llama4, July 2025 (`experiments/llama4/model/moe.py` at `be15836a8`).

use super::Converters;
use super::build::{Builder, Ffn, Linear, normal};
use crate::Result;
use crate::autograd::{Readers, Tape, Var};
use crate::config::{self, ModelArgs};
use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::fp8_linear::Recipe;
use crate::ops::router;
use crate::params::{ParamId, Table};
use crate::tensor::Tensor;

/// Router, routed experts and, if there is one, the shared expert, which every token visits.
///
/// A part of [`Llama4`](super::Llama4), and a layer of its own:
///
/// ```no_run
/// use moe8::autograd::Tape;
/// use moe8::params::Weights;
/// # fn f(gpu: &moe8::gpu::Gpu, weights: &dyn Weights, moe: &moe8::nn::Moe, x: moe8::tensor::Tensor,
/// #      d_out: moe8::tensor::Tensor) -> moe8::Result<()> {
/// let mut tape = Tape::new(gpu, weights); // `weights` holds the parameters of the table that `Moe::build` gave
/// let x = tape.leaf(x); // (T, D)
/// let done = moe.forward(&mut tape, &x)?;
/// let d_x = tape.backward(&done.out, Some(d_out), &[&x])?; // weight gradients went to `weights`
/// # Ok(())
/// # }
/// ```
pub struct Moe {
    gate: Linear,
    experts: Ffn,
    shared: Option<Ffn>,
    bias: Tensor,
    router: router::Spec,
    score_before_experts: bool,
}

/// What [`Moe::forward`] gives.
pub struct MoeForward {
    /// The layer's output (T, D).
    pub out: Var,
    /// Tokens per expert, flat u32 (E).
    pub counts: Tensor,
}

impl Moe {
    /// A layer alone, named `module`, and the table of its parameters: gate (E, D), experts' w1 and w3 (E, F, D) and
    /// w2 (E, D, F), shared expert the same with E = 1. Expert biases start at zero.
    ///
    /// Of `args` it reads dim, the hidden width, num_experts, top_k and the router's settings. w1 starts at standard
    /// deviation 0.02, all others at `std`. Names in `converters` that fit nothing here are warned of in the log.
    ///
    /// # Errors
    /// The device, or its memory.
    pub fn build(
        gpu: &Gpu,
        args: &ModelArgs,
        converters: &Converters,
        module: &str,
        std: f32,
    ) -> Result<(Moe, Table)> {
        let mut b = Builder::new(converters);
        let moe = Moe::add(gpu, &mut b, args, module, std)?;
        for warning in b.unmatched() {
            log::warn!("{warning}");
        }
        Ok((moe, b.table))
    }

    /// The layer as a part of a larger model.
    pub(super) fn add(
        gpu: &Gpu,
        b: &mut Builder<'_>,
        args: &ModelArgs,
        module: &str,
        std: f32,
    ) -> Result<Moe> {
        let sizes = (args.dim, args.expert_hidden());
        let experts = b.experts(&format!("{module}.experts"), args.num_experts, sizes, std);
        let gate = b.linear(&format!("{module}.router.gate"), args.num_experts, args.dim, normal(std));
        let shared =
            args.use_shared_expert.then(|| b.experts(&format!("{module}.shared_expert"), 1, sizes, std));
        let bias = Tensor::flat(gpu, "expert bias", args.num_experts, DType::F32)?;
        gpu.clear(bias.memory().0);
        let score_before_experts = args.score_before_experts;
        Ok(Moe { gate, experts, shared, bias, router: router_spec(args), score_before_experts })
    }

    /// The layer on tokens `x` (T, D).
    ///
    /// # Errors
    /// The device, its memory, or other ranks.
    pub fn forward(&self, tape: &mut Tape<'_>, x: &Var) -> Result<MoeForward> {
        let logits = self.gate.forward(tape, x)?;
        let (scores, ids) = tape.router(&logits, &self.bias, self.router)?;
        let plan = tape.plan(&ids, self.router.experts, self.router.top_k)?;
        let (before, after) =
            if self.score_before_experts { (Some(&scores), None) } else { (None, Some(&scores)) };
        let readers = Readers { linears: &self.experts.first(), offs: Some(&plan.offs) };
        let rows = tape.gather(x, &plan, before, readers)?;
        let routed = self.experts.forward(tape, &rows, Some(&plan))?;
        let shared = match &self.shared {
            Some(ffn) => Some(ffn.forward(tape, x, None)?),
            None => None,
        };
        let out = tape.combine(&routed, &plan, after, shared.as_ref())?;
        Ok(MoeForward { out, counts: plan.counts })
    }

    /// The linears that read the layer's input in one call as it is; the router reads it by itself (narrow products plain), the experts
    /// read routed rows.
    pub(super) fn readers(&self) -> Vec<(ParamId, Recipe)> {
        self.shared.iter().flat_map(Ffn::first).collect()
    }

    /// What is added to each expert's score for selection only, flat f32 (E).
    pub fn bias(&self) -> &Tensor {
        &self.bias
    }

    /// How the routed experts' grouped GEMMs compute.
    pub fn recipe(&self) -> Recipe {
        self.experts.w1.recipe
    }

    /// The expert tensors, shared ones included, and how their GEMMs compute.
    pub(super) fn expert_weights(&self) -> impl Iterator<Item = (ParamId, Recipe)> {
        let all = std::iter::once(&self.experts).chain(&self.shared);
        all.flat_map(|ffn| ffn.linears().map(|l| (l.weight, l.recipe)))
    }
}

fn router_spec(args: &ModelArgs) -> router::Spec {
    router::Spec {
        experts: args.num_experts,
        top_k: args.top_k,
        func: match args.score_func {
            config::ScoreFunc::Softmax => router::ScoreFunc::Softmax,
            config::ScoreFunc::Sigmoid => router::ScoreFunc::Sigmoid,
        },
        norm: args.route_norm,
        scale: args.route_scale as f32,
    }
}

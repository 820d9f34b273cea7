//! Llama4 as torchtitan had it in July 2025 (`experiments/llama4/model/{model,moe}.py` at `be15836a8`).
//!
//! `h = x + Attention(RMSNorm(x)); out = h + (MoE | FFN)(RMSNorm(h))`; then a norm and an untied head. No biases.

use super::{Conversion, Converters};
use crate::Result;
use crate::autograd::{Tape, Var};
use crate::config::{AttnMask, ModelArgs, ScoreFunc};
use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::fp8_linear::Recipe;
use crate::ops::{attention, dispatch, rope, router};
use crate::params::{Init, ParamId, Spec, Table};
use crate::tensor::Tensor;

/// One batch on the device.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Token ids, flat u32 (T).
    pub tokens: Tensor,
    /// Next tokens, flat u32 (T).
    pub labels: Tensor,
    /// Number of each position's document, flat u32 (T); for block-causal masks.
    pub docs: Option<Tensor>,
    /// Sequences B.
    pub batch: usize,
    /// Tokens S of each.
    pub seq: usize,
}

/// What a forward pass gives beside the loss.
pub struct Forward {
    /// Mean cross entropy.
    pub loss: Var,
    /// Tokens per expert of each MoE layer, flat u32 (E), in layer order.
    pub counts: Vec<Tensor>,
}

/// A linear and how it computes.
#[derive(Clone, Copy, Debug)]
struct Linear {
    weight: ParamId,
    recipe: Recipe,
}

/// Three linears: `w2(silu(w1 x) * w3 x)`.
#[derive(Clone, Copy, Debug)]
struct Ffn {
    w1: Linear,
    w2: Linear,
    w3: Linear,
}

struct Moe {
    gate: Linear,
    experts: Ffn,
    shared: Option<Ffn>,
    bias: Tensor,
}

enum Mlp {
    Dense(Ffn),
    Moe(Moe),
}

struct Layer {
    attention_norm: ParamId,
    ffn_norm: ParamId,
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
    mlp: Mlp,
    rope: bool,
    block: Option<usize>,
}

/// The model: parameter ids, recipes and the routing biases.
pub struct Llama4 {
    args: ModelArgs,
    embedding: ParamId,
    layers: Vec<Layer>,
    norm: ParamId,
    output: Linear,
    rope_table: Option<Tensor>,
    conversions: Vec<Conversion>,
}

/// Collects the table's rows and the conversions while the model is built.
struct Builder<'a> {
    table: Table,
    converters: &'a Converters,
    conversions: Vec<Conversion>,
    block: usize,
}

/// torch's `trunc_normal_` cuts at an absolute 2 unless told otherwise.
const DEFAULT_CUT: f32 = 2.0;

impl Builder<'_> {
    fn param(&mut self, name: String, shape: &[usize], init: Init) -> ParamId {
        self.table.add(Spec { name, shape: shape.to_vec(), block: self.block, init })
    }

    fn norm(&mut self, module: &str, dim: usize) -> ParamId {
        self.param(format!("{module}.weight"), &[dim], Init::Ones)
    }

    fn linear(&mut self, module: &str, n: usize, k: usize, std: f32) -> Linear {
        let recipe = self.converters.linear(module, n, k);
        self.note(module, recipe);
        let init = Init::Normal { std, cut: DEFAULT_CUT };
        Linear { weight: self.param(format!("{module}.weight"), &[n, k], init), recipe }
    }

    fn note(&mut self, module: &str, recipe: Recipe) {
        if recipe != Recipe::HighPrecision {
            self.conversions.push(Conversion { module: module.into(), recipe });
        }
    }

    /// Dense FFN: w1 starts at std 0.02, w2 and w3 shrink with depth.
    fn ffn(&mut self, module: &str, dim: usize, hidden: usize, std: f32) -> Ffn {
        let w1 = self.linear(&format!("{module}.w1"), hidden, dim, 0.02);
        let w2 = self.linear(&format!("{module}.w2"), dim, hidden, std);
        let w3 = self.linear(&format!("{module}.w3"), hidden, dim, std);
        Ffn { w1, w2, w3 }
    }

    /// `GroupedExperts`: w1, w3 (E, hidden, dim), w2 (E, dim, hidden).
    fn experts(&mut self, module: &str, experts: usize, (dim, hidden): (usize, usize), std: f32) -> Ffn {
        let recipe = self.converters.experts(module);
        self.note(module, recipe);
        let mut one = |name: &str, n: usize, k: usize, std: f32| {
            let init = Init::Normal { std, cut: DEFAULT_CUT };
            Linear { weight: self.param(format!("{module}.{name}"), &[experts, n, k], init), recipe }
        };
        let w1 = one("w1", hidden, dim, 0.02);
        let w2 = one("w2", dim, hidden, std);
        let w3 = one("w3", hidden, dim, std);
        Ffn { w1, w2, w3 }
    }
}

/// Standard deviation of the projections back into the residual stream, and of all that starts like them.
fn depth_std(args: &ModelArgs, layer: usize) -> f32 {
    let depth = if args.depth_init { layer + 1 } else { args.n_layers };
    (0.02 / (2.0f64 * depth as f64).sqrt()) as f32
}

impl Llama4 {
    /// The model and the table of its parameters; expert biases start at zero.
    ///
    /// # Errors
    /// The device, or its memory.
    pub fn build(gpu: &Gpu, args: &ModelArgs, converters: &Converters) -> Result<(Llama4, Table)> {
        let mut b = Builder { table: Table::default(), converters, conversions: Vec::new(), block: 0 };
        let wide = Init::Normal { std: 1.0, cut: f32::INFINITY };
        let embedding = b.param("tok_embeddings.weight".into(), &[args.vocab_size, args.dim], wide);
        let mut layers = Vec::new();
        for i in 0..args.n_layers {
            b.block = i + 1;
            layers.push(layer(gpu, &mut b, args, i)?);
        }
        b.block = args.n_layers + 1;
        let norm = b.norm("norm", args.dim);
        let output = output(&mut b, args);
        let positions = layers.iter().any(|l| l.rope);
        let rope_table = if positions {
            Some(rope::table(gpu, args.max_seq_len, args.head_dim(), args.rope_theta as f32)?)
        } else {
            None
        };
        let (conversions, table) = (b.conversions, b.table);
        Ok((Llama4 { args: args.clone(), embedding, layers, norm, output, rope_table, conversions }, table))
    }

    /// The arguments it was built from.
    pub fn args(&self) -> &ModelArgs {
        &self.args
    }

    /// What the float8 converter changed, by name.
    pub fn conversions(&self) -> &[Conversion] {
        &self.conversions
    }

    /// Whether each parameter of `table` is wrapped: its grouped GEMM runs in fp8.
    pub fn wrapped(&self, table: &Table) -> Vec<bool> {
        let mut wrapped = vec![false; table.iter().count()];
        for layer in &self.layers {
            if let Mlp::Moe(moe) = &layer.mlp {
                for ffn in std::iter::once(&moe.experts).chain(&moe.shared) {
                    for linear in [ffn.w1, ffn.w2, ffn.w3] {
                        wrapped[linear.weight.0] = linear.recipe != Recipe::HighPrecision;
                    }
                }
            }
        }
        wrapped
    }

    /// Expert biases of the MoE layers with their layer numbers.
    pub fn biases(&self) -> Vec<(usize, &Tensor)> {
        let bias = |(i, l): (usize, &'_ Layer)| match &l.mlp {
            Mlp::Moe(_) => Some(i),
            Mlp::Dense(_) => None,
        };
        let numbers: Vec<usize> = self.layers.iter().enumerate().filter_map(bias).collect();
        numbers
            .into_iter()
            .map(|i| match &self.layers[i].mlp {
                Mlp::Moe(moe) => (i, &moe.bias),
                Mlp::Dense(_) => unreachable!("filtered above"),
            })
            .collect()
    }

    /// Loss of a batch; `share` scales its gradient (1 / accumulation steps).
    ///
    /// # Errors
    /// The device, its memory, or other ranks.
    pub fn loss(&self, tape: &mut Tape<'_>, batch: &Batch, share: f32) -> Result<Forward> {
        let (h, counts) = self.hidden(tape, batch)?;
        let loss = tape.cross_entropy_head(&h, self.output.weight, &batch.labels, share)?;
        Ok(Forward { loss, counts })
    }

    /// Logits (T, V) of a batch, whole: for small models and tests.
    ///
    /// # Errors
    /// As [`Llama4::loss`].
    pub fn logits(&self, tape: &mut Tape<'_>, batch: &Batch) -> Result<Tensor> {
        let (h, _) = self.hidden(tape, batch)?;
        Ok(tape.linear(&h, self.output.weight, None, self.output.recipe)?.value().clone())
    }

    fn hidden(&self, tape: &mut Tape<'_>, batch: &Batch) -> Result<(Var, Vec<Tensor>)> {
        let mut counts = Vec::new();
        tape.enter_block(0);
        let mut x = tape.embedding(&batch.tokens, self.embedding)?;
        tape.leave_block(0)?;
        for (i, layer) in self.layers.iter().enumerate() {
            tape.enter_block(i + 1);
            x = self.layer(tape, layer, &x, batch, &mut counts)?;
            tape.leave_block(i + 1)?;
        }
        tape.enter_block(self.layers.len() + 1);
        Ok((tape.rmsnorm(&x, self.norm, self.eps())?, counts))
    }

    fn eps(&self) -> f32 {
        self.args.norm_eps as f32
    }

    fn layer(
        &self,
        tape: &mut Tape<'_>,
        layer: &Layer,
        x: &Var,
        batch: &Batch,
        counts: &mut Vec<Tensor>,
    ) -> Result<Var> {
        let normed = tape.rmsnorm(x, layer.attention_norm, self.eps())?;
        let attended = self.attention(tape, layer, &normed, batch)?;
        let h = tape.add(x, &attended)?;
        let normed = tape.rmsnorm(&h, layer.ffn_norm, self.eps())?;
        let out = match &layer.mlp {
            Mlp::Dense(ffn) => feed_forward(tape, ffn, &normed, None)?,
            Mlp::Moe(moe) => self.moe(tape, moe, &normed, counts)?,
        };
        tape.add(&h, &out)
    }

    fn attention(&self, tape: &mut Tape<'_>, layer: &Layer, x: &Var, batch: &Batch) -> Result<Var> {
        let mut q = dense(tape, x, layer.wq)?;
        let mut k = dense(tape, x, layer.wk)?;
        let v = dense(tape, x, layer.wv)?;
        let head_dim = self.args.head_dim();
        if let (true, Some(table)) = (layer.rope, &self.rope_table) {
            q = tape.rope(&q, table, batch.seq, head_dim)?;
            k = tape.rope(&k, table, batch.seq, head_dim)?;
        }
        let shape = attention::Shape {
            batch: batch.batch,
            seq: batch.seq,
            heads: self.args.n_heads,
            kv_heads: self.args.kv_heads(),
            head_dim,
            block: layer.block,
        };
        let out = tape.attention((&q, &k, &v), shape, batch.docs.as_ref())?;
        dense(tape, &out, layer.wo)
    }

    fn moe(&self, tape: &mut Tape<'_>, moe: &Moe, x: &Var, counts: &mut Vec<Tensor>) -> Result<Var> {
        let spec = self.router_spec();
        let logits = dense(tape, x, moe.gate)?;
        let (scores, ids) = tape.router(&logits, &moe.bias, spec)?;
        let plan = tape.plan(&ids, spec.experts, spec.top_k)?;
        counts.push(plan.counts.clone());
        let (before, after) =
            if self.args.score_before_experts { (Some(&scores), None) } else { (None, Some(&scores)) };
        let rows = tape.gather(x, &plan, before)?;
        let routed = feed_forward(tape, &moe.experts, &rows, Some(&plan))?;
        let shared = match &moe.shared {
            Some(ffn) => Some(feed_forward(tape, ffn, x, None)?),
            None => None,
        };
        tape.combine(&routed, &plan, after, shared.as_ref())
    }

    fn router_spec(&self) -> router::Spec {
        router::Spec {
            experts: self.args.num_experts,
            top_k: self.args.top_k,
            func: match self.args.score_func {
                ScoreFunc::Softmax => router::ScoreFunc::Softmax,
                ScoreFunc::Sigmoid => router::ScoreFunc::Sigmoid,
            },
            norm: self.args.route_norm,
            scale: self.args.route_scale as f32,
        }
    }

    /// Whether batches need their documents' numbers.
    pub fn needs_docs(&self) -> bool {
        self.args.attn_mask_type == AttnMask::BlockCausal
    }
}

fn dense(tape: &mut Tape<'_>, x: &Var, linear: Linear) -> Result<Var> {
    tape.linear(x, linear.weight, None, linear.recipe)
}

/// SwiGLU; over expert groups if `plan`.
fn feed_forward(tape: &mut Tape<'_>, ffn: &Ffn, x: &Var, plan: Option<&dispatch::Plan>) -> Result<Var> {
    let offs = plan.map(|p| &p.offs);
    let gate = tape.linear(x, ffn.w1.weight, offs, ffn.w1.recipe)?;
    let up = tape.linear(x, ffn.w3.weight, offs, ffn.w3.recipe)?;
    let hidden = tape.swiglu(&gate, &up)?;
    tape.linear(&hidden, ffn.w2.weight, offs, ffn.w2.recipe)
}

fn layer(gpu: &Gpu, b: &mut Builder<'_>, args: &ModelArgs, i: usize) -> Result<Layer> {
    let (dim, kv) = (args.dim, args.kv_heads() * args.head_dim());
    let at = |module: &str| format!("layers.{i}.{module}");
    let std = depth_std(args, i);
    let wq = b.linear(&at("attention.wq"), dim, dim, 0.02);
    let wk = b.linear(&at("attention.wk"), kv, dim, 0.02);
    let wv = b.linear(&at("attention.wv"), kv, dim, 0.02);
    let wo = b.linear(&at("attention.wo"), dim, dim, std);
    let mlp = if args.is_moe(i) {
        let sizes = (dim, args.expert_hidden());
        let experts = b.experts(&at("moe.experts"), args.num_experts, sizes, std);
        let gate = b.linear(&at("moe.router.gate"), args.num_experts, dim, std);
        let shared = args.use_shared_expert.then(|| b.experts(&at("moe.shared_expert"), 1, sizes, std));
        let bias = Tensor::flat(gpu, "expert bias", args.num_experts, DType::F32)?;
        gpu.clear(bias.memory().0);
        Mlp::Moe(Moe { gate, experts, shared, bias })
    } else {
        Mlp::Dense(b.ffn(&at("feed_forward"), dim, args.dense_hidden(), std))
    };
    let attention_norm = b.norm(&at("attention_norm"), dim);
    let ffn_norm = b.norm(&at("ffn_norm"), dim);
    let (rope, block) = (!args.is_nope(i), args.attn_block(i));
    Ok(Layer { attention_norm, ffn_norm, wq, wk, wv, wo, mlp, rope, block })
}

fn output(b: &mut Builder<'_>, args: &ModelArgs) -> Linear {
    let std = (args.dim as f64).powf(-0.5) as f32;
    let recipe = b.converters.linear("output", args.vocab_size, args.dim);
    b.note("output", recipe);
    let init = Init::Normal { std, cut: 3.0 * std };
    Linear { weight: b.param("output.weight".into(), &[args.vocab_size, args.dim], init), recipe }
}

//! Llama4 as torchtitan had it in July 2025 (`experiments/llama4/model/{model,moe}.py` at `be15836a8`).
//!
//! `h = x + Attention(RMSNorm(x)); out = h + (MoE | FFN)(RMSNorm(h))`; then a norm and an untied head. No biases.

use super::build::{Builder, Ffn, Linear, normal};
use super::{Conversion, Converters, Moe};
use crate::Result;
use crate::autograd::{Readers, Tape, Var};
use crate::config::{AttnMask, ModelArgs};
use crate::gpu::Gpu;
use crate::ops::fp8_linear::Recipe;
use crate::ops::{attention, rope};
use crate::params::{Init, ParamId, Table};
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

enum Mlp {
    Dense(Ffn),
    Moe(Moe),
}

impl Mlp {
    /// The linears that read all of its input as it is.
    fn readers(&self) -> Vec<(ParamId, Recipe)> {
        match self {
            Mlp::Dense(ffn) => ffn.first().to_vec(),
            Mlp::Moe(moe) => moe.readers(),
        }
    }
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

impl Layer {
    /// The linears that read the normed stream before attention.
    fn attention_readers(&self) -> [(ParamId, Recipe); 3] {
        [self.wq.pair(), self.wk.pair(), self.wv.pair()]
    }
}

/// The residual stream: what a block adds to it is added with the next norm, in one pass.
struct Stream {
    sum: Var,
    more: Option<Var>,
}

impl Stream {
    fn new(sum: Var) -> Stream {
        Stream { sum, more: None }
    }

    /// Adds a block's output. A norm stands between any two.
    fn add(&mut self, more: Var) {
        assert!(self.more.replace(more).is_none(), "a norm stands between two sums");
    }

    /// The norm of the stream, for linears that read all of it.
    fn norm(
        &mut self,
        tape: &mut Tape<'_>,
        weight: ParamId,
        eps: f32,
        linears: &[(ParamId, Recipe)],
    ) -> Result<Var> {
        let readers = Readers { linears, offs: None };
        let Some(more) = self.more.take() else { return tape.rmsnorm(&self.sum, weight, eps, readers) };
        let (sum, normed) = tape.add_rmsnorm(&self.sum, &more, weight, eps, readers)?;
        self.sum = sum;
        Ok(normed)
    }
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
    warnings: Vec<String>,
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
        let mut b = Builder::new(converters);
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
        let warnings = b.unmatched();
        let (conversions, table) = (b.conversions, b.table);
        let args = args.clone();
        Ok((Llama4 { args, embedding, layers, norm, output, rope_table, conversions, warnings }, table))
    }

    /// The arguments it was built from.
    pub fn args(&self) -> &ModelArgs {
        &self.args
    }

    /// What the float8 converter changed, by name.
    pub fn conversions(&self) -> &[Conversion] {
        &self.conversions
    }

    /// Names in the converter's settings that fit no module, as sentences.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Whether each parameter of `table` is wrapped: its grouped GEMM runs in fp8.
    pub fn wrapped(&self, table: &Table) -> Vec<bool> {
        let mut wrapped = vec![false; table.iter().count()];
        for (_, moe) in self.moes() {
            for (weight, recipe) in moe.expert_weights() {
                wrapped[weight.0] = recipe != Recipe::HighPrecision;
            }
        }
        wrapped
    }

    /// The MoE layers with their numbers.
    fn moes(&self) -> impl Iterator<Item = (usize, &Moe)> {
        self.layers.iter().enumerate().filter_map(|(i, layer)| match &layer.mlp {
            Mlp::Moe(moe) => Some((i, moe)),
            Mlp::Dense(_) => None,
        })
    }

    /// Expert biases of the MoE layers with their layer numbers.
    pub fn biases(&self) -> Vec<(usize, &Tensor)> {
        self.moes().map(|(i, moe)| (i, moe.bias())).collect()
    }

    /// Loss of a batch; `share` scales its gradient (1 / accumulation steps).
    ///
    /// # Errors
    /// The device, its memory, or other ranks.
    pub fn loss(&self, tape: &mut Tape<'_>, batch: &Batch, share: f32) -> Result<Forward> {
        let (h, counts) = self.hidden(tape, batch)?;
        let loss =
            tape.cross_entropy_head(&h, self.output.weight, &batch.labels, share, self.output.recipe)?;
        Ok(Forward { loss, counts })
    }

    /// Logits (T, V) of a batch, whole: for small models and tests.
    ///
    /// # Errors
    /// As [`Llama4::loss`].
    pub fn logits(&self, tape: &mut Tape<'_>, batch: &Batch) -> Result<Tensor> {
        let (h, _) = self.hidden(tape, batch)?;
        Ok(self.output.forward(tape, &h)?.value().clone())
    }

    fn hidden(&self, tape: &mut Tape<'_>, batch: &Batch) -> Result<(Var, Vec<Tensor>)> {
        let mut counts = Vec::new();
        tape.enter_block(0);
        let mut stream = Stream::new(tape.embedding(&batch.tokens, self.embedding)?);
        tape.leave_block(0)?;
        for (i, layer) in self.layers.iter().enumerate() {
            tape.enter_block(i + 1);
            self.layer(tape, layer, &mut stream, batch, &mut counts)?;
            tape.leave_block(i + 1)?;
        }
        tape.enter_block(self.layers.len() + 1);
        // The head takes its input in parts.
        Ok((stream.norm(tape, self.norm, self.eps(), &[])?, counts))
    }

    fn eps(&self) -> f32 {
        self.args.norm_eps as f32
    }

    fn layer(
        &self,
        tape: &mut Tape<'_>,
        layer: &Layer,
        stream: &mut Stream,
        batch: &Batch,
        counts: &mut Vec<Tensor>,
    ) -> Result<()> {
        let normed = stream.norm(tape, layer.attention_norm, self.eps(), &layer.attention_readers())?;
        stream.add(self.attention(tape, layer, &normed, batch)?);
        let normed = stream.norm(tape, layer.ffn_norm, self.eps(), &layer.mlp.readers())?;
        stream.add(match &layer.mlp {
            Mlp::Dense(ffn) => ffn.forward(tape, &normed, None)?,
            Mlp::Moe(moe) => {
                let done = moe.forward(tape, &normed)?;
                counts.push(done.counts);
                done.out
            }
        });
        Ok(())
    }

    fn attention(&self, tape: &mut Tape<'_>, layer: &Layer, x: &Var, batch: &Batch) -> Result<Var> {
        let [q, k, v] = tape.linears(x, layer.attention_readers(), None)?;
        let table = self.rope_table.as_ref().filter(|_| layer.rope);
        let shape = attention::Shape {
            batch: batch.batch,
            seq: batch.seq,
            heads: self.args.n_heads,
            kv_heads: self.args.kv_heads(),
            head_dim: self.args.head_dim(),
            block: layer.block,
        };
        let out = tape.attention((&q, &k, &v), shape, batch.docs.as_ref(), table)?;
        layer.wo.forward(tape, &out)
    }

    /// Whether batches need their documents' numbers.
    pub fn needs_docs(&self) -> bool {
        self.args.attn_mask_type == AttnMask::BlockCausal
    }
}

fn layer(gpu: &Gpu, b: &mut Builder<'_>, args: &ModelArgs, i: usize) -> Result<Layer> {
    let (dim, kv) = (args.dim, args.kv_heads() * args.head_dim());
    let at = |module: &str| format!("layers.{i}.{module}");
    let std = depth_std(args, i);
    let wq = b.linear(&at("attention.wq"), dim, dim, normal(0.02));
    let wk = b.linear(&at("attention.wk"), kv, dim, normal(0.02));
    let wv = b.linear(&at("attention.wv"), kv, dim, normal(0.02));
    let wo = b.linear(&at("attention.wo"), dim, dim, normal(std));
    let mlp = if args.is_moe(i) {
        Mlp::Moe(Moe::add(gpu, b, args, &at("moe"), std)?)
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
    let init = Init::Normal { std, cut: 3.0 * std };
    b.linear("output", args.vocab_size, args.dim, init)
}

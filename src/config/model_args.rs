//! What follows from [`ModelArgs`]: flavours, widths, kinds of layers, parameter counts, FLOPs.
//!
//! Definitions: torchtitan, July 2025, `experiments/llama4/__init__.py` (flavours), `model/args.py`
//! (counts), `model/model.py` and `model/moe.py` (widths, kinds of layers).

use super::choices::{AttnMask, Flavor};
use super::source::Source;
use super::table::{Config, KEYS, ModelArgs};
use crate::{Error, Result};

/// Vocabulary of the debug flavours without a tokenizer: that of torchtitan's test tokenizer until
/// July 22, 2025 (2000 ranks and 256 special tokens).
pub(super) const DEBUG_VOCAB: usize = 2256;

/// Vocabulary of the 17B flavours without a tokenizer: that of Llama 4's own tokenizer.
const LLAMA4_VOCAB: usize = 202_048;

/// What a tokenizer says about its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// Number of token ids.
    pub words: usize,
    /// The end-of-text token, which ends a document.
    pub eos: usize,
}

/// Parameter counts as torchtitan's `get_nparams_and_flops` divides them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamCounts {
    /// The token embedding; part of `dense`.
    pub embedding: u64,
    /// All that every token visits: embedding, attention, dense FFNs, norms, output.
    pub dense: u64,
    /// MoE layers: router, shared expert, all routed experts.
    pub sparse: u64,
    /// The part of `sparse` that one token visits.
    pub sparse_active: u64,
}

impl ParamCounts {
    /// All parameters.
    pub fn total(&self) -> u64 {
        self.dense.saturating_add(self.sparse)
    }

    /// Parameters that one token visits.
    pub fn active(&self) -> u64 {
        self.dense.saturating_add(self.sparse_active)
    }
}

impl ModelArgs {
    /// The arguments of a flavour, at its own vocabulary.
    pub fn flavor(flavor: Flavor) -> Self {
        use Flavor::{Debugmodel, DebugmodelIrope, Maverick, MaverickIrope, Scout, ScoutIrope};
        let class = ModelArgs { rope_theta: 500_000.0, ..ModelArgs::default() };
        let debug = ModelArgs { dim: 256, n_layers: 6, n_heads: 16, ..class.clone() };
        let large = ModelArgs {
            dim: 5120,
            n_layers: 48,
            n_heads: 40,
            n_kv_heads: Some(8),
            ffn_dim_multiplier: Some(1.2),
            multiple_of: 2048,
            vocab_size: LLAMA4_VOCAB,
            ..class
        };
        let scout = ModelArgs { num_experts: 16, interleave_moe_layer_step: 1, ..large.clone() };
        let maverick = ModelArgs { num_experts: 128, ..large };
        let irope = |args: ModelArgs| ModelArgs {
            every_n_layers_nope: Some(4),
            use_flex_attn: true,
            attn_mask_type: AttnMask::BlockCausal,
            ..args
        };
        match flavor {
            Debugmodel => debug,
            DebugmodelIrope => ModelArgs { fixed_attn_block_size: 256, ..irope(debug) },
            Scout => scout,
            ScoutIrope => irope(scout),
            Maverick => maverick,
            MaverickIrope => irope(maverick),
        }
    }

    /// Width of one attention head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.n_heads.max(1)
    }

    /// Key and value heads.
    pub fn kv_heads(&self) -> usize {
        self.n_kv_heads.unwrap_or(self.n_heads)
    }

    /// Hidden width before rounding up: int(2/3 * 4 dim), then int(multiplier * that).
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "upstream computes this in f64 and truncates; the cast saturates for absurd values"
    )]
    fn raw_hidden(&self) -> f64 {
        let hidden = (2.0 * (4.0 * self.dim as f64) / 3.0).trunc();
        self.ffn_dim_multiplier.map_or(hidden, |m| (m * hidden).trunc())
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a whole number already; the cast saturates for absurd values"
    )]
    fn round_up(&self, hidden: f64) -> usize {
        let multiple = self.multiple_of.max(1);
        (hidden as usize).div_ceil(multiple).saturating_mul(multiple)
    }

    /// Hidden width F of the dense FFNs.
    pub fn dense_hidden(&self) -> usize {
        self.round_up(self.raw_hidden())
    }

    /// Hidden width F of a routed expert, and of the shared one.
    #[allow(clippy::cast_precision_loss, reason = "a handful of experts per token")]
    pub fn expert_hidden(&self) -> usize {
        let visits = (self.top_k + usize::from(self.use_shared_expert)).max(1);
        let scale = if self.auto_scale_hidden_dim { visits as f64 } else { 1.0 };
        self.round_up((self.raw_hidden() / scale).trunc())
    }

    /// Whether block `layer` (from 0) has an MoE layer instead of a dense FFN.
    pub fn is_moe(&self, layer: usize) -> bool {
        self.moe_enabled && (layer + 1).is_multiple_of(self.interleave_moe_layer_step)
    }

    /// Number of blocks with an MoE layer.
    pub fn n_moe_layers(&self) -> usize {
        if self.moe_enabled { self.n_layers / self.interleave_moe_layer_step.max(1) } else { 0 }
    }

    /// Whether block `layer` (from 0) has no positional encoding; it then attends to all earlier tokens.
    pub fn is_nope(&self, layer: usize) -> bool {
        self.every_n_layers_nope.is_some_and(|n| layer.is_multiple_of(n))
    }

    /// Length of the blocks that attention stays within in block `layer`; none: the whole sequence.
    pub fn attn_block(&self, layer: usize) -> Option<usize> {
        (self.every_n_layers_nope.is_some() && !self.is_nope(layer)).then_some(self.fixed_attn_block_size)
    }

    /// Parameter counts; saturating, so that [`Config::validate`] can ask for them before it knows that
    /// the sizes are sane.
    pub fn counts(&self) -> ParamCounts {
        let wide = |n: usize| n as u128;
        let (d, layers, moe_layers) = (wide(self.dim), wide(self.n_layers), wide(self.n_moe_layers()));
        let kv = wide(self.kv_heads()).saturating_mul(wide(self.head_dim()));
        let swiglu = |hidden: usize| d.saturating_mul(3).saturating_mul(wide(hidden));
        let embedding = d.saturating_mul(wide(self.vocab_size));
        let block = d.saturating_mul(d.saturating_add(kv).saturating_mul(2).saturating_add(2)); // wq, wo, wk, wv, norms
        let ffns = (layers - moe_layers).saturating_mul(swiglu(self.dense_hidden()));
        let dense = [embedding, embedding, layers.saturating_mul(block), ffns, d]
            .into_iter()
            .fold(0, u128::saturating_add);
        let expert = swiglu(self.expert_hidden());
        let experts = wide(self.num_experts).saturating_mul(expert);
        let active_experts = wide(self.top_k).saturating_mul(expert);
        let router = d.saturating_mul(wide(self.num_experts));
        let always = router.saturating_add(if self.use_shared_expert { expert } else { 0 });
        let narrow = |n: u128| u64::try_from(n).unwrap_or(u64::MAX);
        ParamCounts {
            embedding: narrow(embedding),
            dense: narrow(dense),
            sparse: narrow(moe_layers.saturating_mul(always.saturating_add(experts))),
            sparse_active: narrow(moe_layers.saturating_mul(always.saturating_add(active_experts))),
        }
    }

    /// FLOPs per token of forward and backward: 6 per active parameter outside the embedding, and
    /// 12 * layers * heads * head_dim * seq_len for attention, causality not subtracted.
    pub fn flops_per_token(&self, seq_len: usize) -> u64 {
        let counts = self.counts();
        let attention = [12, self.n_layers, self.n_heads, self.head_dim(), seq_len]
            .into_iter()
            .fold(1_u64, |product, n| product.saturating_mul(n as u64));
        6_u64.saturating_mul(counts.active() - counts.embedding).saturating_add(attention)
    }
}

const FROM_TOKENIZER: &str = "flavor; a tokenizer's replaces it";

impl Config {
    /// Replaces `args` by those of `model.flavor`.
    pub(super) fn use_flavor(&mut self) {
        self.args = ModelArgs::flavor(self.model.flavor);
        for (key, source) in KEYS.iter().zip(&mut self.sources.0) {
            if key.section == "model.args" {
                *source = Source::Flavor;
            }
        }
    }

    /// Fills in the arguments that follow from others unless the user set them.
    pub(super) fn derive(&mut self) {
        if !self.sources.of("model.args.max_seq_len").is_user() {
            self.args.max_seq_len = self.training.seq_len;
            self.sources.set("model.args.max_seq_len", Source::Derived("training.seq_len"));
        }
        for path in ["model.args.vocab_size", "model.args.eos_id"] {
            if !self.sources.of(path).is_user() {
                self.sources.set(path, Source::Derived(FROM_TOKENIZER));
            }
        }
    }

    /// The model's arguments at the vocabulary of a tokenizer, if there is one. A `vocab_size` that the
    /// user set stays, and is an error if the tokenizer has more words.
    pub fn model_args(&self, tokenizer: Option<Vocabulary>) -> Result<ModelArgs> {
        let mut args = self.args.clone();
        let Some(Vocabulary { words, eos }) = tokenizer else { return Ok(args) };
        if !self.sources.of("model.args.vocab_size").is_user() {
            args.vocab_size = words;
        } else if words > args.vocab_size {
            return Err(Error::user(
                format!("the tokenizer has {words} tokens, but model.args.vocab_size = {}", args.vocab_size),
                format!("set model.args.vocab_size to {words} or more, or leave it out"),
            ));
        }
        if !self.sources.of("model.args.eos_id").is_user() {
            args.eos_id = eos;
        }
        Ok(args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_model_has_upstreams_numbers() {
        let args = ModelArgs::flavor(Flavor::Debugmodel);
        assert_eq!((args.head_dim(), args.kv_heads()), (16, 16));
        assert_eq!((args.dense_hidden(), args.expert_hidden()), (768, 512));
        assert_eq!(
            (0..6).map(|i| args.is_moe(i)).collect::<Vec<_>>(),
            [false, true, false, true, false, true]
        );
        let counts = args.counts();
        assert_eq!((counts.dense, counts.sparse), (4_500_736, 10_622_976));
        assert_eq!((counts.active(), counts.total()), (6_866_176, 15_123_712));
        assert_eq!(args.flops_per_token(2048), 75_480_576);
        for (vocab_size, dense) in [(2000, 4_369_664), (2048, 4_394_240)] {
            assert_eq!(ModelArgs { vocab_size, ..args.clone() }.counts().dense, dense);
        }
    }

    #[test]
    fn large_models() {
        let scout = ModelArgs::flavor(Flavor::Scout);
        assert_eq!((scout.head_dim(), scout.dense_hidden(), scout.expert_hidden()), (128, 16_384, 8192));
        assert_eq!((scout.n_moe_layers(), scout.kv_heads()), (48, 8));
        let maverick = ModelArgs::flavor(Flavor::Maverick);
        assert_eq!((maverick.n_moe_layers(), maverick.num_experts), (24, 128));
        // Their public names: about 17 B active; 109 B and 400 B in all.
        for (args, total) in [(scout, 109), (maverick, 400)] {
            let counts = args.counts();
            assert_eq!(counts.active() / 1_000_000_000, 17);
            assert!((counts.total() / 1_000_000_000).abs_diff(total) <= 2, "{}", counts.total());
        }
    }

    #[test]
    fn irope_alternates() {
        let args = ModelArgs::flavor(Flavor::DebugmodelIrope);
        let blocks: Vec<_> = (0..6).map(|i| args.attn_block(i)).collect();
        assert_eq!(blocks, [None, Some(256), Some(256), Some(256), None, Some(256)]);
        assert_eq!(args.attn_mask_type, AttnMask::BlockCausal);
        let plain = ModelArgs::flavor(Flavor::Debugmodel);
        assert!((0..6).all(|i| plain.attn_block(i).is_none() && !plain.is_nope(i)));
    }

    #[test]
    fn absurd_sizes_saturate() {
        let args = ModelArgs {
            dim: usize::MAX / 2,
            vocab_size: usize::MAX,
            num_experts: usize::MAX,
            ffn_dim_multiplier: Some(f64::MAX),
            ..ModelArgs::default()
        };
        assert_eq!(args.counts().total(), u64::MAX);
        assert_eq!(args.flops_per_token(usize::MAX), u64::MAX);
    }

    #[test]
    fn a_tokenizer_sets_the_vocabulary_unless_the_user_did() {
        let tokenizer = Some(Vocabulary { words: 2256, eos: 2001 });
        let free = Config::from_toml("", "t", &["model.flavor=17bx16e".into()]).unwrap().config;
        assert_eq!(free.model_args(None).unwrap().vocab_size, 202_048);
        let args = free.model_args(tokenizer).unwrap();
        assert_eq!((args.vocab_size, args.eos_id), (2256, 2001));
        let set = |n: usize| {
            Config::from_toml(&format!("[model.args]\nvocab_size = {n}"), "t", &[]).unwrap().config
        };
        assert_eq!(set(4096).model_args(tokenizer).unwrap().vocab_size, 4096);
        assert!(set(256).model_args(tokenizer).unwrap_err().to_string().contains("2256 tokens"));
    }
}

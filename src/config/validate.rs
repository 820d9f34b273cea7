//! Checks that need more than one key or a range: everything that can be known before a device is opened.

use super::choices::{Dataset, Recipe};
use super::table::{Config, ModelArgs};
use crate::{Error, Result};

/// `Ok` if `good`, else an error of the two sentences.
fn check(good: bool, what: impl FnOnce() -> String, hint: &str) -> Result<()> {
    if good { Ok(()) } else { Err(Error::user(what(), hint)) }
}

/// The value of the key `path` must lie in its range.
fn size(path: &str, value: usize) -> Result<()> {
    let (lo, hi) = range(path).expect("a row of RANGES");
    within(path, value, lo, hi)
}

/// The value of `path` must lie in `lo..=hi`.
fn within(path: &str, value: usize, lo: usize, hi: usize) -> Result<()> {
    let hint = range_hint(path, lo, hi);
    check((lo..=hi).contains(&value), || format!("{path} = {value} is out of range"), &hint)
}

/// What to do about a number outside `lo..=hi`.
pub(super) fn range_hint(path: &str, lo: usize, hi: usize) -> String {
    format!("set {path} to something between {lo} and {hi}")
}

/// The value of `path` must fulfil `good`, which `range` says in words. NaN never should.
fn number(path: &str, value: f64, good: bool, range: &str) -> Result<()> {
    check(good, || format!("{path} = {value:?} is out of range"), &format!("{path} must be {range}"))
}

// Limits that keep all products within 64 bits; each is far beyond what a device could hold.
const MAX_WIDTH: usize = 1 << 20;
const MAX_COUNT: usize = 1 << 16;
const MAX_TOKENS: usize = 1 << 28;
const MAX_PARAMS: u64 = 1 << 50;
/// The largest integer that TOML can hold.
pub(super) const LARGEST: usize = i64::MAX as usize;

/// Keys whose values lie between two numbers, whatever the others are.
pub(super) const RANGES: &[(&str, usize, usize)] = &[
    ("training.local_batch_size", 1, MAX_COUNT),
    ("training.seq_len", 1, MAX_TOKENS),
    ("training.steps", 1, 1 << 30),
    ("metrics.log_freq", 1, LARGEST),
    ("model.args.dim", 1, MAX_WIDTH),
    ("model.args.n_layers", 1, MAX_COUNT),
    ("model.args.n_heads", 1, MAX_COUNT),
    // At most n_heads, besides.
    ("model.args.n_kv_heads", 1, MAX_COUNT),
    ("model.args.vocab_size", 2, MAX_TOKENS),
    ("model.args.multiple_of", 1, MAX_WIDTH),
    ("model.args.max_seq_len", 1, MAX_TOKENS),
    ("model.args.fixed_attn_block_size", 1, MAX_TOKENS),
    ("model.args.every_n_layers_nope", 2, MAX_COUNT),
    ("model.args.interleave_moe_layer_step", 1, MAX_COUNT),
    ("model.args.num_experts", 1, MAX_COUNT),
    ("model.args.top_k", 1, MAX_COUNT),
];

/// The least and the most that the value of the key `path` may be, if it has a row in [`RANGES`].
pub(super) fn range(path: &str) -> Option<(usize, usize)> {
    RANGES.iter().find(|(name, ..)| *name == path).map(|&(_, lo, hi)| (lo, hi))
}

impl Config {
    /// Checks ranges and combinations for a run on `world_size` ranks. After this the numbers may be
    /// used without further care: sizes are positive, products fit, divisions have no remainder.
    pub fn validate(&self, world_size: usize) -> Result<()> {
        within("ranks", world_size, 1, MAX_COUNT)?;
        self.validate_training()?;
        self.validate_optimizer()?;
        self.validate_float8()?;
        self.args.validate()?;
        let (seq, max) = (self.training.seq_len, self.args.max_seq_len);
        check(
            seq <= max,
            || format!("training.seq_len = {seq}, but model.args.max_seq_len = {max}"),
            "leave model.args.max_seq_len out, and it follows training.seq_len",
        )?;
        self.accumulation_steps(self.dp_shard(world_size)?)?;
        Ok(())
    }

    /// Ranks that the model is sharded over, which are also the data-parallel ranks. Errors if the ranks
    /// do not divide.
    pub fn dp_shard(&self, world_size: usize) -> Result<usize> {
        let degree = self.parallelism.data_parallel_shard_degree;
        let fits = degree == -1 || usize::try_from(degree).is_ok_and(|d| d == world_size);
        check(
            fits,
            || format!("parallelism.data_parallel_shard_degree = {degree}, but there are {world_size} ranks"),
            "set it to -1 (all ranks), or start as many ranks: --ranks N, or NGPU=N ./run_train.sh",
        )?;
        Ok(world_size)
    }

    /// Forward and backward passes per optimizer step on `dp` data-parallel ranks:
    /// global batch / (local batch * dp). Errors if that is not a whole number.
    pub fn accumulation_steps(&self, dp: usize) -> Result<usize> {
        let global = self.training.global_batch_size;
        let pass = self.training.local_batch_size.saturating_mul(dp);
        if global == -1 {
            return Ok(1);
        }
        let steps =
            usize::try_from(global).ok().filter(|g| *g > 0 && pass > 0 && g % pass == 0).map(|g| g / pass);
        steps.ok_or_else(|| {
            let local = self.training.local_batch_size;
            Error::user(
                format!(
                    "training.global_batch_size = {global} is no multiple of {local} sequences on {dp} ranks"
                ),
                format!("set it to -1, or to a multiple of training.local_batch_size * ranks = {pass}"),
            )
        })
    }

    /// Whether `model.converters` asks for fp8 at all.
    pub fn float8_enabled(&self) -> bool {
        self.model.converters.iter().any(|c| c == "float8")
    }

    /// The recipe of the dense linears, if the float8 converter is on: tensorwise unless one is named.
    pub fn linear_recipe(&self) -> Option<Recipe> {
        self.float8_enabled().then(|| self.float8.recipe_name.unwrap_or(Recipe::Tensorwise))
    }

    /// Parts of module names whose experts compute in fp8; empty if the float8 converter is off.
    pub fn moe_fqns(&self) -> &[String] {
        if self.float8_enabled() { &self.float8.moe_fqns_prototype } else { &[] }
    }

    fn validate_training(&self) -> Result<()> {
        let t = &self.training;
        size("training.local_batch_size", t.local_batch_size)?;
        size("training.seq_len", t.seq_len)?;
        size("training.steps", t.steps)?;
        size("metrics.log_freq", self.metrics.log_freq)?;
        let tokens = t.local_batch_size * t.seq_len;
        check(
            tokens <= MAX_TOKENS,
            || {
                format!(
                    "training.local_batch_size * training.seq_len = {tokens} tokens are more than {MAX_TOKENS}"
                )
            },
            "use a smaller training.local_batch_size, and training.global_batch_size for the rest",
        )?;
        number("training.max_norm", t.max_norm, t.max_norm > 0.0, "greater than 0 (inf: no clipping)")?;
        let needs_file = t.dataset != Dataset::Synthetic;
        check(
            !needs_file || t.dataset_path.is_some(),
            || format!("training.dataset = {:?} needs a file", t.dataset.word()),
            "name it with training.dataset_path, or use training.dataset = \"synthetic\"",
        )?;
        check(
            needs_file || t.dataset_path.is_none(),
            || {
                format!(
                    "training.dataset_path = {:?}, but the dataset is synthetic",
                    t.dataset_path.as_deref().unwrap_or_default()
                )
            },
            "set training.dataset to \"text\", \"jsonl\" or \"tokens\", or remove the path",
        )
    }

    fn validate_optimizer(&self) -> Result<()> {
        let o = &self.optimizer;
        number("optimizer.lr", o.lr, o.lr > 0.0 && o.lr.is_finite(), "greater than 0 and finite")?;
        for (path, beta) in [("optimizer.beta1", o.beta1), ("optimizer.beta2", o.beta2)] {
            let good = beta >= 0.0 && (beta as f32) < 1.0;
            number(path, beta, good, "at least 0 and less than 1, in f32 too")?;
        }
        // Smaller ones are 0 to some adapters, and a gradient of 0 would then be 0 / 0.
        let good = o.eps >= f64::from(f32::MIN_POSITIVE) && o.eps.is_finite();
        number("optimizer.eps", o.eps, good, "at least 1.2e-38, f32's smallest normal number, and finite")?;
        let natural = |x: f64| x >= 0.0 && x.is_finite();
        number("optimizer.weight_decay", o.weight_decay, natural(o.weight_decay), "at least 0 and finite")?;
        let s = &self.lr_scheduler;
        let ratio = s.decay_ratio.unwrap_or(0.0);
        number(
            "lr_scheduler.decay_ratio",
            ratio,
            (0.0..=1.0).contains(&ratio),
            "between 0 and 1, or \"none\"",
        )?;
        number("lr_scheduler.lr_min", s.lr_min, (0.0..=1.0).contains(&s.lr_min), "a factor between 0 and 1")
    }

    fn validate_float8(&self) -> Result<()> {
        let unknown = self.model.converters.iter().find(|c| *c != "float8");
        check(
            unknown.is_none(),
            || format!("model.converters has {:?}", unknown.map_or("", String::as_str)),
            "moe8 knows one converter: \"float8\"",
        )?;
        check(
            self.args.use_grouped_mm || self.moe_fqns().is_empty(),
            || "float8.moe_fqns_prototype with model.args.use_grouped_mm = false".to_string(),
            "fp8 experts are a grouped GEMM: set model.args.use_grouped_mm = true, or remove the names",
        )
    }

    /// Traps that are legal: sentences for the user.
    pub(super) fn caveats(&self) -> Vec<String> {
        let mut found = Vec::new();
        let (warmup, steps) = (self.lr_scheduler.warmup_steps, self.training.steps);
        if (1..=warmup).contains(&steps) {
            let part = format!("lr_scheduler.warmup_steps = {warmup}, training.steps = {steps}");
            found.push(format!("{part}: the warm-up lasts to the end, and the learning rate does not decay"));
        }
        found
    }
}

impl ModelArgs {
    /// Checks that no feed-forward width rounds down to zero.
    fn validate_hidden(&self) -> Result<()> {
        for (what, hidden) in [("a dense FFN", self.dense_hidden()), ("an expert", self.expert_hidden())] {
            check(
                hidden > 0,
                || format!("model.args.dim and ffn_dim_multiplier leave {what} a hidden width of 0"),
                "raise model.args.dim or ffn_dim_multiplier, or lower top_k",
            )?;
        }
        Ok(())
    }

    /// Checks the arguments of the model alone.
    pub fn validate(&self) -> Result<()> {
        size("model.args.dim", self.dim)?;
        size("model.args.n_layers", self.n_layers)?;
        size("model.args.n_heads", self.n_heads)?;
        within("model.args.n_kv_heads", self.kv_heads(), 1, self.n_heads)?;
        size("model.args.vocab_size", self.vocab_size)?;
        size("model.args.multiple_of", self.multiple_of)?;
        size("model.args.max_seq_len", self.max_seq_len)?;
        let multiplier = self.ffn_dim_multiplier.unwrap_or(1.0);
        number(
            "model.args.ffn_dim_multiplier",
            multiplier,
            multiplier > 0.0 && multiplier <= 1024.0,
            "in (0, 1024]",
        )?;
        number(
            "model.args.norm_eps",
            self.norm_eps,
            (0.0..1.0).contains(&self.norm_eps),
            "at least 0 and less than 1",
        )?;
        let theta = self.rope_theta;
        number("model.args.rope_theta", theta, theta >= 1.0 && theta.is_finite(), "at least 1 and finite")?;
        check(
            self.eos_id < self.vocab_size,
            || format!("model.args.eos_id = {} with {} tokens", self.eos_id, self.vocab_size),
            "set model.args.eos_id below model.args.vocab_size",
        )?;
        self.validate_attention()?;
        self.validate_moe()?;
        self.validate_hidden()?;
        let total = self.counts().total();
        check(
            total <= MAX_PARAMS,
            || format!("the model has {total} parameters"),
            "moe8 stops at 2^50: look at model.args.dim, n_layers, num_experts and ffn_dim_multiplier",
        )
    }

    fn validate_attention(&self) -> Result<()> {
        let (dim, heads, kv) = (self.dim, self.n_heads, self.kv_heads());
        check(
            dim.is_multiple_of(heads),
            || format!("model.args.dim = {dim} is no multiple of n_heads = {heads}"),
            "every head has dim / n_heads elements: change one of them",
        )?;
        check(
            self.head_dim().is_multiple_of(4),
            || format!("model.args.dim / n_heads = {} elements per head", self.head_dim()),
            "it must be a multiple of 4: rotary positions turn pairs, and the attention kernel reads fours",
        )?;
        check(
            heads.is_multiple_of(kv),
            || format!("model.args.n_heads = {heads} is no multiple of n_kv_heads = {kv}"),
            "each key and value head serves equally many query heads: change one of them",
        )?;
        size("model.args.fixed_attn_block_size", self.fixed_attn_block_size)?;
        // Upstream refuses 1 as well: it would leave no layer with positions.
        self.every_n_layers_nope.map_or(Ok(()), |n| size("model.args.every_n_layers_nope", n))
    }

    fn validate_moe(&self) -> Result<()> {
        size("model.args.interleave_moe_layer_step", self.interleave_moe_layer_step)?;
        size("model.args.num_experts", self.num_experts)?;
        size("model.args.top_k", self.top_k)?;
        let (k, e) = (self.top_k, self.num_experts);
        check(
            k <= e,
            || format!("model.args.top_k = {k}, but there are num_experts = {e}"),
            "a token can visit each expert once: lower top_k or raise num_experts",
        )?;
        let coeff = self.load_balance_coeff.unwrap_or(0.0);
        number(
            "model.args.load_balance_coeff",
            coeff,
            (0.0..=1.0).contains(&coeff),
            "between 0 and 1, or \"none\"",
        )?;
        let scale = self.route_scale;
        number("model.args.route_scale", scale, scale > 0.0 && scale.is_finite(), "greater than 0 and finite")
    }
}

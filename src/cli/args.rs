//! The command line as types. Flags are clap's; overrides of configuration keys (`--section.key=value`,
//! torchtitan's style) are taken out before clap sees them, since they are checked by the table of keys.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Train Mixture-of-Experts models in emulated FP8 on any GPU that wgpu can open.
#[derive(Debug, Parser)]
#[command(name = "moe8", version, arg_required_else_help = true, after_help = OVERRIDES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const OVERRIDES: &str = "Any key of the configuration can be set after the file, as --section.key=value:
  moe8 train --config configs/quickstart.toml --training.steps=100 --float8.recipe_name=rowwise
  moe8 config --keys     lists the keys, their defaults and what moe8 does with each";

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model.
    #[command(after_help = OVERRIDES)]
    Train(RunArgs),
    /// Print the resolved configuration, with the source of every value.
    #[command(after_help = OVERRIDES)]
    Config(ConfigArgs),
    /// List the adapters, their limits, and which one is chosen and why.
    Devices(RunArgs),
    /// Write a model's weights to a safetensors file.
    Export(ExportArgs),
    /// Measure kernels and training steps.
    Bench(BenchArgs),
    /// Put two files of `moe8 bench` side by side.
    Compare(CompareArgs),
    /// Compare every matrix kernel that the adapter can run with the exact product.
    Selftest(SelftestArgs),
    /// Find the fastest kernels of products, attention and quantizers, and keep what was found for later runs.
    Tune(RunArgs),
}

/// Flags of every subcommand that reads a configuration.
#[derive(Clone, Debug, Default, Args)]
pub struct RunArgs {
    /// Configuration file (TOML, torchtitan's keys).
    #[arg(long, alias = "job.config_file", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Adapter to use: its number in `moe8 devices`, or part of its name; else the environment variable MOE8_DEVICE, else the fastest.
    #[arg(long, value_name = "NUMBER|NAME")]
    pub device: Option<String>,
    /// Number of ranks.
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Stop at the first NaN or Inf and name the tensor (slow).
    #[arg(long)]
    pub check_nan: bool,
    /// Keep the driver's bounds checks and loop guards in shaders (slow).
    #[arg(long)]
    pub safe_shaders: bool,
    /// Do without the adapter's matrix units.
    #[arg(long)]
    pub no_coop: bool,
    /// Matrix product and attention to use wherever it can run: scalar (registers), tiled (workgroup memory), narrow (one size of at
    /// most 16) or coop (matrix units), or quantizer: simple or wide; else chosen by adapter and shape.
    #[arg(long, value_name = "NAME")]
    pub kernel: Option<String>,
    /// Say which kernels were chosen, and why.
    #[arg(long)]
    pub explain: bool,
}

/// Flags of `moe8 config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The common flags.
    #[command(flatten)]
    pub run: RunArgs,
    /// List all keys instead: kind, default, meaning, and what moe8 does with each.
    #[arg(long)]
    pub keys: bool,
}

/// Flags of `moe8 selftest`.
#[derive(Debug, Args)]
pub struct SelftestArgs {
    /// The common flags.
    #[command(flatten)]
    pub run: RunArgs,
    /// Measure large products instead (a real GPU with some gigabytes of memory).
    #[arg(long)]
    pub time: bool,
    /// Run one table only.
    #[arg(long, value_enum)]
    pub only: Option<SelftestTable>,
}

/// The tables of `moe8 selftest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SelftestTable {
    /// Matrix products.
    Gemm,
    /// Attention and its gradients.
    Attention,
}

/// Flags of `moe8 export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The common flags.
    #[command(flatten)]
    pub run: RunArgs,
    /// File to write.
    #[arg(long, short, value_name = "FILE", default_value = "model.safetensors")]
    pub output: PathBuf,
}

/// What `moe8 bench` can measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchOp {
    /// Memory bandwidth. --shape BYTES
    Copy,
    /// Quantization by rows, columns of groups, and columns of weights. --shape MxK
    Quantize,
    /// Dense GEMMs. --shape MxKxN
    Gemm,
    /// Grouped GEMMs. --shape MxKxNxE
    Grouped,
    /// Causal attention, forward and backward. --shape BxSxHxKVxD
    Attention,
    /// The differentiable grouped linear, forward and backward with its quantizations. --shape MxKxNxE
    Op,
    /// An MoE layer, forward and backward. --shape TxDxFxE
    Moe,
    /// RMSNorm, forward and backward. --shape TxD
    #[value(name = "rmsnorm")]
    RmsNorm,
    /// Rotary position embedding. --shape BxSxHxD
    Rope,
    /// SwiGLU, forward and backward. --shape TxF
    #[value(name = "swiglu")]
    SwiGlu,
    /// Rows to experts (gather) and back (combine), with gradients. --shape TxDxExK
    Dispatch,
    /// Cross entropy with its gradient. --shape TxV
    #[value(name = "cross_entropy")]
    CrossEntropy,
    /// Token embedding, forward and backward. --shape TxDxV
    Embedding,
    /// One AdamW update. --shape N
    #[value(name = "adamw")]
    AdamW,
    /// Sums and casts. --shape TxD
    Elementwise,
    /// A training step of the debug model, or of --config's, whose keys can be set. --shape BxS
    Step,
}

/// Flags of `moe8 bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure; several may be named.
    #[arg(value_enum)]
    pub op: Vec<BenchOp>,
    /// Measure all of it at standard shapes; the rows go to bench.json too.
    #[arg(long, value_name = "standard", value_parser = ["standard"])]
    pub suite: Option<String>,
    /// The common flags.
    #[command(flatten)]
    pub run: RunArgs,
    /// Sizes of the one thing that is named, as numbers with x between them; can be given several times.
    #[arg(long, value_name = "SHAPE")]
    pub shape: Vec<String>,
    /// How rows fall into groups: equal, halving, or as the last step in the metrics.jsonl of a run has them; without this, uniform and ragged.
    #[arg(long, value_name = "uniform|ragged|FILE")]
    pub groups: Option<String>,
    /// Only this precision.
    #[arg(long, value_name = "f32|bf16|fp8", value_parser = ["f32", "bf16", "fp8"])]
    pub precision: Option<String>,
    /// Measure on a software adapter too.
    #[arg(long)]
    pub allow_software: bool,
    /// One JSON object a line.
    #[arg(long, group = "format")]
    pub json: bool,
    /// Comma-separated values.
    #[arg(long, group = "format")]
    pub csv: bool,
    /// A table (the default).
    #[arg(long, group = "format")]
    pub markdown: bool,
    /// Write the rows to this file too, as JSON.
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Of `step`: time every launch by itself, and print where the time goes.
    #[arg(long)]
    pub profile: bool,
}

/// Flags of `moe8 compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// File of the one.
    pub a: PathBuf,
    /// File of the other.
    pub b: PathBuf,
}

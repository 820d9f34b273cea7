//! The table of keys: each row makes a struct field, its default, its documentation and its entry in
//! [`KEYS`], so that parsing, printing, unknown-key detection and these docs cannot disagree.
//!
//! Names and defaults are those of torchtitan's `JobConfig` of July 2025 (`torchtitan/config_manager.py`,
//! later `torchtitan/config/job_config.py`) and of its Llama4 `TransformerModelArgs`; where moe8's default
//! has to differ, the row says so.

use super::choices::*;
use super::keys::{Key, Policy};
use super::source::Sources;
use super::value::Setting;

/// Rows: `/// doc`, `name: type = default => policy;` in sections `"toml.name" field: Struct`.
macro_rules! sections {
    ($(
        $(#[doc = $sdoc:literal])*
        $sname:literal $field:ident : $Struct:ident {
            $( $(#[doc = $doc:literal])* $key:ident : $ty:ty = $default:expr => $policy:expr; )*
        }
    )*) => {
        $(
            $(#[doc = $sdoc])*
            #[derive(Clone, Debug, PartialEq)]
            pub struct $Struct { $( $(#[doc = $doc])* pub $key: $ty, )* }

            impl Default for $Struct {
                fn default() -> Self {
                    $Struct { $( $key: $default, )* }
                }
            }
        )*

        /// The whole configuration, one field per TOML section. [`Config::load`] makes one from a file and
        /// the command line; [`Config::default`] is a debug model on synthetic data.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $( $(#[doc = $sdoc])* pub $field: $Struct, )*
            /// Where each value came from.
            pub sources: Sources,
        }

        impl Default for Config {
            fn default() -> Self {
                let mut config = Config { $( $field: $Struct::default(), )* sources: Sources::default() };
                config.use_flavor();
                config.derive();
                config
            }
        }

        /// Every key that moe8 knows, in the order in which `moe8 config` prints them.
        pub static KEYS: &[Key] = &[ $( $( Key {
            section: $sname,
            name: stringify!($key),
            doc: concat!($($doc),*),
            policy: $policy,
            kind: <$ty as Setting>::kind,
            choices: <$ty as Setting>::choices,
            get: |config| config.$field.$key.to_toml(),
            set: |config, raw| match <$ty as Setting>::from_raw(raw) {
                Some(value) => { config.$field.$key = value; true }
                None => false,
            },
        }, )* )* ];
    };
}

/// The key does what it says.
const YES: Policy = Policy::Honoured;

/// The key has no effect here; values other than `harmless` are warned of.
const fn warn(harmless: &'static str, why: &'static str) -> Policy {
    Policy::Warned { harmless, why }
}

/// The key would change what is computed; values other than `only` are errors.
const fn refuse(only: &'static str, hint: &'static str) -> Policy {
    Policy::Refused { only, hint }
}

/// The key belongs to `master`.
const fn part_of(master: &'static str) -> Policy {
    Policy::PartOf(master)
}

const TP: &str = "parallelism.tensor_parallel_degree";
const PP: &str = "parallelism.pipeline_parallel_degree";
const CP: &str = "parallelism.context_parallel_degree";
const EP: &str = "parallelism.expert_parallel_degree";
const PROFILE: &str = "profiling.enable_profiling";
const SNAPSHOT: &str = "profiling.enable_memory_snapshot";
const BOARD: &str = "metrics.enable_tensorboard";
const SAVE: &str = "checkpoint.enable_checkpoint";
const AC: &str = "activation_checkpoint.mode";
const CONVERTERS: &str = "model.converters";
const NO_CHECKPOINT: &str = "moe8 writes no training checkpoints yet; `moe8 export` writes the weights";
const DATA_PARALLEL_ONLY: &str = "moe8 shards over data-parallel ranks only, so far; leave this at 1";

sections! {
    /// What the run is called and where it writes.
    "job" job: Job {
        /// Folder that all output goes to (torchtitan: ./torchtitan/outputs).
        dump_folder: String = "./outputs".into() => YES;
        /// A line that describes the run, printed at the start.
        description: String = "default job".into() => YES;
        /// torchtitan: adds the file to its integration tests.
        use_for_integration_test: bool = false => warn("false", "moe8 has no such list");
        /// Print the resolved configuration at the start of training.
        print_args: bool = false => YES;
    }
    /// torchtitan's traces.
    "profiling" profiling: Profiling {
        /// Write traces of the PyTorch profiler.
        enable_profiling: bool = false => warn("false", "moe8 writes no traces yet");
        /// Folder of the traces, under job.dump_folder.
        save_traces_folder: String = "profile_traces".into() => part_of(PROFILE);
        /// Steps between traces.
        profile_freq: usize = 10 => part_of(PROFILE);
        /// Write snapshots of the memory allocator.
        enable_memory_snapshot: bool = false => warn("false", "moe8 writes no memory snapshots; start-up prints what is needed");
        /// Folder of the snapshots, under job.dump_folder.
        save_memory_snapshot_folder: String = "memory_snapshot".into() => part_of(SNAPSHOT);
    }
    /// What is logged, and how often.
    "metrics" metrics: Metrics {
        /// Steps between log lines; step 1 is always logged.
        log_freq: usize = 10 => YES;
        /// Write TensorBoard events.
        enable_tensorboard: bool = false => warn("false", "moe8 writes <dump_folder>/metrics.jsonl instead");
        /// No colours in log lines.
        disable_color_printing: bool = false => YES;
        /// Folder of the TensorBoard events, under job.dump_folder.
        save_tb_folder: String = "tb".into() => part_of(BOARD);
        /// Every rank writes its metrics, not only rank 0.
        save_for_all_ranks: bool = false => warn("false", "rank 0 writes the metrics of all ranks");
        /// Log to Weights & Biases.
        enable_wandb: bool = false => warn("false", "moe8 writes <dump_folder>/metrics.jsonl instead");
    }
    /// The model, its tokenizer and its converters.
    "model" model: Model {
        /// Model family (torchtitan: llama3).
        name: ModelName = ModelName::Llama4 => YES;
        /// Model size; the section model.args changes single numbers of it.
        flavor: Flavor = Flavor::Debugmodel => YES;
        /// HF tokenizer.json or tiktoken .model; none: bytes (torchtitan: a Llama 3 tokenizer).
        tokenizer_path: Option<String> = None => YES;
        /// Changes to the model before training; moe8 knows "float8".
        converters: Vec<String> = Vec::new() => YES;
        /// Print the model after conversion.
        print_after_conversion: bool = false => warn("false", "moe8 always prints the names of what was converted");
    }
    /// The sizes and switches of the model: torchtitan's `TransformerModelArgs` of July 2025, with the
    /// router switches that `MoEArgs` added in August. Defaults here are the class's; a flavour changes some.
    "model.args" args: ModelArgs {
        /// Width D of the residual stream.
        dim: usize = 4096 => YES;
        /// Number of transformer blocks.
        n_layers: usize = 32 => YES;
        /// Query heads H; dim / n_heads is the width of a head.
        n_heads: usize = 32 => YES;
        /// Key and value heads; none: as many as query heads.
        n_kv_heads: Option<usize> = None => YES;
        /// Vocabulary V; a tokenizer's size replaces it unless it is set.
        vocab_size: usize = super::model_args::DEBUG_VOCAB => YES;
        /// Hidden widths are rounded up to a multiple of this.
        multiple_of: usize = 256 => YES;
        /// Factor on the hidden width 8/3 D.
        ffn_dim_multiplier: Option<f64> = None => YES;
        /// Epsilon of RMSNorm.
        norm_eps: f64 = 1e-5 => YES;
        /// Base of the rotary frequencies.
        rope_theta: f64 = 10_000.0 => YES;
        /// Longest sequence that the rotary table covers; training.seq_len replaces it unless it is set.
        max_seq_len: usize = 2048 => YES;
        /// Initial standard deviations shrink with the layer's own depth (true) or the model's (false).
        depth_init: bool = true => YES;
        /// torchtitan: attention through FlexAttention; moe8's kernel knows every mask, so that both values give the same.
        use_flex_attn: bool = false => YES;
        /// Which earlier tokens are seen.
        attn_mask_type: AttnMask = AttnMask::Causal => YES;
        /// End-of-text token that splits documents under block_causal; a tokenizer's replaces it unless it is set.
        eos_id: usize = 0 => YES;
        /// Every n-th layer, from the first, has no positions; the others attend in fixed blocks. none: no such layers.
        every_n_layers_nope: Option<usize> = None => YES;
        /// Block length of the layers with positions, when every_n_layers_nope is set.
        fixed_attn_block_size: usize = 8192 => YES;
        /// Whether there are MoE layers at all.
        moe_enabled: bool = true => YES;
        /// Routed experts E per MoE layer.
        num_experts: usize = 8 => YES;
        /// One more expert that sees every token.
        use_shared_expert: bool = true => YES;
        /// Divide the experts' hidden width by the number of experts a token visits.
        auto_scale_hidden_dim: bool = true => YES;
        /// Every n-th layer is an MoE layer.
        interleave_moe_layer_step: usize = 2 => YES;
        /// Experts K per token.
        top_k: usize = 1 => YES;
        /// torchtitan: grouped GEMM (true) or a loop over experts; the same numbers.
        use_grouped_mm: bool = true => YES;
        /// Step of the expert-bias update that balances the load; none: no update.
        load_balance_coeff: Option<f64> = Some(1e-3) => YES;
        /// Router scores.
        score_func: ScoreFunc = ScoreFunc::Softmax => YES;
        /// Multiply by the score before the experts (true) or after them.
        score_before_experts: bool = true => YES;
        /// Divide a token's K scores by their sum.
        route_norm: bool = false => YES;
        /// Factor on the scores.
        route_scale: f64 = 1.0 => YES;
    }
    /// AdamW.
    "optimizer" optimizer: Optimizer {
        /// Optimizer.
        name: OptimizerName = OptimizerName::AdamW => YES;
        /// Peak learning rate.
        lr: f64 = 8e-4 => YES;
        /// Decay of the first moment.
        beta1: f64 = 0.9 => YES;
        /// Decay of the second moment.
        beta2: f64 = 0.95 => YES;
        /// Added to the root of the second moment.
        eps: f64 = 1e-8 => YES;
        /// Decoupled weight decay, on all parameters.
        weight_decay: f64 = 0.1 => YES;
        /// PyTorch's implementation of the update.
        implementation: OptimizerImplementation = OptimizerImplementation::Fused => warn("\"fused\"", "moe8 has one implementation, a fused one");
        /// Update each parameter inside the backward pass.
        early_step_in_backward: bool = false => refuse("false", "gradients are clipped by their global norm, which is known only after the backward pass");
    }
    /// Warm-up, stable phase, decay.
    "lr_scheduler" lr_scheduler: LrScheduler {
        /// Steps over which the learning rate rises to its peak.
        warmup_steps: usize = 200 => YES;
        /// Part of the steps, at the end, over which it falls; none: right after the warm-up.
        decay_ratio: Option<f64> = None => YES;
        /// The curve by which it falls.
        decay_type: DecayType = DecayType::Linear => YES;
        /// Its last value, as a factor of the peak.
        lr_min: f64 = 0.0 => YES;
    }
    /// Data, batch, steps and precision.
    "training" training: Training {
        /// Where the tokens come from (torchtitan: c4_test).
        dataset: Dataset = Dataset::Synthetic => YES;
        /// The file of text, jsonl or tokens.
        dataset_path: Option<String> = None => YES;
        /// Sequences per rank and forward pass.
        local_batch_size: usize = 8 => YES;
        /// Sequences per step over all ranks; -1: one forward pass per step. More: gradients accumulate.
        global_batch_size: i64 = -1 => YES;
        /// Tokens per sequence.
        seq_len: usize = 2048 => YES;
        /// Gradients are scaled down to this global norm; inf: never.
        max_norm: f64 = 1.0 => YES;
        /// Optimizer steps.
        steps: usize = 10_000 => YES;
        /// Keep parameters and optimizer state in host memory.
        enable_cpu_offload: bool = false => warn("false", "parameters stay on the device; the results are the same");
        /// Type of the weights and activations in computation; the master weights are always f32.
        mixed_precision_param: Precision = Precision::Bfloat16 => YES;
        /// Type in which gradients are summed over ranks.
        mixed_precision_reduce: Precision = Precision::Float32 => refuse("\"float32\"", "gradients are reduced in float32, the only type that torchtitan takes too");
        /// torch.compile.
        compile: bool = false => warn("false", "there is nothing to compile: moe8's kernels are built at start-up");
        /// Steps between collections of Python's garbage.
        gc_freq: usize = 50 => warn("50", "moe8 has no garbage collector");
        /// Collect Python's garbage at every step.
        gc_debug: bool = false => warn("false", "moe8 has no garbage collector");
        /// Seed of the initial weights and of synthetic data; none: 42, so that a run without one repeats too.
        seed: Option<u64> = None => YES;
        /// Only algorithms that give the same bits in every run; moe8 has no others.
        deterministic: bool = false => YES;
    }
    /// How the work is split over ranks.
    "parallelism" parallelism: Parallelism {
        /// Replicas of the sharded model (HSDP).
        data_parallel_replicate_degree: usize = 1 => refuse("1", "moe8 shards the model over all ranks, so far; leave this at 1");
        /// Compile the backward pass.
        enable_compiled_autograd: bool = false => warn("false", "there is nothing to compile");
        /// Ranks that the model is sharded over (FSDP); -1: all.
        data_parallel_shard_degree: i64 = -1 => YES;
        /// Whether gathered weights are freed between forward and backward.
        fsdp_reshard_after_forward: Reshard = Reshard::Default => YES;
        /// Tensor parallelism.
        tensor_parallel_degree: usize = 1 => refuse("1", DATA_PARALLEL_ONLY);
        /// Keep logits whole under tensor parallelism.
        disable_loss_parallel: bool = false => part_of(TP);
        /// Overlap tensor parallelism's communication.
        enable_async_tensor_parallel: bool = false => part_of(TP);
        /// Pipeline parallelism.
        pipeline_parallel_degree: usize = 1 => refuse("1", DATA_PARALLEL_ONLY);
        /// Modules that begin a pipeline stage.
        pipeline_parallel_split_points: Vec<String> = Vec::new() => part_of(PP);
        /// Layers per pipeline stage.
        pipeline_parallel_layers_per_stage: Option<usize> = None => part_of(PP);
        /// Pipeline schedule.
        pipeline_parallel_schedule: String = "1F1B".into() => part_of(PP);
        /// File of a pipeline schedule.
        pipeline_parallel_schedule_csv: String = String::new() => part_of(PP);
        /// Sequences per pipeline microbatch.
        pipeline_parallel_microbatch_size: usize = 1 => part_of(PP);
        /// Context parallelism.
        context_parallel_degree: usize = 1 => refuse("1", DATA_PARALLEL_ONLY);
        /// Exchange of keys and values.
        context_parallel_rotate_method: RotateMethod = RotateMethod::Allgather => part_of(CP);
        /// Expert parallelism.
        expert_parallel_degree: usize = 1 => refuse("1", DATA_PARALLEL_ONLY);
        /// Tensor parallelism within experts.
        expert_tensor_parallel_degree: usize = 1 => part_of(EP);
    }
    /// Weight files.
    "checkpoint" checkpoint: Checkpoint {
        /// Write training checkpoints.
        enable_checkpoint: bool = false => refuse("false", NO_CHECKPOINT);
        /// Folder of the checkpoints, under job.dump_folder.
        folder: String = "checkpoint".into() => part_of(SAVE);
        /// Weights to start from: a safetensors file; none: random ones.
        initial_load_path: Option<String> = None => YES;
        /// Take only the weights from initial_load_path, not optimizer and step.
        initial_load_model_only: bool = true => refuse("true", "a safetensors file holds weights only; leave this at true");
        /// Steps between checkpoints.
        interval: usize = 500 => part_of(SAVE);
        /// The last checkpoint holds the weights only.
        last_save_model_only: bool = true => part_of(SAVE);
        /// Type of the weights in the file that `moe8 export` writes.
        export_dtype: ExportDtype = ExportDtype::Float32 => YES;
        /// Write the initial weights and stop.
        create_seed_checkpoint: bool = false => refuse("false", "`moe8 export` writes the initial weights; a seed gives the same ones on any number of ranks");
        /// Asynchronous checkpoints.
        async_mode: AsyncMode = AsyncMode::Disabled => part_of(SAVE);
        /// How many checkpoints to keep.
        keep_latest_k: usize = 10 => part_of(SAVE);
        /// Step to resume from; -1: the last.
        load_step: i64 = -1 => part_of(SAVE);
        /// Parts of a checkpoint not to load.
        exclude_from_loading: Vec<String> = Vec::new() => part_of(SAVE);
        /// Write a checkpoint after the first step.
        enable_first_step_checkpoint: bool = false => part_of(SAVE);
        /// Write the last checkpoint in Hugging Face's layout.
        last_save_in_hf: bool = false => part_of(SAVE);
    }
    /// Recomputation of activations: less memory, the same numbers.
    "activation_checkpoint" activation_checkpoint: ActivationCheckpoint {
        /// Which activations are recomputed.
        mode: AcMode = AcMode::Selective => warn("\"none\"", "moe8 keeps what the backward pass needs; the results are the same");
        /// "2": every second layer; "op": by operation.
        selective_ac_option: String = "2".into() => part_of(AC);
        /// Linears whose shapes are always recomputed.
        per_op_sac_force_recompute_mm_shapes_by_fqns: Vec<String> = vec!["moe.router.gate".into()] => part_of(AC);
    }
    /// fp8 of dense linears and experts; in force when model.converters has "float8".
    "float8" float8: Float8 {
        /// Gather weights in fp8.
        enable_fsdp_float8_all_gather: bool = false => refuse("false", "weights are gathered in training.mixed_precision_param");
        /// Compute the scales of gathered weights once per step.
        precompute_float8_dynamic_scale_for_fsdp: bool = false => refuse("false", "there is no fp8 all-gather whose scales could be precomputed");
        /// Quantize weights again in the backward pass, to save memory.
        force_recompute_fp8_weight_in_bwd: bool = false => warn("false", "moe8 decides this itself; the results are the same");
        /// Recipe of the dense linears; none: tensorwise.
        recipe_name: Option<Recipe> = None => part_of(CONVERTERS);
        /// Linears whose name contains one of these stay in high precision; so do those with a size not divisible by 16.
        filter_fqns: Vec<String> = Vec::new() => part_of(CONVERTERS);
        /// Emulate fp8; moe8 always does.
        emulate: bool = false => YES;
        /// Modules whose name contains one of these get row-wise fp8 grouped GEMMs for their expert weights.
        moe_fqns_prototype: Vec<String> = Vec::new() => part_of(CONVERTERS);
    }
}

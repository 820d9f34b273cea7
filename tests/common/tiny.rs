//! A model small enough for a software adapter, and trainers for it.

#![allow(dead_code, reason = "each test program uses its own part of this module")]

use moe8::comm::Communicator;
use moe8::config::{Config, DecayType, ModelArgs};
use moe8::gpu::Gpu;
use moe8::nn::{Converters, Seed};
use moe8::num::{DType, formula};
use moe8::optim::{Hyper, Schedule};
use moe8::train::data::Batch;
use moe8::train::trainer::{Recipe, Trainer};
use std::sync::Arc;

pub const SEQ: usize = 32;
pub const VOCAB: usize = 96;

/// Two layers, the second an MoE of four experts; no width is a multiple of 64.
pub fn args() -> ModelArgs {
    ModelArgs {
        dim: 48,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: Some(2),
        vocab_size: VOCAB,
        multiple_of: 20,
        max_seq_len: SEQ,
        num_experts: 4,
        top_k: 2,
        ..ModelArgs::default()
    }
}

/// AdamW as the debug model has it; gathered weights are kept, as one rank's are.
pub fn recipe(param_dtype: DType, steps: usize) -> Recipe {
    Recipe {
        param_dtype,
        reduce_dtype: DType::F32,
        reshard: false,
        lr: 4e-3,
        hyper: Hyper { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
        schedule: Schedule::new(steps, 2, Some(0.8), DecayType::Linear, 0.1),
        max_norm: 1.0,
        load_balance: Some(1e-3),
        accumulation: 1,
    }
}

/// fp8 row-wise experts and linears.
pub fn rowwise() -> Converters {
    let overrides = [
        "--model.converters=float8",
        "--float8.recipe_name=rowwise",
        "--float8.moe_fqns_prototype=experts",
        "--float8.filter_fqns=output,router.gate",
    ];
    let loaded = Config::load(None, &overrides.map(String::from)).expect("a configuration");
    Converters::new(&loaded.config)
}

/// A trainer with upstream's initial weights under seed 7.
pub fn trainer(gpu: &Gpu, comm: Arc<dyn Communicator>, converters: &Converters, recipe: Recipe) -> Trainer {
    let trainer = Trainer::new(gpu, comm, &args(), converters, recipe).expect("a trainer");
    trainer.initialize(Seed(7)).expect("initial weights");
    trainer
}

/// This rank's part of a global batch of `global` sequences.
pub fn batch(step: usize, global: usize, rank: usize, ranks: usize) -> Batch {
    let (inputs, labels) = formula::tokens("tiny", step as u64 + 1, global, SEQ, VOCAB as u32);
    let local = global / ranks;
    let part = |v: Vec<u32>| v[rank * local * SEQ..(rank + 1) * local * SEQ].to_vec();
    Batch { inputs: part(inputs), labels: part(labels), batch: local, seq: SEQ }
}

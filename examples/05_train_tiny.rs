//! You learn: how to train a small Llama4 with fp8 experts from Rust, without the program: a configuration, its data,
//! a trainer, and one step after another.

use moe8::comm::{Communicator, Solo};
use moe8::config::Config;
use moe8::gpu::{DeviceChoice, Gpu};
use moe8::train::data::row_of;
use moe8::train::run::{build, open_data};
use std::sync::Arc;

/// The keys are torchtitan's; what is left out has its default (`moe8 config --keys` lists all).
const CONFIG: &str = r#"
[model]
converters = ["float8"]
[model.args]
dim = 48
n_layers = 2            # a dense layer and an MoE layer
n_heads = 4
vocab_size = 96
multiple_of = 16
num_experts = 4
top_k = 2
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
[training]
local_batch_size = 4
seq_len = 64
steps = 20
[float8]
recipe_name = "rowwise"
filter_fqns = ["output", "router.gate"]
moe_fqns_prototype = ["experts"]
"#;

fn main() -> moe8::Result<()> {
    let config = Config::from_toml(CONFIG, "the example", &[])?.config;
    config.validate(1)?;
    let gpu = Gpu::open(&DeviceChoice::from_env())?;
    let alone: Arc<dyn Communicator> = Arc::new(Solo::new());
    let (loader, args) = open_data(&config)?;
    let mut trainer = build(&config, &gpu, &alone, &args)?;
    println!("{} parameters, {}", args.counts().total(), loader.summary());
    println!("{} modules compute in fp8", trainer.model().conversions().len());

    let mut losses = Vec::new();
    for step in 0..config.training.steps {
        let rows = config.training.local_batch_size;
        let batch = loader.batch(row_of(step as u64, 0, 1, rows as u64), rows)?;
        // `step` only submits; `read` waits. The program reads a step's numbers while the next one runs.
        let pending = trainer.step(&[batch])?;
        let stats = trainer.read(pending)?;
        if step % 5 == 0 || step + 1 == config.training.steps {
            println!("step {:2}  loss {:.4}  grad_norm {:.4}", step + 1, stats.loss, stats.grad_norm);
        }
        losses.push(stats.loss);
    }
    let floor = loader.entropy().expect("synthetic data has a known entropy");
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!("loss {first:.4} -> {last:.4}; no model can stay below {floor:.4} on average");
    assert!(last < first - 0.5 && last > floor, "the loss falls: {losses:?}");
    Ok(())
}

//! You learn: how parameters are sharded over ranks (FSDP): the same losses as alone, and what goes over the wire.
//! Ranks are threads of this process here; under mpirun the same code runs on MPI processes.

use moe8::comm::{Communicator, run_threads};
use moe8::config::Config;
use moe8::gpu::{DeviceChoice, Gpu};
use moe8::parallel::WireBytes;
use moe8::train::data::row_of;
use moe8::train::run::{build, open_data};
use std::sync::Arc;

const STEPS: usize = 4;
/// Sequences of a step over all ranks.
const GLOBAL: usize = 4;

const CONFIG: &str = r#"
[model.args]
dim = 48
n_layers = 2
n_heads = 4
vocab_size = 96
multiple_of = 16
num_experts = 4
[lr_scheduler]
warmup_steps = 2
[training]
seq_len = 32
"#;

/// The losses that each rank saw, and the bytes that it handed over.
fn train(ranks: usize, dtype: &str) -> moe8::Result<Vec<(Vec<f64>, WireBytes)>> {
    let local = GLOBAL / ranks;
    let overrides = [
        format!("training.mixed_precision_param={dtype}"),
        format!("training.local_batch_size={local}"),
        format!("training.steps={STEPS}"),
    ];
    let config = Config::from_toml(CONFIG, "the example", &overrides)?.config;
    config.validate(ranks)?;
    run_threads(ranks, |comm| {
        // Every rank has an adapter of its own (here: a device of its own on the same adapter).
        let comm: Arc<dyn Communicator> = Arc::from(comm);
        let gpu = Gpu::open(&DeviceChoice::from_env())?;
        let (loader, args) = open_data(&config)?;
        let mut trainer = build(&config, &gpu, &comm, &args)?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            // A step's rows depend on the global batch alone; each rank takes its part of them.
            let row = row_of(step as u64, comm.rank() as u64, ranks as u64, local as u64);
            let pending = trainer.step(&[loader.batch(row, local)?])?;
            losses.push(trainer.read(pending)?.loss);
        }
        Ok((losses, trainer.fsdp.wire()))
    })
}

fn main() -> moe8::Result<()> {
    let alone = train(1, "float32")?.remove(0);
    let f32_ranks = train(2, "float32")?;
    let bf16_ranks = train(2, "bfloat16")?;

    println!("losses on 1 rank:  {:.6?}", alone.0);
    println!("losses on 2 ranks: {:.6?}", f32_ranks[0].0);
    for (losses, _) in &f32_ranks {
        for (got, want) in losses.iter().zip(&alone.0) {
            assert!((got / want - 1.0).abs() < 1e-5, "{got} on two ranks, {want} alone");
        }
    }

    // Weights are cast to the compute dtype before they are gathered, so bf16 halves that traffic; gradients are
    // reduced in f32 either way.
    let (wide, narrow) = (f32_ranks[0].1, bf16_ranks[0].1);
    println!(
        "f32 compute:  each rank sent {} bytes to all-gathers, {} to reduce-scatters",
        wide.gathered, wide.reduced
    );
    println!(
        "bf16 compute: each rank sent {} bytes to all-gathers, {} to reduce-scatters",
        narrow.gathered, narrow.reduced
    );
    assert_eq!(alone.1, WireBytes::default(), "alone, nothing is sent");
    assert_eq!(narrow.gathered * 2, wide.gathered);
    assert_eq!(narrow.reduced, wide.reduced);
    Ok(())
}

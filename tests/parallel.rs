//! Ranks as threads: the same curve at any number of ranks, and exact bytes on the wire.

#[path = "common/tiny.rs"]
mod tiny;

use moe8::comm::{Communicator, run_threads};
use moe8::gpu::{DeviceChoice, Gpu};
use moe8::nn::Converters;
use moe8::num::DType;
use moe8::params::ParamId;
use std::sync::Arc;

const STEPS: usize = 4;
const GLOBAL: usize = 6;

struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    counts: Vec<Vec<u32>>,
    weights: Vec<f32>,
    gathered: u64,
    reduced: u64,
}

/// What every rank saw of a run on `ranks` ranks.
fn train(ranks: usize, dtype: DType, reshard: bool) -> Vec<Run> {
    run_threads(ranks, |comm| {
        let comm: Arc<dyn Communicator> = Arc::from(comm);
        let gpu = Gpu::open(&DeviceChoice::from_env())?;
        let recipe = moe8::train::trainer::Recipe { reshard, ..tiny::recipe(dtype, STEPS) };
        let mut trainer = tiny::trainer(&gpu, comm.clone(), &Converters::none(), recipe);
        let mut run =
            Run { losses: vec![], norms: vec![], counts: vec![], weights: vec![], gathered: 0, reduced: 0 };
        for step in 0..STEPS {
            let pending = trainer.step(&[tiny::batch(step, GLOBAL, comm.rank(), ranks)])?;
            let stats = trainer.read(pending)?;
            run.losses.push(stats.loss);
            run.norms.push(stats.grad_norm);
            run.counts.extend(stats.counts.into_iter().map(|c| c.1));
        }
        run.weights = trainer.weights(ParamId(3))?;
        run.gathered = trainer.fsdp.wire().gathered;
        run.reduced = trainer.fsdp.wire().reduced;
        Ok(run)
    })
    .expect("a run")
}

#[test]
fn one_two_and_three_ranks_give_one_curve() {
    let alone = train(1, DType::F32, true).remove(0);
    for ranks in [2, 3] {
        for run in train(ranks, DType::F32, true) {
            for (step, (got, want)) in run.losses.iter().zip(&alone.losses).enumerate() {
                assert!((got / want - 1.0).abs() < 1e-5, "{ranks} ranks, step {step}: {got}, alone {want}");
            }
            for (got, want) in run.norms.iter().zip(&alone.norms) {
                assert!((got / want - 1.0).abs() < 1e-4, "{ranks} ranks: norm {got}, alone {want}");
            }
            assert_eq!(run.counts, alone.counts, "{ranks} ranks");
            moe8::reference::compare::close(&run.weights, &alone.weights, &[run.weights.len()], 1e-4, 0.0)
                .unwrap();
        }
    }
}

#[test]
fn resharding_changes_bytes_and_nothing_else() {
    let (kept, freed) = (train(2, DType::BF16, false), train(2, DType::BF16, true));
    for (a, b) in kept.iter().zip(&freed) {
        assert_eq!(a.losses, b.losses);
        assert!(a.gathered < b.gathered, "{} {}", a.gathered, b.gathered);
        assert_eq!(a.reduced, b.reduced);
    }
    assert_eq!(kept[0].losses, kept[1].losses, "both ranks log the same loss");
    // Every parameter once per step, two bytes per element of the padded shard; gradients four bytes, padded.
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let (_, table) = moe8::nn::Llama4::build(&gpu, &tiny::args(), &Converters::none()).unwrap();
    let layout = moe8::params::Layout::new(&table, 2, &gpu).unwrap();
    let shard: u64 = table.iter().map(|(id, _)| layout.place(id).quads() as u64 * 4).sum();
    assert_eq!(kept[0].gathered, STEPS as u64 * shard * 2);
    assert_eq!(kept[0].reduced, STEPS as u64 * shard * 2 * 4);
}

/// The contract of the all-gather hooks: step 0 makes a parameter, later gathers must land in its memory, and kind and dtype
/// never change. The cast commutes with the gather bit for bit.
#[test]
fn hooks_hold_their_contract() {
    use moe8::parallel::hooks::{Unsharded, post_all_gather, pre_all_gather};
    use moe8::tensor::Tensor;
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let values: Vec<f32> = (0..64).map(|i| (i as f32 - 31.3) * 0.377).collect();
    let whole = Tensor::from_f32(&gpu, "whole", &[16, 4], DType::F32, &values).unwrap();
    let cast = moe8::ops::elementwise::cast(&gpu, &whole, DType::BF16).unwrap().to_f32(&gpu).unwrap();
    let mut pieces = Vec::new();
    for shard in values.chunks(32) {
        let shard = Tensor::from_f32(&gpu, "shard", &[8, 4], DType::F32, shard).unwrap();
        let payload = Tensor::empty(&gpu, "payload", &[8, 4], DType::BF16).unwrap();
        pre_all_gather(&gpu, &shard, &payload).unwrap();
        pieces.extend(payload.to_f32(&gpu).unwrap());
    }
    assert_eq!(pieces, cast, "cast then gather, gather then cast");

    let home = Tensor::from_f32(&gpu, "home", &[16, 4], DType::BF16, &pieces).unwrap();
    let first = post_all_gather("w", home.clone(), true, DType::BF16, None).unwrap();
    assert!(first.wrapped);
    let again = post_all_gather("w", home.clone(), true, DType::BF16, Some(&first)).unwrap();
    assert_eq!(again.data.to_f32(&gpu).unwrap(), cast);
    let elsewhere = Tensor::from_f32(&gpu, "elsewhere", &[16, 4], DType::BF16, &pieces).unwrap();
    let fails = |gathered: &Tensor, wrapped: bool, dtype: DType, out: &Unsharded, words: &str| {
        let error =
            post_all_gather("w", gathered.clone(), wrapped, dtype, Some(out)).expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    };
    fails(&elsewhere, true, DType::BF16, &first, "memory");
    fails(&home, false, DType::BF16, &first, "wrapped");
    fails(&home, true, DType::F32, &first, "policy says float32");
}

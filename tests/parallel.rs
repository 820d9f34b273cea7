//! Ranks as threads: the same curve at any number of ranks, and exact bytes on the wire.

#[path = "common/tiny.rs"]
mod tiny;

use moe8::comm::{Communicator, Solo, run_threads};
use moe8::gpu::{DeviceChoice, Gpu};
use moe8::nn::Converters;
use moe8::num::DType;
use moe8::parallel::{Fsdp, Policy};
use moe8::params::{Init, ParamId, Spec, Table, Weights};
use moe8::tensor::Tensor;
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

/// A table of whole parameters of these shapes in one block, and the FSDP group of it.
fn group(
    gpu: &Gpu,
    comm: Arc<dyn Communicator>,
    shapes: &[&[usize]],
    (param_dtype, accumulates): (DType, bool),
    reshard: bool,
) -> Fsdp {
    let mut table = Table::default();
    for (i, shape) in shapes.iter().enumerate() {
        table.add(Spec { name: format!("p{i}"), shape: shape.to_vec(), block: 0, init: Init::Ones });
    }
    let wrapped = vec![false; shapes.len()];
    let policy = Policy { param_dtype, reduce_dtype: DType::F32, reshard, accumulates, wrapped };
    Fsdp::new(gpu, comm, table, policy).expect("parameters")
}

/// Where one rank holds whole parameters and nothing is cast or added, a gradient is written where it is kept: one or, if no gap
/// is between them, several alike at once. Nothing is launched for it when it is handed over.
#[test]
fn gradients_are_written_where_they_are_kept() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let shapes: [&[usize]; 6] = [&[3, 8, 16], &[3, 8, 16], &[3, 8, 16], &[5, 7], &[5, 7], &[16]];
    for dtype in [DType::F32, DType::BF16] {
        let fsdp = group(&gpu, Arc::new(Solo::new()), &shapes, (dtype, false), true);
        assert_eq!(fsdp.grads.dtype(), dtype);
        let home = |fsdp: &Fsdp, ids: &[usize]| {
            let ids: Vec<ParamId> = ids.iter().map(|i| ParamId(*i)).collect();
            fsdp.gradient_home(&ids).expect("a home or none")
        };
        fsdp.start(false);
        for (what, ids) in [("order", &[1, 0][..]), ("gap", &[3, 4]), ("shapes", &[2, 3]), ("gap", &[0, 2])] {
            assert!(home(&fsdp, ids).is_none(), "{what}");
        }
        let (values, single) = ((0..6 * 192).map(|i| (i % 251) as f32).collect::<Vec<_>>(), [2.5; 35]);
        let several = home(&fsdp, &[0, 1, 2]).expect("a home for three");
        assert_eq!(several.shape(), [3, 3, 8, 16]);
        several.write_f32(&gpu, &values).unwrap();
        let one = home(&fsdp, &[4]).expect("a home for one");
        assert_eq!(one.shape(), [5, 7]);
        one.write_f32(&gpu, &single).unwrap();
        let launches = gpu.counters().dispatches;
        for i in 0..3 {
            fsdp.gradient(ParamId(i), several.slice_rows(24 * i, 24 * (i + 1))).unwrap();
        }
        fsdp.gradient(ParamId(4), one).unwrap();
        for (id, shape) in [(3, &[5, 7][..]), (5, &[16])] {
            let elsewhere = vec![1.5; shape.iter().product()];
            let elsewhere = Tensor::from_f32(&gpu, "elsewhere", shape, dtype, &elsewhere).unwrap();
            fsdp.gradient(ParamId(id), elsewhere).unwrap();
        }
        assert_eq!(gpu.counters().dispatches - launches, 2, "only what lies elsewhere is copied");
        let kept = |id| fsdp.fetch(&fsdp.grads, ParamId(id)).unwrap();
        for i in 0..3 {
            assert_eq!(kept(i), values[384 * i..384 * (i + 1)], "gradient {i}");
        }
        assert!(kept(4) == single && kept(3) == [1.5; 35] && kept(5) == [1.5; 16]);
    }
}

/// Gradients are f32 where they are added up or reduced, and as computed where one rank's one pass is all; only what needs no cast
/// and no sum has a home.
#[test]
fn gradients_that_add_up_are_f32() {
    use DType::{BF16, F32};
    let cases = [
        // ranks, compute dtype, accumulates -> dtype; a home in the first pass, in a pass that is added
        ((1, F32, false), F32, [true, false]),
        ((1, F32, true), F32, [true, false]),
        ((1, BF16, false), BF16, [true, false]),
        ((1, BF16, true), F32, [false, false]),
        ((2, F32, false), F32, [false, false]),
        ((2, BF16, false), F32, [false, false]),
    ];
    for ((ranks, compute, accumulates), dtype, homes) in cases {
        let found = run_threads(ranks, |comm| {
            let gpu = Gpu::open(&DeviceChoice::from_env())?;
            let fsdp = group(&gpu, Arc::from(comm), &[&[5, 7]], (compute, accumulates), true);
            let has_home = |added: bool| -> moe8::Result<bool> {
                fsdp.start(added);
                Ok(fsdp.gradient_home(&[ParamId(0)])?.is_some())
            };
            Ok((fsdp.grads.dtype(), [has_home(false)?, accumulates && has_home(true)?]))
        });
        let found = found.expect("a group");
        assert_eq!(found, vec![(dtype, homes); ranks], "{ranks} ranks, {compute}, accumulates {accumulates}");
    }
}

/// Only where one rank keeps whole parameters in bf16 may an optimizer write them.
#[test]
fn one_rank_in_bf16_lets_the_optimizer_cast() {
    use DType::{BF16, F32};
    let cases = [
        // ranks, compute dtype, reshard -> an optimizer writes bf16
        ((1, BF16, false), true),
        ((1, BF16, true), false),
        ((1, F32, false), false),
        ((2, BF16, false), false),
    ];
    for ((ranks, compute, reshard), expected) in cases {
        let found = run_threads(ranks, |comm| {
            let gpu = Gpu::open(&DeviceChoice::from_env())?;
            let fsdp = group(&gpu, Arc::from(comm), &[&[5, 7]], (compute, false), reshard);
            let mut found = None;
            fsdp.update(|shards| {
                found = shards.take_low().map(|low| low.dtype());
                Ok(())
            })?;
            Ok(found)
        });
        let expected = vec![expected.then_some(BF16); ranks];
        assert_eq!(found.expect("a group"), expected, "{ranks} ranks, {compute}, reshard {reshard}");
    }
}

/// What an optimizer wrote is used as it lies. What it left alone, or what failed, is cast again, as are weights that were set; so
/// nobody ever sees an old weight.
#[test]
fn gathered_weights_are_those_of_now() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let fsdp = group(&gpu, Arc::new(Solo::new()), &[&[3, 8, 16], &[5, 7], &[9]], (DType::BF16, false), false);
    // The weights as the next pass gets them, all alike, and launches until it has them.
    let look = || {
        let before = gpu.counters().dispatches;
        let all = [0, 1, 2].map(|id| fsdp.weight(ParamId(id)).expect("a weight"));
        let launches = gpu.counters().dispatches - before;
        assert!(all.iter().all(|w| w.dtype() == DType::BF16));
        (all.map(|w| w.to_f32(&gpu).expect("values")), launches)
    };
    let like = |x: f32| [vec![x; 384], vec![x; 35], vec![x; 9]];
    let fill = |store: &moe8::params::Store, x: f32| {
        for t in store.segments() {
            t.write_f32(&gpu, &vec![x; t.numel()]).expect("written");
        }
    };
    (0..3).for_each(|id| fsdp.set(ParamId(id), &|_| 0.25).expect("set"));
    assert_eq!(look(), (like(0.25), 1), "the first time");
    assert_eq!(look(), (like(0.25), 0), "kept");
    // What a dutiful optimizer writes, here something that no cast would give.
    let written = |shards: &moe8::params::Shards<'_>| {
        fill(shards.master, 0.5);
        fill(shards.take_low().expect("memory in bf16"), 0.75);
        Ok(())
    };
    fsdp.update(written).expect("an update");
    assert_eq!(look(), (like(0.75), 0), "written by the optimizer");
    fsdp.update(|shards| {
        fill(shards.master, 1.5);
        Ok(())
    })
    .expect("an update");
    assert_eq!(look(), (like(1.5), 1), "an optimizer that knows of no copy");
    let failed = fsdp.update(|shards| {
        written(shards)?;
        Err(moe8::Error::user("halfway", "again"))
    });
    assert!(failed.is_err());
    assert_eq!(look(), (like(0.5), 1), "an update that failed");
    fsdp.set(ParamId(1), &|_| 2.0).expect("set");
    let [a, _, c] = like(0.5);
    assert_eq!(look(), ([a, vec![2.0; 35], c], 1), "set");
    fsdp.set(ParamId(1), &|_| 3.0).expect("set");
    fsdp.update(written).expect("an update");
    assert_eq!(look(), (like(0.5), 1), "set before an update");
    fill(&fsdp.master, 4.0);
    fsdp.invalidate();
    assert_eq!(look(), (like(4.0), 1), "written by others");
}

/// Sums are never rounded to bf16 in silence.
#[test]
#[should_panic(expected = "the policy says one pass a step")]
fn a_pass_too_many_is_refused() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    group(&gpu, Arc::new(Solo::new()), &[&[5, 7]], (DType::BF16, false), true).start(true);
}

/// The contract of the all-gather hooks: step 0 makes a parameter, later gathers must land in its memory, and kind and dtype
/// never change. The cast commutes with the gather bit for bit.
#[test]
fn hooks_hold_their_contract() {
    use moe8::parallel::hooks::{Unsharded, post_all_gather, pre_all_gather};
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

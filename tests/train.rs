//! The step as a whole: transfers, memory, repeatability, accumulation.

#[path = "common/tiny.rs"]
mod tiny;

use moe8::comm::{Communicator, Solo};
use moe8::config::ModelArgs;
use moe8::gpu::{DeviceChoice, Gpu, Options, QuantizeKernel};
use moe8::nn::{Converters, Seed};
use moe8::num::DType;
use moe8::params::ParamId;
use moe8::train::trainer::{Recipe, StepStats, Trainer};
use moe8::train::weights::FileDtype;
use std::sync::Arc;

/// Room for the largest tensor of the tiny model, but not for all parameters at once.
const SMALL: u64 = 64 << 10;

fn solo() -> Arc<dyn Communicator> {
    Arc::new(Solo::new())
}

fn run(trainer: &mut Trainer, steps: usize) -> Vec<StepStats> {
    (0..steps)
        .map(|s| {
            let pending = trainer.step(&[tiny::batch(s, 2, 0, 1)]).expect("a step");
            trainer.read(pending).expect("numbers")
        })
        .collect()
}

/// Nothing crosses between host and device in a step but the batch on its way in and the numbers on their way out.
#[test]
fn a_step_has_one_upload_one_download_one_submit() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    for (converters, dtype) in [(Converters::none(), DType::F32), (tiny::rowwise(), DType::BF16)] {
        let mut trainer = tiny::trainer(&gpu, solo(), &converters, tiny::recipe(dtype, 4));
        run(&mut trainer, 2);
        let before = gpu.counters();
        let pending = trainer.step(&[tiny::batch(2, 2, 0, 1)]).expect("a step");
        let after = gpu.counters();
        assert_eq!(after.uploads - before.uploads, 1, "uploads");
        assert_eq!(after.downloads - before.downloads, 1, "downloads");
        assert_eq!(after.submits - before.submits, 1, "submits");
        assert_eq!(after.pipelines - before.pipelines, 0, "pipelines compiled after the first steps");
        trainer.read(pending).expect("numbers");
    }
}

/// The same numbers whether a rank's shards are in one segment or cut into several by a small limit for bindings.
#[test]
fn segments_change_nothing() {
    let losses = |limit: Option<u64>, segments: std::ops::Range<usize>| {
        let options = Options { max_binding: limit, ..Options::default() };
        let gpu = Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter");
        let mut trainer = tiny::trainer(&gpu, solo(), &tiny::rowwise(), tiny::recipe(DType::BF16, 3));
        let found = trainer.fsdp.master.segments().len();
        assert!(segments.contains(&found), "{found} segments, not {segments:?}");
        run(&mut trainer, 3).iter().map(|s| (s.loss, s.grad_norm)).collect::<Vec<_>>()
    };
    let whole = losses(None, 1..2);
    let cut = losses(Some(SMALL), 3..100);
    // The norm sums the segments' parts, in another order.
    for ((loss, norm), (want, want_norm)) in cut.iter().zip(&whole) {
        assert!((loss - want).abs() < 1e-4 && (norm / want_norm - 1.0).abs() < 1e-4, "{cut:?} {whole:?}");
    }
}

/// 200 steps: no byte more than after the second, what the planner said within a tenth, and no kernel that it did not foresee.
#[test]
fn memory_is_flat_and_as_planned() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let planner = gpu.planner();
    let mut plan = tiny::trainer(&planner, solo(), &tiny::rowwise(), tiny::recipe(DType::BF16, 200));
    for _ in 0..2 {
        drop(plan.step(&[tiny::batch(0, 2, 0, 1)]).expect("a planned step"));
    }
    gpu.prepare(&planner).expect("compiled kernels");
    let compiled = gpu.kernels();
    assert_eq!(compiled, planner.kernels());
    let mut trainer = tiny::trainer(&gpu, solo(), &tiny::rowwise(), tiny::recipe(DType::BF16, 200));
    run(&mut trainer, 2);
    let early = gpu.memory();
    run(&mut trainer, 198);
    assert_eq!(gpu.kernels(), compiled, "kernels after 200 steps, prepared");
    assert_eq!(gpu.memory(), early, "memory after 200 steps, after 2");
    let planned = planner.memory() as f64;
    assert!((planned / early as f64 - 1.0).abs() < 0.1, "planned {planned}, held {early}");
}

/// The full debug configuration (8 x 2048 tokens, V 2256) fits bindings of 128 MiB: a planner holds the limit.
#[test]
fn debug_configuration_fits_bindings_of_128_mib() {
    let limit = Options { max_binding: Some(128 << 20), ..Options::default() };
    let gpu = Gpu::open_with(&DeviceChoice::from_env(), limit).expect("an adapter");
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/llama4_debug.toml");
    for precision in ["bfloat16", "float32"] {
        let overrides = [format!("--training.mixed_precision_param={precision}")];
        let config = moe8::config::Config::load(Some(&path), &overrides).expect("a configuration").config;
        let planner = moe8::train::run::plan(&config, &gpu, &solo(), &config.args).expect("a plan");
        let needed = planner.memory();
        assert!(needed > 1 << 30, "{precision}: {needed} bytes are too few to be true");
    }
    let tight = Options { max_binding: Some(8 << 20), ..Options::default() };
    let gpu = Gpu::open_with(&DeviceChoice::from_env(), tight).expect("an adapter");
    let config = moe8::config::Config::load(Some(&path), &[]).expect("a configuration").config;
    let error =
        moe8::train::run::plan(&config, &gpu, &solo(), &config.args).expect_err("too large").to_string();
    assert!(error.contains("8388608 bytes") && error.contains("hint:"), "{error}");
}

fn same_bits(a: &[StepStats], b: &[StepStats]) {
    for (x, y) in a.iter().zip(b) {
        assert_eq!(x.loss.to_bits(), y.loss.to_bits(), "{x:?} {y:?}");
        assert_eq!(x.grad_norm.to_bits(), y.grad_norm.to_bits(), "{x:?} {y:?}");
        assert_eq!(x.counts, y.counts);
    }
}

/// The same run gives the same bits; so do poisoned memory and shaders with all checks on.
#[test]
fn runs_repeat_bit_for_bit() {
    let options = [
        Options::default(),
        Options::default(),
        Options { poison: true, ..Options::default() },
        Options { safe_shaders: true, ..Options::default() },
    ];
    let curves: Vec<Vec<StepStats>> = options
        .into_iter()
        .map(|o| {
            let gpu = Gpu::open_with(&DeviceChoice::from_env(), o).expect("an adapter");
            run(&mut tiny::trainer(&gpu, solo(), &tiny::rowwise(), tiny::recipe(DType::BF16, 4)), 4)
        })
        .collect();
    assert!(curves[0].last().unwrap().loss < curves[0][0].loss, "the loss falls: {:?}", curves[0]);
    for other in &curves[1..] {
        same_bits(&curves[0], other);
    }
}

/// Quantizing rows as norms, SwiGLU, gather and combine's gradient make them changes no bit of a run, here with the kernels of GPUs.
#[test]
#[ignore = "compiles the kernels of GPUs, minutes on a software adapter"]
fn fused_quantization_changes_no_bit() {
    // Whole units of eight columns, one expert a token: else nothing is fused.
    let args = ModelArgs { multiple_of: 16, top_k: 1, ..tiny::args() };
    let curve = |quantizer| {
        let options = Options { treat_as_hardware: true, quantizer, ..Options::default() };
        let gpu = Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter");
        let recipe = tiny::recipe(DType::BF16, 4);
        let mut trainer = Trainer::new(&gpu, solo(), &args, &tiny::rowwise(), recipe).expect("a trainer");
        trainer.initialize(Seed(7)).expect("initial weights");
        let curve = run(&mut trainer, 4);
        let launches = gpu.launches();
        let makers = ["normed", "gated", "routed"].map(|maker| format!("quantize_rows.{maker}"));
        let fused = makers.map(|name| launches.contains_key(name.as_str()));
        (curve, fused)
    };
    let (with, fused) = curve(None);
    let (without, apart) = curve(Some(QuantizeKernel::Simple));
    assert_eq!((fused, apart), ([true; 3], [false; 3]));
    same_bits(&with, &without);
}

/// Gradients kept as they are computed, and in f32 as where several passes add up: the same bits, and a launch less per parameter.
#[test]
fn gradients_in_the_compute_dtype_change_no_bit() {
    const STEPS: usize = 4;
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    for converters in [Converters::none(), tiny::rowwise()] {
        // Two passes a step are announced, and one is made.
        let [narrow, wide] = [1, 2].map(|accumulation| {
            let recipe = Recipe { accumulation, ..tiny::recipe(DType::BF16, STEPS) };
            let mut trainer = tiny::trainer(&gpu, solo(), &converters, recipe);
            let before = gpu.counters().dispatches;
            let stats = run(&mut trainer, STEPS);
            let launches = gpu.counters().dispatches - before;
            let mut values = trainer.batch_gradients(&tiny::batch(9, 2, 0, 1)).expect("gradients");
            let params: Vec<ParamId> = trainer.fsdp.table().iter().map(|(id, _)| id).collect();
            values.extend(params.iter().map(|id| trainer.weights(*id).expect("weights")));
            let bits: Vec<u32> = values.into_iter().flatten().map(f32::to_bits).collect();
            ((trainer.fsdp.grads.dtype(), launches), stats, bits, params.len())
        });
        let ((dtype, launches), stats, bits, params) = narrow;
        assert_eq!((dtype, wide.0.0), (DType::BF16, DType::F32));
        assert_eq!(launches + (STEPS * params) as u64, wide.0.1, "a cast of each gradient in each step");
        same_bits(&stats, &wide.1);
        assert!(bits == wide.2, "bits of gradients and weights");
        assert!(stats[STEPS - 1].loss < stats[0].loss, "it learns: {stats:?}");
    }
}

/// What a trainer holds: the bits of its weights, and of the logits that it gives now.
fn state(trainer: &Trainer) -> Vec<u32> {
    let mut values = trainer.logits(&tiny::batch(9, 2, 0, 1)).expect("logits");
    values.extend(trainer.fsdp.table().iter().flat_map(|(id, _)| trainer.weights(id).expect("weights")));
    values.into_iter().map(f32::to_bits).collect()
}

/// Weights that the optimizer writes in bf16, weights that are cast after every step, and weights that are freed between the passes:
/// the same bits. The optimizer's spares a launch per block and step, and the memory is that of the casts.
#[test]
fn weights_that_the_optimizer_casts_change_no_bit() {
    const STEPS: usize = 4;
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    for (converters, accumulation) in [(Converters::none(), 1), (tiny::rowwise(), 1), (tiny::rowwise(), 2)] {
        let [kept, cast, freed] = [(false, false), (false, true), (true, false)].map(|(reshard, forget)| {
            let recipe = Recipe { reshard, accumulation, ..tiny::recipe(DType::BF16, STEPS) };
            let mut trainer = tiny::trainer(&gpu, solo(), &converters, recipe);
            let before = gpu.counters().dispatches;
            let mut stats = Vec::new();
            for step in 0..STEPS {
                let batches: Vec<_> = (0..accumulation).map(|i| tiny::batch(step + i, 2, 0, 1)).collect();
                let pending = trainer.step(&batches).expect("a step");
                stats.push(trainer.read(pending).expect("numbers"));
                if forget {
                    trainer.fsdp.invalidate();
                }
            }
            let launches = gpu.counters().dispatches - before;
            (stats, launches, state(&trainer), trainer.fsdp.table().blocks())
        });
        same_bits(&kept.0, &cast.0);
        same_bits(&kept.0, &freed.0);
        assert!(kept.2 == cast.2 && kept.2 == freed.2, "bits of weights and logits");
        let spared = ((STEPS - 1) * kept.3) as u64;
        assert_eq!(kept.1 + spared, cast.1, "a cast of each block after each step but the last");
        assert!(cast.1 < freed.1, "{} {}", cast.1, freed.1);
    }
}

/// Weights that are set or loaded in the middle of a run are those of the next pass.
#[test]
fn weights_set_in_the_middle_are_used_at_once() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let file = tempfile::tempdir().expect("a folder");
    let file = file.path().join("model.safetensors");
    for (dtype, reshard) in [(DType::BF16, false), (DType::BF16, true), (DType::F32, false)] {
        let new = || {
            let recipe = Recipe { reshard, ..tiny::recipe(dtype, 8) };
            tiny::trainer(&gpu, solo(), &tiny::rowwise(), recipe)
        };
        let (fresh, mut trainer) = (state(&new()), new());
        run(&mut trainer, 2);
        let trained = state(&trainer);
        assert!(trained != fresh);
        moe8::train::state::save(&trainer, &file, FileDtype::F32).expect("saved");
        // One that has used its own weights, and another that has moved them.
        let loaded = new();
        assert!(state(&loaded) == fresh);
        moe8::train::state::load(&loaded, &file).expect("loaded");
        assert!(state(&loaded) == trained, "loaded, {dtype}, reshard {reshard}");
        run(&mut trainer, 2);
        moe8::train::state::load(&trainer, &file).expect("loaded");
        assert!(state(&trainer) == trained, "loaded after more steps, {dtype}, reshard {reshard}");
        run(&mut trainer, 1);
        trainer.initialize(Seed(7)).expect("initial weights");
        trainer.set_bias(1, &[0.0; 4]).expect("a bias");
        assert!(state(&trainer) == fresh, "set, {dtype}, reshard {reshard}");
    }
}

/// A filter that lets `output` through quantizes the head too: the loss moves, a little, and the model still learns.
#[test]
fn the_head_computes_in_fp8_where_the_filter_lets_it() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    // As `tiny::rowwise`, but for the filter.
    let everything = [
        "--model.converters=float8",
        "--float8.recipe_name=rowwise",
        "--float8.moe_fqns_prototype=experts",
        "--float8.filter_fqns=router.gate",
    ];
    let config =
        moe8::config::Config::load(None, &everything.map(String::from)).expect("a configuration").config;
    let losses = |converters: &Converters| -> Vec<f64> {
        let mut trainer = tiny::trainer(&gpu, solo(), converters, tiny::recipe(DType::BF16, 4));
        run(&mut trainer, 4).iter().map(|s| s.loss).collect()
    };
    let (with, without) = (losses(&Converters::new(&config)), losses(&tiny::rowwise()));
    assert!(with.iter().zip(&without).all(|(a, b)| a != b && (a - b).abs() < 0.05), "{with:?} {without:?}");
    assert!(with[3] < with[0], "{with:?}");
}

/// Two passes of two sequences are one pass of four, up to the order of sums.
#[test]
fn accumulation_equals_one_large_batch() {
    let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
    let mut whole = tiny::trainer(&gpu, solo(), &Converters::none(), tiny::recipe(DType::F32, 3));
    let recipe = Recipe { accumulation: 2, ..tiny::recipe(DType::F32, 3) };
    let mut parts = tiny::trainer(&gpu, solo(), &Converters::none(), recipe);
    for step in 0..3 {
        let a = whole.step(&[tiny::batch(step, 4, 0, 1)]).and_then(|p| whole.read(p)).expect("a step");
        let halves = [tiny::batch(step, 4, 0, 2), tiny::batch(step, 4, 1, 2)];
        let b = parts.step(&halves).and_then(|p| parts.read(p)).expect("a step");
        assert!((a.loss / b.loss - 1.0).abs() < 1e-5, "step {step}: {} and {}", a.loss, b.loss);
        assert!(
            (a.grad_norm / b.grad_norm - 1.0).abs() < 1e-4,
            "step {step}: {} and {}",
            a.grad_norm,
            b.grad_norm
        );
        assert_eq!(a.counts, b.counts, "step {step}");
    }
}

/// With `check_nan` a step whose gradients are no numbers ends there, before the optimizer spreads them.
#[test]
fn a_gradient_that_is_no_number_is_named() {
    let options = Options { check_nan: true, ..Options::default() };
    let gpu = Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter");
    for dtype in [DType::F32, DType::BF16] {
        let recipe = Recipe { lr: 1e30, ..tiny::recipe(dtype, 4) };
        let mut trainer = tiny::trainer(&gpu, solo(), &Converters::none(), recipe);
        let mut step = |i| trainer.step(&[tiny::batch(i, 2, 0, 1)]).map(drop).map_err(|e| e.to_string());
        assert_eq!(step(0), Ok(()), "the first step has sound weights");
        let error = step(1).expect_err("a step with weights of 1e30");
        assert!(error.starts_with("step 2: the gradients' norm is ") && error.contains("hint:"), "{error}");
    }
}

/// So does a step whose forward pass makes one: the step is named as well as the op.
#[test]
fn an_op_that_gives_no_number_is_named_with_its_step() {
    let options = Options { check_nan: true, ..Options::default() };
    let gpu = Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter");
    let mut trainer =
        tiny::trainer(&gpu, solo(), &Converters::none(), Recipe { lr: 1e-3, ..tiny::recipe(DType::F32, 4) });
    trainer.step(&[tiny::batch(0, 2, 0, 1)]).map(drop).expect("a step with sound weights");
    let (id, _) = trainer.fsdp.table().iter().next().expect("a parameter");
    trainer.fsdp.set(id, &|_| f32::NAN).expect("a parameter's values");
    let error = trainer.step(&[tiny::batch(1, 2, 0, 1)]).map(drop).expect_err("no numbers").to_string();
    assert!(error.starts_with("step 2: op 0 (embedding) gave NaN at row 0, column 0"), "{error}");
}

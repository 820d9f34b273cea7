//! `moe8 bench` and `moe8 compare`: fields, wrong results found before they are timed, broken clocks, the rule for software adapters.

#[path = "common/program.rs"]
mod program;

use clap::Parser as _;
use moe8::bench::check::Check;
use moe8::bench::data::Split;
use moe8::bench::gemm::{Linear, Pass};
use moe8::bench::recorded::Recorded;
use moe8::bench::row::Row;
use moe8::bench::runner::{Case, Runner, Settings};
use moe8::bench::step::Precision;
use moe8::bench::suite::{self, Groups, Op, Plan};
use moe8::bench::{activations, memory, moe, results, tables};
use moe8::cli::args::{Cli, Command};
use moe8::cli::{bench, overrides};
use moe8::gpu::{Clock, DeviceChoice, GemmKernel, Gpu, Options};
use moe8::num::DType;
use moe8::ops::choice::choose;
use moe8::ops::elementwise;
use moe8::ops::gemm_choice::{Form, Product};
use program::{command, stderr, words};
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// As short as can be, with small yardsticks: those of the program cost a GPU seconds, line by line.
const QUICK: Settings = Settings {
    warm_up: Duration::ZERO,
    warm_up_again: Duration::ZERO,
    repetitions: 5,
    window: Duration::ZERO,
    most_copied: 1 << 20,
    product: 64,
};

fn open(options: Options) -> Gpu {
    Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
}

fn run(line: &str) -> (Option<i32>, String, String) {
    let out = command(line, &[]).output().expect("the program starts");
    (out.status.code(), String::from_utf8_lossy(&out.stdout).into_owned(), stderr(&out))
}

fn rows(line: &str) -> Vec<serde_json::Value> {
    let (code, text, errors) = run(line);
    assert_eq!(code, Some(0), "{line}\n{errors}");
    text.lines().map(|l| fields(line, l)).collect()
}

fn fields(line: &str, json: &str) -> serde_json::Value {
    serde_json::from_str(json).unwrap_or_else(|e| panic!("{line}: {e} in {json}"))
}

/// What the program would do with `line`, without its warm-up and its yardsticks.
fn quick_rows(gpu: &Gpu, line: &str) -> Vec<serde_json::Value> {
    let (flags, keys) = overrides::split(words(line));
    let cli = Cli::try_parse_from(["moe8".to_string()].into_iter().chain(flags)).expect(line);
    let Command::Bench(args) = cli.command else { panic!("{line}: no benchmark") };
    let plan = bench::plan(&args, &keys).expect(line);
    let rows = suite::run_with(gpu, &plan, QUICK).expect(line);
    rows.iter().map(|row| fields(line, &row.json())).collect()
}

#[test]
fn json_has_every_field() {
    let gpu = open(Options::default());
    for (line, names, rate) in [
        ("copy --shape 100000", &["copy"][..], "gbps"),
        (
            "quantize --shape 67x33 --groups ragged",
            &[
                "quantize_rowwise",
                "quantize_colwise",
                "quantize_both",
                "quantize_weight_colwise",
                "quantize_weight_both",
            ],
            "gbps",
        ),
        ("gemm --shape 17x19x23 --precision f32", &["gemm_fprop"], "tflops"),
        (
            "grouped --shape 67x20x31x5 --groups ragged --precision fp8",
            &["grouped_fprop", "grouped_dgrad", "grouped_wgrad"],
            "tflops",
        ),
        ("attention --shape 2x19x4x2x8", &["attention_forward", "attention_backward"], "tflops"),
        ("op --shape 3x20x31x5 --groups uniform --precision bf16", &["op"], "tflops"),
        ("rmsnorm --shape 67x33", &["rmsnorm_forward", "rmsnorm_backward", "rmsnorm_quantize"], "gbps"),
        ("rope --shape 2x19x3x12 --precision f32", &["rope"], "gbps"),
        ("swiglu --shape 67x33", &["swiglu_forward", "swiglu_backward", "swiglu_quantize"], "gbps"),
        (
            "dispatch --shape 67x33x5x3",
            &[
                "dispatch_gather",
                "dispatch_gather_backward",
                "dispatch_combine",
                "dispatch_combine_backward",
                "dispatch_gather_quantize",
            ],
            "gbps",
        ),
        ("cross_entropy --shape 67x133", &["cross_entropy"], "gbps"),
        ("embedding --shape 267x33x50", &["embedding_forward", "embedding_backward"], "gbps"),
        ("adamw --shape 1001", &["adamw", "adamw"], "gbps"),
        (
            "elementwise --shape 67x33",
            &["elementwise_add", "elementwise_cast", "elementwise_add_into"],
            "gbps",
        ),
    ] {
        let rows = quick_rows(&gpu, &format!("bench {line}"));
        let ops: Vec<_> = rows.iter().map(|r| r["op"].as_str().unwrap_or_default()).collect();
        assert_eq!(ops, names, "{line}");
        rows.iter().for_each(|row| has_every_field(line, row, rate));
    }
    // The program prints the same.
    let line = "bench copy --shape 100000 --json --allow-software";
    let printed = rows(line);
    assert_eq!((printed.len(), printed[0]["op"].as_str()), (1, Some("copy")), "{printed:?}");
    has_every_field(line, &printed[0], "gbps");
}

fn has_every_field(line: &str, row: &serde_json::Value, rate: &str) {
    for field in ["adapter", "driver", "op", "shape", "groups", "dtype", "kernel", "clock"] {
        assert!(row[field].as_str().is_some_and(|s| !s.is_empty()), "{line}: {field} in {row}");
    }
    for field in ["median_ms", "min_ms", "share_of_peak", "error", "spread", rate] {
        assert!(row[field].as_f64().is_some_and(|x| x >= 0.0), "{line}: {field} in {row}");
    }
    assert!(["gpu", "wall"].contains(&row["clock"].as_str().unwrap()), "{row}");
    assert!(row["min_ms"].as_f64() <= row["median_ms"].as_f64(), "{row}");
    assert!(row["failed"].is_null(), "{row}");
}

#[test]
fn steps_are_measured() {
    let line = "bench step --shape 2x16 --precision fp8 --json --allow-software --model.args.dim=32 \
        --model.args.n_layers=2 --model.args.n_heads=2 --model.args.vocab_size=128 --model.args.multiple_of=16";
    let gpu = open(Options::default());
    let rows = quick_rows(&gpu, line);
    assert_eq!(rows.len(), 1);
    assert!(
        rows[0]["tokens_per_second"].as_f64().unwrap() > 0.0 && rows[0]["dispatches"].as_u64().unwrap() > 100
    );
    assert_eq!((rows[0]["clock"].as_str(), rows[0]["dtype"].as_str()), (Some("wall"), Some("fp8")));
    let (code, text, errors) = run(&line.replace("--json", "--profile"));
    assert_eq!(code, Some(0), "{errors}");
    for word in ["share", product_of_step(&gpu), "adamw", "by variant"] {
        assert!(text.contains(word), "no {word} in\n{text}");
    }
    a_profile_has_rows(line);
}

/// The kernel of that step's product of 32 tokens and a linear of 32 x 32 in fp8, on this adapter.
fn product_of_step(gpu: &Gpu) -> &'static str {
    let product = Product { form: Form::Nt, operands: [DType::E4M3; 2], sizes: [32; 3], groups: None };
    match choose(gpu, &product) {
        GemmKernel::Scalar => "gemm.nt",
        GemmKernel::Tiled => "gemm_tiled.main",
        GemmKernel::Narrow => "gemm_narrow.nt",
        GemmKernel::Coop => "gemm_coop.main",
    }
}

/// The rows of the same profile: on standard output, and in a file.
fn a_profile_has_rows(line: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("profile.json");
    let rows = rows(&format!("{line} --profile --explain -o {}", file.display()));
    assert!(rows.len() > 20, "{rows:?}");
    for row in &rows {
        for field in ["kernel", "variant", "clock", "adapter", "driver"] {
            assert!(row[field].is_string(), "{field} in {row}");
        }
        assert!(row["launches"].as_u64() > Some(0) && row["ms"].as_f64() >= Some(0.0), "{row}");
    }
    let shares: f64 = rows.iter().filter_map(|row| row["share"].as_f64()).sum();
    assert!((shares - 1.0).abs() < 1e-6, "{shares}");
    let kept: Vec<serde_json::Value> =
        serde_json::from_str(&std::fs::read_to_string(&file).expect("a file")).expect("one JSON value");
    assert_eq!(kept, rows);
    let (code, _, errors) = run(&format!("compare {} no/such.json", file.display()));
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("profile.json is a profile of `moe8 bench step --profile`"), "{errors}");
}

#[test]
fn chosen_kernels_are_told_once() {
    let line = "bench gemm --shape 33x20x31 --allow-software";
    // One product is of codes that were made before it is measured.
    for (line, what) in [
        (line.into(), "gemm nt bf16 thin: "),
        (format!("{line} --precision fp8"), "gemm nt fp8 thin: "),
        ("bench copy --shape 4096 --allow-software".into(), "no kernel was chosen: "),
    ] {
        let told = |line: &str| run(line).2.matches(what).count();
        assert_eq!([told(&line), told(&format!("{line} --explain"))], [0, 1], "{line}");
    }
}

#[test]
fn a_kernel_without_variants_has_a_plain_name() {
    let row = &quick_rows(&open(Options::default()), "bench adamw --shape 1001")[0];
    assert_eq!(row["kernel"].as_str().map(|name| name.trim_end() == name), Some(true), "{row}");
}

#[test]
fn layers_of_width_1_are_measured() {
    let gpu = open(Options::default());
    let mut runner = Runner::with(&gpu, QUICK);
    for (shape, precision) in
        [([5, 1, 1, 2], Precision::F32), ([5, 8, 1, 2], Precision::Bf16), ([3, 1, 8, 1], Precision::Fp8)]
    {
        let row = runner.measure_case(&moe::case(&gpu, shape, precision).expect("a case")).expect("a row");
        assert_eq!((&row.failed, row.median_ms.is_some()), (&None, true), "{row:?}");
    }
}

/// A layer that is right, and the same one with its result times a factor: wrong, and run twice only (on the planner and
/// for the check), that is, never timed.
#[test]
fn a_wrong_result_is_found_before_it_is_timed() {
    let gpu = open(Options::default());
    let mut runner = Runner::with(&gpu, QUICK);
    let split = Split::ragged(67, 5);
    for precision in Precision::ALL {
        let linear = Linear::new(&gpu, [67, 20, 31], Some(&split), precision).expect("operands");
        for pass in Pass::ALL {
            // Two roundings of bf16, whose tolerance is one.
            wrong(&mut runner, linear.product(&gpu, pass).expect("a case"), 1.008);
        }
    }
    wrong(&mut runner, memory::copy(&gpu, 100_000).expect("a case"), 1.000_001);
    for dtype in [DType::F32, DType::BF16] {
        let mut all = activations::norms(&gpu, [67, 40], dtype).expect("cases");
        all.extend(activations::gates(&gpu, [67, 40], dtype).expect("cases"));
        all.extend(activations::elements(&gpu, [67, 40], dtype).expect("cases"));
        all.extend(tables::routes(&gpu, [67, 40, 5, 3], dtype).expect("cases"));
        all.extend(tables::embeddings(&gpu, [267, 40, 50], dtype).expect("cases"));
        all.push(activations::rotation(&gpu, [2, 19, 3, 12], dtype).expect("a case"));
        all.push(activations::loss(&gpu, [67, 133], dtype).expect("a case"));
        all.push(tables::update(&gpu, 1000, dtype).expect("a case"));
        all.into_iter().for_each(|case| wrong(&mut runner, case, 1.02));
    }
    wrong(&mut runner, moe::case(&gpu, [40, 16, 24, 3], Precision::Fp8).expect("a case"), 1.3);
}

fn wrong(runner: &mut Runner, case: Case, factor: f32) {
    let right = runner.measure_case(&case).expect("a row");
    assert_eq!((&right.failed, right.median_ms.is_some()), (&None, true), "{right:?}");
    let runs = Rc::new(Cell::new(0));
    let (count, run) = (runs.clone(), case.run);
    let case = Case {
        run: Box::new(move |gpu| {
            count.set(count.get() + 1);
            let results = run(gpu)?;
            elementwise::scale_into(gpu, &results[0], factor)?;
            Ok(results)
        }),
        ..case
    };
    let row = runner.measure_case(&case).expect("a row");
    assert!(row.failed.is_some() && row.median_ms.is_none() && row.tflops.is_none(), "{row:?}");
    assert_eq!(runs.get(), 2, "{}: never timed", row.op);
    assert_eq!(row.clock, "none");
}

#[test]
fn a_wrong_quantizer_is_found() {
    let gpu = open(Options::default());
    let mut runner = Runner::with(&gpu, QUICK);
    let split = Split::ragged(67, 3);
    for case in memory::quantizers(&gpu, (67, 33), [3, 21, 33], &split).expect("cases") {
        let right = runner.measure_case(&case).expect("a row");
        assert_eq!(right.failed, None);
        let run = case.run;
        let swapped = Case {
            run: Box::new(move |gpu| {
                let results = run(gpu)?;
                // De-scales from other memory: f32 zeros.
                let zeros = moe8::tensor::Tensor::flat(gpu, "zeros", results[1].numel(), DType::F32)?;
                gpu.clear(zeros.memory().0);
                Ok(vec![results[0].clone(), zeros])
            }),
            ..case
        };
        let row = runner.measure_case(&swapped).expect("a row");
        assert!(row.failed.as_ref().is_some_and(|why| why.contains("de-scales")), "{row:?}");
    }
}

#[test]
fn zero_timestamps_fall_back_to_the_wall_clock() {
    let copy = |gpu: &Gpu| {
        let case = memory::copy(gpu, 100_000).expect("a case");
        Runner::with(gpu, QUICK).measure_case(&case).expect("a row")
    };
    let broken = open(Options { zero_timestamps: true, ..Options::default() });
    let row = copy(&broken);
    assert_eq!((row.clock.as_str(), row.median_ms.is_some_and(|ms| ms > 0.0)), ("wall", true));
    // A profile too starts again by the host's clock.
    let gpu = open(Options { zero_timestamps: true, profile: true, ..Options::default() });
    let case = memory::copy(&gpu, 100_000).expect("a case");
    (case.run)(&gpu).and_then(|_| gpu.finish()).expect("a copy");
    gpu.reset_profile().expect("nothing wrong");
    (case.run)(&gpu).and_then(|_| gpu.finish()).expect("a copy");
    let (clock, kernels) = gpu.profile().expect("a profile");
    assert_eq!((clock, kernels.len()), (Clock::Wall, 1));
    assert!(kernels[0].seconds > 0.0 && kernels[0].dispatches == 1, "{kernels:?}");
}

#[test]
fn a_profile_counts_every_launch() {
    let gpu = open(Options { profile: true, ..Options::default() });
    let linear = Linear::new(&gpu, [33, 8, 8], None, Precision::Fp8).expect("operands");
    let op = linear.op();
    (op.run)(&gpu).expect("a run");
    gpu.reset_profile().expect("nothing wrong");
    let before = gpu.counters().dispatches;
    for _ in 0..3 {
        (op.run)(&gpu).expect("a run");
    }
    let (_, kernels) = gpu.profile().expect("a profile");
    assert_eq!(kernels.iter().map(|k| k.dispatches).sum::<u64>(), gpu.counters().dispatches - before);
    assert!(kernels.windows(2).all(|k| k[0].seconds >= k[1].seconds));
}

#[test]
fn a_software_adapter_needs_to_be_asked_for() {
    let gpu = open(Options::default());
    if !gpu.caps().software {
        return println!("skipped: {} is no software adapter, so there is nothing to ask for", gpu.name());
    }
    let (code, text, errors) = run("bench copy --shape 4096 --json");
    assert_eq!((code, text.as_str()), (Some(2), ""));
    assert!(errors.contains("--allow-software"), "{errors}");
    assert!(rows("bench copy --shape 4096 --json --allow-software")[0]["software"].as_bool().unwrap());
    let (_, text, _) = run("bench copy --shape 4096 --allow-software");
    assert!(text.contains("SOFTWARE"), "{text}");
}

#[test]
fn bad_input_is_refused() {
    for (line, word) in [
        ("bench", "nothing is named"),
        ("bench copy --suite standard", "leave out copy, or leave out --suite"),
        (
            "bench --suite standard gemm rope",
            "--suite standard measures everything, and gemm is named beside it",
        ),
        ("bench --suite standard --shape 4x4", "--shape"),
        ("bench copy gemm --shape 4x4x4", "one op"),
        ("bench gemm --shape 4x5", "MxKxN"),
        ("bench gemm --shape 4x0x5", "MxKxN"),
        ("bench copy --shape x", "number of bytes"),
        ("bench adamw --shape 0", "number of parameters"),
        ("bench rope --shape 1x4x2x6", "multiple of 4"),
        ("bench dispatch --shape 4x4x2", "TxDxExK"),
        ("bench attention --shape 1x4x3x2x8", "multiple"),
        ("bench attention --shape 1x4x2x2x6", "multiple of 4"),
        ("bench grouped --groups no/such.jsonl", "no/such.jsonl"),
        ("bench grouped --groups Cargo.toml", "Cargo.toml"),
        ("bench copy --profile", "step"),
        ("bench step --shape 2x64 --training.seq_len=0", "hint"),
        ("bench adamw --ranks 2", "one rank"),
        ("bench adamw --precision fp8", "f32 and bf16"),
        ("bench quantize --precision bf16", "--precision bf16"),
        ("bench rmsnorm swiglu --precision fp8", "f32 and bf16"),
        ("bench gemm --config configs/quickstart.toml", "bench step"),
        ("bench gemm --training.steps=3", "--shape"),
        ("bench rope --groups uniform", "fall into groups"),
        ("bench copy --check-nan", "step and moe"),
        ("bench copy --shape 4096 -o no/such/file.json", "folder that exists"),
        ("bench copy --shape 4096 -o src", "src is a folder"),
        ("bench attention --shape 1x4x2x2x6", "--shape BxSxHxKVxD"),
        (&over_the_limit(), "--shape MxKxN"),
        ("compare no/a.json no/b.json", "no/a.json"),
        ("compare Cargo.toml Cargo.toml", "moe8 bench"),
    ] {
        let (code, _, errors) =
            run(&format!("{line} {}", if line.contains("compare") { "" } else { "--allow-software" }));
        assert_eq!(code, Some(2), "{line}: {errors}");
        assert!(errors.contains(word), "{line}: no {word:?} in {errors}");
        assert!(!errors.contains("panicked"), "{line}: {errors}");
    }
}

/// A product whose first operand is just over what one binding of the adapter holds.
fn over_the_limit() -> String {
    let caps = open(Options::default()).caps();
    let edge = (caps.max_binding.min(caps.max_buffer) / 4).isqrt() + 4;
    format!("bench gemm --shape {edge}x{edge}x9 --precision f32")
}

/// A line of `metrics.jsonl`.
fn step(step: usize, layers: &str) -> String {
    format!("{{\"step\":{step},\"tokens_per_expert\":{{{layers}}}}}\n")
}

#[test]
fn recorded_groups_are_replayed() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("metrics.jsonl");
    // The second run was the shorter one. A damaged line of the first one is no matter.
    let text = [
        step(1, "\"layers.1\":[1,2]"),
        step(10, "\"layers.1\":[2,1]"),
        "{\"step\"\n".into(),
        step(1, "\"layers.1\":[4,4,0]"),
        step(5, "\"layers.1\":[3,0,5],\"layers.3\":[0,8,0]"),
    ];
    std::fs::write(&file, text.concat()).expect("a file");
    let all = Recorded::read(&file).expect("splits");
    assert_eq!(
        all.layers.iter().map(|s| s.sizes.clone()).collect::<Vec<_>>(),
        [vec![3, 0, 5], vec![0, 8, 0]]
    );
    assert!(all.source.ends_with("metrics.jsonl, step 5 of run 2 of 2"), "{}", all.source);
    let gpu = open(Options::default());
    rows_are_those_of_a_file(&file, "--shape 8x4x5x3", "8x4x5x3");
    match gpu.caps().software {
        true => rows_are_those_of_a_file(&file, "", "8x128x128x3"),
        false => println!("skipped: {} has default shapes of real models, for minutes", gpu.name()),
    }
    a_file_says_how_many(&gpu, all);
    // Rows and groups that are not the file's: said, with those that are.
    for (op, shape, wanted) in [
        ("grouped", "9x4x5x3", ["has 9 rows in 3 groups, but layers.1 of ", "write --shape 8x4x5x3"]),
        ("op", "8x4x5x2", ["has 8 rows in 2 groups, but layers.1 of ", "write --shape 8x4x5x3"]),
        ("quantize", "9x4", ["--shape 9x4 has 9 rows, but layers.1 of ", "write --shape 8x4,"]),
    ] {
        let line = format!("bench {op} --groups {} --shape {shape} --allow-software", file.display());
        let (code, _, errors) = run(&line);
        assert_eq!(code, Some(2), "{line}: {errors}");
        assert!(wanted.iter().all(|word| errors.contains(word)), "{line}: {errors}");
    }
}

/// The program replays both layers of `file`, each in three products.
fn rows_are_those_of_a_file(file: &Path, shape: &str, want: &str) {
    let line = format!("bench grouped --precision bf16 --groups {} --json --allow-software", file.display());
    let (code, text, errors) = run(&format!("{line} {shape}"));
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("step 5 of run 2 of 2: layers.1 8 rows in 3 groups, layers.3 8"), "{errors}");
    assert_eq!(
        (text.lines().count(), text.matches(&format!("\"shape\":\"{want}\"")).count()),
        (6, 6),
        "{text}"
    );
    assert_eq!(text.matches("\"groups\":\"layers.1\"").count(), 3, "{text}");
}

/// Eight rows and three experts, whatever the shape says, as default shapes say other things.
fn a_file_says_how_many(gpu: &Gpu, recorded: Recorded) {
    let plan = Plan {
        ops: vec![Op::Grouped],
        shapes: vec!["16x4x5x2".into()],
        groups: Groups::Recorded(recorded),
        precisions: vec![Precision::Bf16],
        config: None,
        overrides: Vec::new(),
        explain: false,
    };
    let rows = suite::run_with(gpu, &plan, QUICK).expect("rows");
    assert!(rows.len() == 6 && rows.iter().all(|row| row.shape == "8x4x5x3"), "{rows:?}");
    let default = Plan { ops: vec![Op::Quantize], shapes: Vec::new(), precisions: Vec::new(), ..plan };
    for plan in [Plan { shapes: vec!["8x4".into()], ..default.clone() }, default] {
        let rows = suite::run_with(gpu, &plan, QUICK).expect("rows");
        let weights = rows.iter().filter(|row| row.op.contains("weight"));
        let shapes: Vec<&str> = weights.map(|row| row.shape.as_str()).collect();
        assert!(shapes.len() == 2 && shapes.iter().all(|s| s.starts_with("3x3x")), "{shapes:?}");
    }
}

#[test]
fn recorded_groups_that_cannot_be_replayed_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("metrics.jsonl");
    let first = step(1, "\"layers.1\":[1]");
    for (last, wanted) in [
        (step(7, "\"layers.3\":[1,-2]"), "step 7 of run 1 of 1, layers.3: expert 1 has -2 tokens"),
        (step(7, "\"layers.3\":[1048577]"), "expert 0 has 1048577 tokens; a whole number from 0 to 1048576"),
        (step(7, "\"layers.3\":[1,1.5]"), "expert 1 has 1.5 tokens"),
        (step(7, "\"layers.3\":[0,0]"), "layers.3: its experts have 0 tokens in all; 1 to 1048576"),
        (step(7, "\"layers.3\":[]"), "layers.3: its experts have 0 tokens"),
        (step(1, "\"layers.3\":\"x\""), "step 1 of run 2 of 2, layers.3: \"x\" is no list"),
        (step(1, ""), "step 1 of run 2 of 2: no tokens_per_expert"),
        ("{\"step\":2".into(), "line 2 is no step of a run: "),
        ("{\"loss\":2}".into(), "line 2 has no step"),
    ] {
        std::fs::write(&file, format!("{first}{last}")).expect("a file");
        let error = Recorded::read(&file).expect_err(wanted).to_string();
        assert!(
            error.contains(wanted) && error.contains("metrics.jsonl") && error.contains("hint"),
            "{error}"
        );
    }
    // Layers of one model are alike; a file of other layers has no shape.
    std::fs::write(&file, step(1, "\"layers.1\":[4,4],\"layers.3\":[9]")).expect("a file");
    let both = Recorded::read(&file).expect("splits");
    let error = both.check_shape(&[8, 4, 5, 2]).expect_err("layers.3 has others").to_string();
    assert!(error.contains("layers.3 of ") && error.contains("leave out --shape"), "{error}");
}

#[test]
fn files_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let written = format!(
        "bench gemm --shape 9x8x7 --precision bf16 --json --allow-software --output {}",
        path("a.json")
    );
    let printed = run(&written).1;
    let a: Vec<Row> =
        serde_json::from_str(&std::fs::read_to_string(path("a.json")).unwrap()).expect("one JSON value");
    let file = std::fs::read_to_string(path("a.json")).unwrap();
    let objects = file.lines().filter(|l| l.starts_with('{')).map(|l| l.trim_end_matches(','));
    assert_eq!(objects.collect::<Vec<_>>(), printed.lines().collect::<Vec<_>>());
    // Lines are read as well; the other one is twice as fast, lacks a case, has a wrong one, and one more.
    let mut b: Vec<Row> = a.clone();
    b[0].median_ms = a[0].median_ms.map(|ms| ms / 2.0);
    b[1].failed = Some("wrong".into());
    b[2].shape = "1x2x3".into();
    let lines: Vec<String> = b.iter().map(Row::json).collect();
    std::fs::write(path("b.json"), lines.join("\n")).unwrap();
    let (code, text, errors) = run(&format!("compare {} {}", path("a.json"), path("b.json")));
    assert_eq!(code, Some(0), "{errors}");
    let table: Vec<&str> = text.lines().filter(|l| l.starts_with("| gemm")).collect();
    assert_eq!(table.len(), 4, "{text}");
    assert!(table[0].contains("| 2.0000 |") && table[1].contains("WRONG"), "{text}");
    assert!(table[2].contains("| - |") && table[3].contains("1x2x3"), "{text}");
}

#[test]
fn files_that_cannot_be_compared_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("x");
    let row = Row { op: "gemm".into(), ..Row::default() };
    let broken = format!("{}\n{}", row.json(), row.json().replace("\"gemm\"", "7"));
    for (bytes, wanted) in [
        (&b""[..], "is empty"),
        (b"\xff\x00", "is no text"),
        (b"[]", "has no rows"),
        (b"# a comment", "x is none of `moe8 bench --output`: no JSON"),
        (b"[package]\nname = 1", "x is none of `moe8 bench --output`: no JSON"),
        (b"{\"op\": 1", "x is damaged or cut off: not JSON to its end (EOF while parsing"),
        (b"[\n{\"op\": 1}", "x is damaged or cut off: not JSON to its end (EOF while parsing"),
        (b"[1, 2]", "is JSON, but its row 1 of 2 is none of `moe8 bench`: "),
        (b"{\"weight_map\": {}}", "its row 1 of 1 is none of `moe8 bench`: it has no op"),
        (broken.as_bytes(), "its row 2 of 2 is none of `moe8 bench`: "),
        (
            step(1, "").replace("\"step\"", "\"loss\":2,\"step\"").as_bytes(),
            "is the metrics.jsonl of a training run",
        ),
        (b"{\n\"fastest\": {},\n\"rejected\": []\n}", "is what `moe8 tune` found"),
        (b"adapter,driver,software,op\n", "is a sheet of `moe8 bench --csv`"),
        (b"kernel,variant,workgroups,launches\n", "is a sheet of `moe8 bench step --profile --csv`"),
        (b"moe8 1.0 on a card\n\n| op |", "is a table of `moe8 bench`"),
    ] {
        std::fs::write(&path, bytes).expect("a file");
        let error = results::read(&path).expect_err(wanted).to_string();
        assert!(error.contains(wanted) && error.contains("compare takes two files"), "{wanted}: {error}");
    }
}

#[test]
fn a_table_and_a_sheet_have_the_same_rows() {
    let line = "bench gemm --shape 9x8x7 --precision bf16 --allow-software";
    for (format, head) in
        [("", "| op | shape"), ("--markdown", "| op | shape"), ("--csv", "adapter,driver,software,op,shape")]
    {
        let (code, text, errors) = run(&format!("{line} {format}"));
        assert_eq!(code, Some(0), "{errors}");
        assert!(text.lines().any(|l| l.starts_with(head)), "{text}");
        assert_eq!(text.matches("9x8x7").count(), 3, "{text}");
    }
    assert_eq!(Check::default().wrong, None);
}

//! The program from outside: what it prints, where, and its exit status.

use std::io::Write as _;
use std::process::{Command, Output};

/// Runs `moe8` with the words of `line` in the repository's root.
fn moe8(line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moe8"))
        .args(line.split_whitespace())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_remove("MOE8_DEVICE")
        .env("MOE8_CACHE", "off")
        .output()
        .expect("the program starts")
}

fn stdout(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn config_prints_the_resolved_configuration() {
    let out = moe8(
        "config --config configs/llama4_debug.toml --ranks 2 --training.steps=100 --model.converters float8",
    );
    assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
    assert_eq!(stderr(&out), "");
    let text = stdout(&out);
    let line = |start: &str| {
        text.lines().find(|l| l.starts_with(start)).unwrap_or_else(|| panic!("{start}\n{text}"))
    };
    assert!(line("steps = 100").ends_with("# command line"));
    assert!(line("converters = [\"float8\"]").ends_with("# command line"));
    assert!(line("seq_len = 2048").contains("# file, line "));
    assert!(line("beta2 = 0.95").ends_with("# default"));
    assert!(line("n_layers = 6").ends_with("# flavor"));
    assert!(text.contains("dense 4,500,736, sparse 10,622,976, active 6,866,176, total 15,123,712"));
    assert!(text.contains("75,480,576"));
    assert!(text.contains("global batch 16 sequences = 32,768 tokens"));
}

#[test]
fn what_config_prints_is_a_configuration() {
    let first = stdout(&moe8("config --config configs/quickstart.toml"));
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(first.as_bytes()).unwrap();
    let again = moe8(&format!("config --job.config_file={}", file.path().display()));
    assert_eq!(again.status.code(), Some(0), "{}", stderr(&again));
    let values = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|l| !l.starts_with('#'));
        lines.map(|l| l.split(" # ").next().unwrap_or_default().trim().to_string()).collect()
    };
    assert_eq!(values(&stdout(&again)), values(&first));
}

#[test]
fn warnings_go_to_standard_error() {
    let out =
        moe8("config --config configs/quickstart.toml --training.compile --profiling.enable_profiling=true");
    assert_eq!(out.status.code(), Some(0));
    let text = stderr(&out);
    assert!(text.contains("WARNING - training.compile = true (command line) has no effect"), "{text}");
    assert!(text.contains("WARNING - profiling.enable_profiling"), "{text}");
}

#[test]
fn keys_are_listed() {
    let out = moe8("config --keys");
    assert_eq!(out.status.code(), Some(0));
    let text = stdout(&out);
    assert!(text.contains("training.steps: a whole number from 1 to 1073741824; default 10000"), "{text}");
    assert!(text.contains("float8.moe_fqns = float8.moe_fqns_prototype"));
}

#[test]
fn user_errors_exit_with_2_and_a_hint() {
    for (line, words) in [
        ("config --training.step=1", &["--training.step: unknown key", "did you mean training.steps?"][..]),
        ("config --training.steps=many", &["--training.steps = \"many\"", "a whole number", "hint: "]),
        (
            "config --training.steps=99999999999999999999",
            &["from 1 to 1073741824", "hint: set training.steps to something between 1 and 1073741824"],
        ),
        ("config --training.dataset=c4_test", &["c4_test", "hint: ", "synthetic"]),
        ("config --model.args.top_k=9", &["top_k = 9", "num_experts = 8", "hint: "]),
        ("config --parallelism.expert_parallel_degree=2", &["expert_parallel_degree", "hint: "]),
        ("config --parallelism.data_parallel_shard_degree=4 --ranks 2", &["there are 2 ranks", "hint: "]),
        ("config --ranks 0", &["ranks = 0", "hint: "]),
        ("config --config no/such.toml", &["no/such.toml", "hint: "]),
        ("config --config Cargo.lock", &["Cargo.lock:", "hint: "]),
        ("config --config src/main.rs", &["src/main.rs:1: ", "hint: "]),
        ("train --training.seq_len=0", &["hint: "]),
        ("confg", &["confg", "config"]),
        ("config --rank 2", &["--rank", "--ranks"]),
        ("config --steps=3", &["--steps", "--training.steps=VALUE"]),
        ("config --ranks two", &["two", "--ranks"]),
        ("", &["Usage: moe8"]),
    ] {
        let out = moe8(line);
        let text = stderr(&out);
        assert_eq!(out.status.code(), Some(2), "{line}: {text}");
        for word in words {
            assert!(text.contains(word), "{line}: no {word:?} in\n{text}");
        }
        assert!(!text.contains("panicked"), "{line}: {text}");
    }
}

#[test]
fn help_and_version_succeed() {
    for line in ["--help", "help", "help train", "config --help", "--version"] {
        let out = moe8(line);
        assert_eq!(out.status.code(), Some(0), "{line}: {}", stderr(&out));
        assert!(stdout(&out).contains("moe8"), "{line}");
    }
}

/// What `--explain` says of the model's kernels comes before its first step, and is of kernels that it has.
#[test]
fn chosen_kernels_are_told_before_the_first_step() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = moe8(&format!(
        "train --config configs/quickstart.toml --explain --model.args.dim=32 --model.args.n_layers=2 \
         --model.args.n_heads=2 --model.args.vocab_size=128 --model.args.multiple_of=16 --training.seq_len=32 \
         --training.local_batch_size=2 --training.steps=1 --lr_scheduler.warmup_steps=0 --job.dump_folder={}",
        dir.path().display()
    ));
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    let place = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what:?} in\n{text}"));
    let start = place("Training starts");
    for what in ["matrix units: ", "nt fp8 thin", "backward bf16 d16", "rows narrow", "kernels: "] {
        assert!(place(what) < start, "{what} comes too late");
    }
    assert!(!text.contains(" large,") && !text.contains("d128"), "{text}");
    // Classes that share kernel and reason share a line, and no variant has one.
    let ops = ["attention", "gemm", "quantize"];
    let told = text.lines().filter_map(|l| l.split_once(" - INFO - ").map(|(_, told)| told));
    let lines: Vec<&str> = told.filter(|l| ops.iter().any(|op| l.starts_with(op))).collect();
    let reasons: std::collections::BTreeSet<_> =
        lines.iter().map(|l| (l.split([' ', ':']).next(), l.split_once('(').map(|(_, why)| why))).collect();
    assert_eq!(reasons.len(), lines.len(), "{lines:#?}");
    assert!(!text.contains("X=bfloat16"), "{text}");
}

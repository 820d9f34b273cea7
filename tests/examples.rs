//! Runs every example of examples/: each asserts its own result and prints little.
//!
//! `cargo test` builds them; `cargo test --test examples` alone does not: say `cargo build --examples` before it.

#[path = "common/source.rs"]
mod source;

use std::path::{Path, PathBuf};
use std::process::Command;

/// The most lines of an example, and of what it prints.
const MOST_LINES: usize = 100;
const MOST_PRINTED: usize = 30;

/// The program that cargo built from examples/`name`.rs, beside this test in target/<profile>.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this test is a file");
    let profile = test.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    profile.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

/// Whether the program is there and no older than its source.
fn is_fresh(program: &Path, name: &str) -> bool {
    let changed = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    let source = changed(&source::repo().join(format!("examples/{name}.rs")));
    changed(program).is_some_and(|built| source.is_none_or(|source| built >= source))
}

fn run(name: &str) {
    let program = program(name);
    assert!(
        is_fresh(&program, name),
        "{} is not built, or not since its source changed: run `cargo test`, or `cargo build --examples` first",
        program.display()
    );
    let out = Command::new(&program).output().unwrap_or_else(|e| panic!("{}: {e}", program.display()));
    let printed = String::from_utf8_lossy(&out.stdout);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{name}: {}\n{printed}{said}", out.status);
    let lines = printed.lines().count();
    assert!((1..=MOST_PRINTED).contains(&lines), "{name} printed {lines} lines:\n{printed}");
    for ratio in ["inf dB", "NaN dB"] {
        assert!(!printed.contains(ratio), "{name} prints {ratio}, which tells a reader nothing:\n{printed}");
    }
    print!("{printed}");
}

/// One test per example, so that a failure has its name.
macro_rules! examples {
    ($($test:ident: $file:literal;)*) => {
        $(#[test]
        fn $test() {
            run($file);
        })*
        const FILES: &[&str] = &[$($file),*];
    };
}

examples! {
    example_01: "01_devices_and_a_first_kernel";
    example_02: "02_quantize_fp8";
    example_03: "03_grouped_gemm";
    example_04: "04_moe_layer";
    example_05: "05_train_tiny";
    example_06: "06_two_ranks";
}

#[test]
fn every_example_is_listed_short_and_says_what_one_learns() {
    let paths = source::files("examples", ".rs");
    let names: Vec<&str> =
        paths.iter().map(|p| p.trim_start_matches("examples/").trim_end_matches(".rs")).collect();
    assert_eq!(names, FILES, "the files of examples/, the examples of this test");
    for path in &paths {
        let text = source::read(path);
        assert!(text.starts_with("//! You learn: "), "{path} opens with what one learns");
        let lines = text.lines().count();
        assert!(lines <= MOST_LINES, "{path}: {lines} lines, at most {MOST_LINES}");
    }
}

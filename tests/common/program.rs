//! The real program, run with a model of a few thousand parameters.

#![allow(dead_code, reason = "each test program uses its own part of this module")]

use std::path::Path;
use std::process::{Command, Output};

/// Keys that make any run small: two layers, the second an MoE of four experts.
pub const SMALL: &str = "--config configs/quickstart.toml --model.args.dim=32 --model.args.n_layers=2 \
    --model.args.n_heads=2 --model.args.vocab_size=128 --model.args.multiple_of=16 --training.seq_len=32 \
    --training.local_batch_size=2 --training.steps=2 --lr_scheduler.warmup_steps=1";

/// `moe8` with the words of `line`, where `SMALL` stands for those of [`SMALL`], in the repository's root; with the
/// variables `env` and without those that launchers and users set.
pub fn command(line: &str, env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moe8"));
    command.args(words(line)).current_dir(env!("CARGO_MANIFEST_DIR"));
    for name in ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"] {
        command.env_remove(name);
    }
    command.env_remove("LOG_RANK").env("MOE8_CACHE", "off").envs(env.iter().copied());
    command
}

/// The words of a command line with `SMALL` written out.
pub fn words(line: &str) -> Vec<String> {
    line.replace("SMALL", SMALL).split_whitespace().map(str::to_owned).collect()
}

pub fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// Runs a line that must succeed.
pub fn succeed(line: &str) -> Output {
    let out = command(line, &[]).output().expect("the program starts");
    assert_eq!(out.status.code(), Some(0), "{line}\n{}", stderr(&out));
    out
}

/// The names in a folder and below, sorted; none where there is no folder.
pub fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.expect("a readable folder").path();
        found.push(path.file_name().expect("a name").to_string_lossy().into_owned());
        if path.is_dir() && !path.is_symlink() {
            found.extend(names(&path));
        }
    }
    found.sort();
    found
}

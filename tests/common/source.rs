//! The repository's own files, for the tests that read the sources.

#![allow(dead_code, reason = "each test program uses its own part of this module")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's root.
pub fn repo() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files below `folder` whose name ends with `end`, relative to the root with `/`, sorted.
pub fn files(folder: &str, end: &str) -> Vec<String> {
    let mut found: Vec<String> = walk(&repo().join(folder)).iter().map(|path| relative(path)).collect();
    found.retain(|path| path.ends_with(end));
    found.sort();
    found
}

/// The text of a file, by its path from the root.
pub fn read(path: &str) -> String {
    std::fs::read_to_string(repo().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Every file that git tracks or would track; where there is no git, every file outside build and output folders.
pub fn tracked() -> Vec<String> {
    let listed =
        Command::new("git").args(["ls-files", "-co", "--exclude-standard"]).current_dir(repo()).output();
    match listed {
        Ok(out) if out.status.success() => {
            let lines = String::from_utf8_lossy(&out.stdout).into_owned();
            lines.lines().filter(|path| repo().join(path).is_file()).map(str::to_owned).collect()
        }
        _ => files("", ""),
    }
}

fn relative(path: &Path) -> String {
    path.strip_prefix(repo()).expect("below the root").to_string_lossy().replace('\\', "/")
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.expect("readable folder").path();
        let skipped = ["target", "outputs", ".git"].iter().any(|name| path.ends_with(name));
        match path.is_dir() {
            true if !skipped => found.extend(walk(&path)),
            true => {}
            false => found.push(path),
        }
    }
    found
}

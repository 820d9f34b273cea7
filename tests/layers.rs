//! The layers of ARCHITECTURE.md: a module may name only modules below it. The order is that of `pub mod` in lib.rs.

#[path = "common/source.rs"]
mod source;

/// Pairs that the order allows and the architecture does not: (module, what it must not name, why).
const APART: [(&str, &str, &str); 3] = [
    ("ops", "reference", "the oracle judges the ops, so they must not call it"),
    ("nn", "optim", "they meet only in params"),
    ("nn", "parallel", "they meet only in params"),
];

/// The modules of lib.rs, lowest first.
fn order() -> Vec<String> {
    let text = source::read("src/lib.rs");
    let modules = text.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    modules.map(str::to_owned).collect()
}

/// The rows of the block under "## Layers" in ARCHITECTURE.md, lowest first, each with its modules.
fn rows() -> Vec<Vec<String>> {
    let text = source::read("ARCHITECTURE.md");
    let section = text.split("## Layers").nth(1).expect("ARCHITECTURE.md has a section Layers");
    let block = section.split("```").nth(1).expect("the section has a block");
    let names = |line: &str| {
        let column = line.split("  ").next().unwrap_or("");
        let names = column.split([',', '|']).map(|name| name.trim().trim_end_matches(".rs").to_owned());
        names.filter(|name| !name.is_empty()).collect::<Vec<_>>()
    };
    let mut rows: Vec<_> = block.lines().map(names).filter(|row| !row.is_empty()).collect();
    rows.reverse();
    rows
}

/// The code of a source file: comments out, and with them the test modules (they may name anything).
fn code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or(""));
    let text = lines.collect::<Vec<_>>().join("\n");
    if text.contains("#![cfg(test)]") {
        return String::new(); // a test module in a file of its own
    }
    let mut parts = text.split("#[cfg(test)]");
    let mut kept = parts.next().unwrap_or("").to_owned();
    for part in parts {
        kept.push_str(after_item(part));
    }
    kept
}

/// What follows the item at the start of `text`: a block in braces, or a declaration up to its semicolon.
fn after_item(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 && (c == '}' || c == ';') {
            return &text[at + 1..];
        }
    }
    ""
}

/// The first names of the paths that start at the crate's root in the file `path`: of `crate::a::b` and
/// `crate::{a::b, c}`, `a` and `c`; `super::a` counts where `super` is the root. Macros (`crate::a!`) do not count.
fn roots(path: &str, text: &str) -> Vec<String> {
    let file = path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    let up = "super::".repeat(file.split('/').count());
    let code = code(text);
    let mut found = Vec::new();
    for start in ["crate::", &up] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$' || c == ':') {
                continue;
            }
            found.extend(first_names(&code[at + start.len()..]));
        }
    }
    found
}

/// The first name of a path, or those of a group in braces.
fn first_names(rest: &str) -> Vec<String> {
    let Some(group) = rest.strip_prefix('{') else {
        return first_name(rest).into_iter().collect();
    };
    let (mut names, mut depth, mut fresh) = (Vec::new(), 1, true);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => fresh = true,
            c if fresh && !c.is_whitespace() => {
                names.extend(first_name(&group[at..]));
                fresh = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    names
}

fn first_name(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let is_macro = text[end..].starts_with('!');
    (end > 0 && !is_macro).then(|| text[..end].to_owned())
}

/// What is wrong with the paths of one file.
fn violations(order: &[String], rows: &[Vec<String>], path: &str, text: &str) -> Vec<String> {
    let own = path.trim_start_matches("src/").split(['/', '.']).next().unwrap_or("");
    let place = |name: &str| order.iter().position(|m| m == name);
    let Some(here) = place(own) else { return vec![format!("{path}: `{own}` is not declared in lib.rs")] };
    let row = |name: &str| rows.iter().position(|row| row.iter().any(|m| m == name));
    let mut wrong = Vec::new();
    for name in roots(path, text) {
        let Some(there) = place(&name) else {
            // Error, Result and other names that lib.rs re-exports are types; a module would be in lower case.
            if name.starts_with(char::is_lowercase) {
                wrong.push(format!("{path}: names crate::{name}, which lib.rs does not declare"));
            }
            continue;
        };
        let beside = there != here && row(&name) == row(own) && row(own) != Some(0);
        if there > here || beside {
            wrong.push(format!("{path}: {own} names crate::{name}, which does not stand below it"));
        }
        for (from, to, why) in APART {
            if (own, name.as_str()) == (from, to) {
                wrong.push(format!("{path}: {from} names crate::{to}: {why}"));
            }
        }
    }
    wrong
}

#[test]
fn no_arrow_points_up() {
    let (order, rows) = (order(), rows());
    let mut wrong = Vec::new();
    for path in source::files("src", ".rs") {
        if path != "src/lib.rs" && path != "src/main.rs" {
            wrong.extend(violations(&order, &rows, &path, &source::read(&path)));
        }
    }
    assert!(wrong.is_empty(), "layers of ARCHITECTURE.md broken:\n{}", wrong.join("\n"));
}

#[test]
fn lib_rs_and_architecture_agree() {
    let (order, rows) = (order(), rows());
    assert!(order.len() > 10, "{order:?}");
    let row = |name: &String| {
        let row = rows.iter().position(|row| row.contains(name));
        row.unwrap_or_else(|| panic!("module {name} is missing from the layers of ARCHITECTURE.md: {rows:?}"))
    };
    for pair in order.windows(2) {
        assert!(
            row(&pair[0]) <= row(&pair[1]),
            "{} stands above {} in ARCHITECTURE.md only",
            pair[0],
            pair[1]
        );
    }
    for name in rows.iter().flatten().filter(|name| *name != "main") {
        assert!(order.contains(name), "ARCHITECTURE.md has the layer {name}, lib.rs has not");
    }
}

#[test]
fn only_gpu_names_wgpu() {
    for path in source::files("src", ".rs") {
        let names = code(&source::read(&path)).contains("wgpu");
        assert!(!names || path.starts_with("src/gpu/"), "{path} names wgpu; only src/gpu may");
    }
}

#[test]
fn planted_violations_are_found() {
    let (order, rows) = (order(), rows());
    for (path, text, found) in [
        ("src/ops/gemm.rs", "use crate::nn::Llama4;", 1),
        ("src/ops/gemm.rs", "use crate::{error::{Error, nn}, num::{bf16},\n  train, Result};", 1),
        ("src/ops/gemm.rs", "fn f() { super::super::nn::g(crate::reference::x()) }", 2),
        ("src/ops/mod.rs", "use super::train;", 1),
        ("src/tensor.rs", "pub(in super::ops) fn f() {}", 1),
        ("src/optim/mod.rs", "use crate::parallel::Mesh;", 1),
        ("src/nn/moe/router.rs", "use crate::optim::AdamW; use crate::ops::gemm;", 1),
        (
            "src/gpu/mod.rs",
            "#[cfg(test)]\nmod tests { fn f() { crate::nn::x() } }\nfn g() { crate::nn::y() }",
            1,
        ),
        ("src/gpu/mod.rs", "use crate::nowhere::x;", 1),
        ("src/gadget.rs", "", 1),
        (
            "src/ops/gemm.rs",
            "//! [`crate::nn`]\nuse super::shape; crate::params! {} use $crate::nn; mycrate::nn",
            0,
        ),
        ("src/reference/mod.rs", "use crate::{num, error::Error, Result};", 0),
        ("src/gpu/mod.rs", "#[cfg(test)]\nmod tests;\nuse crate::num::x;", 0),
        ("src/ops/x/emulated.rs", "//! Why.\n#![cfg(test)]\nuse crate::reference::x;", 0),
    ] {
        let wrong = violations(&order, &rows, path, text);
        assert_eq!(wrong.len(), found, "{path}: {text}\n{wrong:?}");
    }
}

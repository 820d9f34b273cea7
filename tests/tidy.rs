//! House rules that a reader relies on and a compiler does not hold: stems, sizes, words, kernel lists.

#[path = "common/source.rs"]
mod source;

use std::collections::BTreeSet;

/// Where the three files of a stem stand: folder and ending.
const HOMES: [(&str, &str); 3] = [("shaders/", ".wgsl"), ("src/reference/", ".rs"), ("src/ops/", ".rs")];

/// Stems that are not in all three places: (stem, where they are, why).
const EXCEPTIONS: [(&str, &[&str], &str); 18] = [
    (
        "attention_coop",
        &["shaders/", "src/ops/"],
        "computes what attention computes; its oracle is attention's",
    ),
    ("attention_coop_backward", &["shaders/"], "the gradients of attention_coop"),
    ("attention_halves", &["shaders/"], "the operands of attention_coop"),
    ("panels", &["shaders/", "src/ops/"], "moves bytes; the products of what it moved have gemm's oracle"),
    ("choice", &["src/ops/"], "chooses between kernels, has none of its own"),
    ("gemm_choice", &["src/ops/"], "chooses between the gemm kernels, has none of its own"),
    ("attention_choice", &["src/ops/"], "chooses between the attention kernels, has none of its own"),
    ("quantize_choice", &["src/ops/"], "chooses between the quantizers, has none of its own"),
    ("emulation", &["src/ops/"], "what tests pretend that an adapter has; no op"),
    ("gemm_tiled", &["shaders/", "src/ops/"], "computes what gemm computes; its oracle is gemm's"),
    ("gemm_narrow", &["shaders/", "src/ops/"], "computes what gemm computes; its oracle is gemm's"),
    ("gemm_coop", &["shaders/", "src/ops/"], "computes what gemm computes; its oracle is gemm's"),
    ("quantize_rows", &["shaders/", "src/ops/"], "computes what quantize computes; its oracle is quantize's"),
    (
        "quantize_strips",
        &["shaders/", "src/ops/"],
        "computes what quantize computes; its oracle is quantize's",
    ),
    ("quantize_wide", &["shaders/", "src/ops/"], "computes what quantize computes; its oracle is quantize's"),
    ("compare", &["src/reference/"], "measures how far a result is from the oracle's: no op"),
    (
        "fp8_linear",
        &["src/reference/", "src/ops/"],
        "runs the kernels of quantize and gemm, has none of its own",
    ),
    ("gemm_sum", &["shaders/"], "the second half of gemm's tn in parts; gemm's oracle judges both"),
];

/// The most lines of a file: one that grows past it has a second job.
const BUDGETS: [(&str, &str, usize); 2] = [("src", ".rs", 500), ("shaders", ".wgsl", 350)];

/// The places (of HOMES) of each stem that stands directly in one of them.
fn stems_of(paths: &[String]) -> BTreeSet<(String, &'static str)> {
    let mut found = BTreeSet::new();
    for path in paths {
        for (folder, end) in HOMES {
            let stem = path.strip_prefix(folder).and_then(|name| name.strip_suffix(end));
            if let Some(stem) = stem.filter(|stem| !stem.contains('/') && *stem != "mod") {
                found.insert((stem.to_owned(), folder));
            }
        }
    }
    found
}

/// What is wrong with the stems; `complete` when every op must have all its files, else only what stands in none of the
/// places that an exception names counts.
fn stem_violations(paths: &[String], complete: bool) -> Vec<String> {
    let found = stems_of(paths);
    let stems: BTreeSet<&String> = found.iter().map(|(stem, _)| stem).collect();
    let mut wrong = Vec::new();
    for stem in stems {
        let exception = EXCEPTIONS.iter().find(|(name, ..)| name == stem);
        for (folder, end) in HOMES {
            let there = found.contains(&(stem.clone(), folder));
            let wanted = exception.is_none_or(|(_, places, _)| places.contains(&folder));
            if wanted && !there && complete {
                wrong.push(format!("{folder}{stem}{end} is missing: a stem has three files"));
            }
            if there && !wanted {
                wrong.push(format!("{folder}{stem}{end} is there: take `{stem}` out of EXCEPTIONS"));
            }
        }
    }
    for (stem, ..) in EXCEPTIONS.iter().filter(|_| complete) {
        if !found.iter().any(|(name, _)| name == stem) {
            wrong.push(format!("EXCEPTIONS names `{stem}`, which is no file"));
        }
    }
    wrong
}

/// What is wrong in one text file.
fn text_violations(path: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut say = |line: usize, what: &str| wrong.push(format!("{path}:{}: {what}", line + 1));
    for (number, line) in text.lines().enumerate() {
        // Written in two halves, for this file is read too.
        for place in
            [concat!("/wo", "rk/"), concat!("sha", "red/"), concat!("/ro", "ot/"), concat!("/ho", "me/")]
        {
            let hit = line.match_indices(place).any(|(at, _)| {
                place.starts_with('/') || !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
            });
            if hit {
                say(number, &format!("`{place}` is a path of one machine"));
            }
        }
        if path.starts_with("src/") {
            for word in ["TODO", "FIXME", "todo!(", "unimplemented!(", "dbg!("] {
                if line.contains(word) {
                    say(number, &format!("`{word}`: do it, or write an issue"));
                }
            }
            let may_print =
                path.starts_with("src/cli/") || path == "src/main.rs" || line.trim_start().starts_with("//");
            if !may_print && ["println!(", "print!("].iter().any(|word| line.contains(word)) {
                say(number, "prints; the library uses `log`");
            }
        }
    }
    if path.ends_with(".wgsl") && !text.starts_with("// ") {
        say(0, "a shader begins with a comment that says what it computes");
    }
    for (folder, end, most) in BUDGETS {
        let lines = text.lines().count();
        if path.starts_with(folder) && path.ends_with(end) && lines > most {
            say(0, &format!("{lines} lines, at most {most}: split it by jobs"));
        }
    }
    wrong
}

/// The kernel constants of one file of ops that its `fn kernels` does not name.
fn unlisted_kernels(path: &str, text: &str) -> Vec<String> {
    let constants = text.lines().filter_map(|line| {
        let (name, _) = line.split_once("const ")?.1.split_once(": Kernel ")?;
        Some(name)
    });
    let list = text.split("fn kernels()").nth(1).and_then(|rest| rest.split("\n}").next()).unwrap_or("");
    let words: BTreeSet<&str> = list.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    let missing = constants.filter(|name| !words.contains(name));
    missing.map(|name| format!("{path}: the kernel {name} is not in the file's kernels()")).collect()
}

#[test]
fn a_stem_has_its_three_files() {
    let mut paths = source::files("src", ".rs");
    paths.extend(source::files("shaders", ".wgsl"));
    // Before there is a README to tell anyone about them, ops, oracles and shaders still land one by one.
    let complete = source::repo().join("README.md").exists();
    let wrong = stem_violations(&paths, complete);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn texts_keep_the_house_rules() {
    let mut wrong = Vec::new();
    for path in source::tracked() {
        if path == "Cargo.lock" {
            continue;
        }
        // What is not UTF-8 (golden tensors, token files) is no text.
        if let Ok(text) = std::fs::read_to_string(source::repo().join(&path)) {
            wrong.extend(text_violations(&path, &text));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_kernel_is_in_the_list() {
    let list = source::read("src/ops/mod.rs");
    let mut wrong = Vec::new();
    for path in source::files("src/ops", ".rs") {
        let text = source::read(&path);
        wrong.extend(unlisted_kernels(&path, &text));
        let module = path.trim_start_matches("src/ops/").split(['/', '.']).next().unwrap_or("");
        if text.contains("fn kernels()") && module != "mod" && !list.contains(&format!("{module}::kernels()"))
        {
            wrong.push(format!("src/ops/mod.rs: kernels() does not ask {module}::kernels()"));
        }
    }
    // Above ops nobody has kernels; below it, gpu has one of its own to fill buffers.
    for path in source::files("src", ".rs") {
        let inside = path.starts_with("src/ops/") || path.starts_with("src/gpu/");
        if !inside && source::read(&path).contains(": Kernel =") {
            wrong.push(format!("{path}: a kernel outside ops is in no list"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn planted_stems_are_found() {
    let paths = |list: &[&str]| list.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
    let whole = paths(&[
        "shaders/a.wgsl",
        "src/reference/a.rs",
        "src/ops/a.rs",
        "src/ops/mod.rs",
        "shaders/lib/grid.wgsl",
        "src/reference/compare.rs",
        "src/reference/fp8_linear.rs",
        "src/ops/fp8_linear.rs",
        "src/ops/gemm_coop.rs",
        "shaders/gemm_coop.wgsl",
        "src/ops/attention_coop.rs",
        "shaders/attention_coop.wgsl",
        "shaders/attention_coop_backward.wgsl",
        "shaders/attention_halves.wgsl",
        "src/ops/choice.rs",
        "src/ops/emulation.rs",
        "src/ops/gemm_choice.rs",
        "src/ops/gemm_narrow.rs",
        "shaders/gemm_narrow.wgsl",
        "src/ops/attention_choice.rs",
        "src/ops/quantize_choice.rs",
        "src/ops/gemm_tiled.rs",
        "shaders/gemm_tiled.wgsl",
        "src/ops/quantize_rows.rs",
        "shaders/quantize_rows.wgsl",
        "src/ops/quantize_strips.rs",
        "shaders/quantize_strips.wgsl",
        "src/ops/quantize_wide.rs",
        "shaders/quantize_wide.wgsl",
        "shaders/gemm_sum.wgsl",
        "src/ops/panels.rs",
        "shaders/panels.wgsl",
    ]);
    assert_eq!(stem_violations(&whole, true), Vec::<String>::new());
    for (at, gone) in
        whole.iter().enumerate().filter(|(_, path)| !path.contains("mod.rs") && !path.contains("lib/"))
    {
        let mut rest = whole.clone();
        rest.remove(at);
        assert!(!stem_violations(&rest, true).is_empty(), "without {gone}");
        assert_eq!(stem_violations(&rest, false), Vec::<String>::new(), "without {gone}");
    }
    let surplus = paths(&["src/ops/compare.rs"]);
    assert_eq!(stem_violations(&surplus, false).len(), 1);
}

#[test]
fn planted_words_are_found() {
    let long = "// x\n".repeat(501);
    for (path, text, found) in [
        ("README.md", concat!("see ../sha", "red/notes and /wo", "rk/main"), 2),
        ("README.md", concat!("pre_sha", "red/x; memory is shared / global"), 0),
        ("src/ops/a.rs", "fn f() { println!(\"x\") } // TODO", 2),
        ("src/ops/a.rs", "/// println!(\"in an example\")", 0),
        ("src/cli/mod.rs", "fn f() { eprintln!(\"x\"); dbg!(1) }", 1),
        ("shaders/a.wgsl", "fn main() {}", 1),
        ("src/ops/a.rs", long.as_str(), 1),
        ("shaders/a.wgsl", &long[..351 * 5], 1),
        ("tests/a.rs", long.as_str(), 0),
    ] {
        assert_eq!(text_violations(path, text).len(), found, "{path}: {:?}", text_violations(path, text));
    }
    let ops = "const NT: Kernel = Kernel {};\npub const TN: Kernel = Kernel {};\nfn kernels() -> V {\n vec![NT]\n}\n";
    assert_eq!(unlisted_kernels("src/ops/a.rs", ops).len(), 1);
    assert_eq!(unlisted_kernels("src/ops/a.rs", &ops.replace("[NT]", "[NT, TN]")).len(), 0);
}

//! README.md, ARCHITECTURE.md and docs/ keep up with what they describe: links, the source tree, variables, test files.

#[path = "common/source.rs"]
mod source;

use std::collections::BTreeSet;

/// Targets of `[text](target)` that are paths, without their fragments.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    let paths = targets.filter(|t| !t.contains("://") && !t.starts_with('#'));
    paths.map(|t| t.split('#').next().unwrap_or(t)).collect()
}

/// Words of `text` that begin with `MOE8_`.
fn variables(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|w| w.starts_with("MOE8_") && w.len() > 5).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut documents = source::files("docs", ".md");
    documents.extend(["README.md", "ARCHITECTURE.md", "CHANGELOG.md"].map(String::from));
    let mut seen = 0;
    for document in &documents {
        let text = source::read(document);
        let folder = source::repo().join(document).parent().expect("a file has a folder").to_path_buf();
        for target in links(&text) {
            assert!(folder.join(target).exists(), "{document} links to {target}, which is not there");
            seen += 1;
        }
    }
    assert!(seen > 5, "found {seen} links only");
}

#[test]
fn the_readme_tree_has_every_part() {
    let readme = source::read("README.md");
    let tree = readme.split("## The source tree").nth(1).and_then(|t| t.split("```").nth(1)).expect("a tree");
    for module in source::read("src/lib.rs").lines().filter_map(|l| l.strip_prefix("pub mod ")) {
        let module = module.trim_end_matches(';');
        let named = [format!("{module}/"), format!("{module}.rs"), format!("{module},")];
        assert!(named.iter().any(|n| tree.contains(n.as_str())), "src/{module} is not in README's tree");
    }
    for line in tree.lines().skip(1).filter(|l| !l.starts_with(' ') && !l.is_empty()) {
        for name in line.split("  ").next().unwrap_or("").split_whitespace() {
            assert!(source::repo().join(name).exists(), "README's tree has {name}, which is not there");
        }
    }
}

/// Variables for a user; those with which the tests make up machines are in scripts/lib.sh.
#[test]
fn every_variable_is_in_the_readme() {
    let readme = source::read("README.md");
    let known = variables(&readme);
    let mut used = BTreeSet::new();
    let mut files = source::files("src", ".rs");
    files.extend(source::files("scripts", ".sh"));
    files.extend(["run_train.sh", "run_tests.sh"].map(String::from));
    let texts: Vec<String> = files.iter().map(|f| source::read(f)).collect();
    for text in &texts {
        used.extend(variables(text));
    }
    for made_up in ["MOE8_ROOT", "MOE8_OS_RELEASE"] {
        used.remove(made_up);
    }
    assert!(used.contains("MOE8_DEVICE"), "{used:?}");
    let missing: Vec<_> = used.difference(&known).collect();
    assert!(missing.is_empty(), "README.md does not explain {missing:?}");
}

#[test]
fn every_test_file_is_in_the_architecture() {
    let text = source::read("ARCHITECTURE.md");
    let map = text.split("## The tests").nth(1).expect("ARCHITECTURE.md has a section on the tests");
    for path in source::files("tests", ".rs") {
        let name = path.trim_start_matches("tests/");
        // An op's tests may be named by their beginning: `ops_...`.
        if !name.contains('/') && !name.starts_with("ops_") {
            assert!(map.contains(&format!("`{name}`")), "{path} is not in the map of the tests");
        }
    }
}

#[test]
fn the_checks_see_what_they_look_for() {
    assert_eq!(links("[a](b.md#c) and [d](https://e) [f](#g) [h](i/j.rs)"), ["b.md", "i/j.rs"]);
    assert_eq!(variables("${MOE8_A:-} MOE8_ xMOE8_B \"MOE8_C\""), BTreeSet::from(["MOE8_A", "MOE8_C"]));
}

//! Weight files through the real program: what `export` writes, `checkpoint.initial_load_path` reads, to the bit.

#[path = "common/program.rs"]
mod program;

use program::succeed;
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn export(dir: &Path, name: &str, rest: &str) -> PathBuf {
    let path = dir.join(name);
    succeed(&format!("export SMALL --output {} {rest}", path.display()));
    path
}

fn load(path: &Path) -> String {
    format!("--checkpoint.initial_load_path={}", path.display())
}

/// The lines of `metrics.jsonl` after a run, without what depends on the clock.
fn train(dir: &Path, name: &str, rest: &str) -> Vec<Value> {
    let folder = dir.join(name);
    succeed(&format!("train SMALL --job.dump_folder={} {rest}", folder.display()));
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &mut lines {
        line.as_object_mut().unwrap().remove("tokens_per_second").expect("a rate");
    }
    lines
}

#[test]
fn export_load_export_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in ["float32", "bfloat16"] {
        let key = format!("--checkpoint.export_dtype={dtype}");
        let first = export(dir.path(), &format!("{dtype}.1"), &key);
        let again = export(dir.path(), &format!("{dtype}.2"), &format!("{key} {}", load(&first)));
        let (first, again) = (std::fs::read(first).unwrap(), std::fs::read(again).unwrap());
        assert!(first == again, "{dtype}: {} and {} bytes differ", first.len(), again.len());
        let other = export(dir.path(), &format!("{dtype}.3"), &format!("{key} --training.seed=43"));
        assert!(first != std::fs::read(other).unwrap(), "another seed gives other weights");
    }
}

#[test]
fn training_from_a_file_is_training_from_its_seed() {
    let dir = tempfile::tempdir().unwrap();
    let file = export(dir.path(), "w.safetensors", "");
    let (seed, loaded) = (train(dir.path(), "seed", ""), train(dir.path(), "loaded", &load(&file)));
    assert_eq!(seed, loaded);
    assert_eq!(seed.len(), 2);
    let other = train(dir.path(), "other", &format!("{} --training.seed=43", load(&file)));
    assert_ne!(seed[0]["loss"], other[0]["loss"], "other data, the same weights");
}

/// An expert bias in the file steers the routing and comes out again; a file without it means zero.
#[test]
fn expert_biases_are_read_and_written() {
    const NAME: &str = "layers.1.moe.expert_bias";
    let dir = tempfile::tempdir().unwrap();
    let plain = export(dir.path(), "plain.safetensors", "");
    let bytes = std::fs::read(&plain).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor(NAME).unwrap().shape(), [4]);
    assert!(tensors.tensor(NAME).unwrap().data().iter().all(|b| *b == 0), "biases start at zero");
    assert!(!tensors.names().contains(&"layers.0.moe.expert_bias"), "layer 0 has no experts");

    let view = |name: &str, data| {
        let t = tensors.tensor(name).unwrap();
        safetensors::tensor::TensorView::new(t.dtype(), t.shape().to_vec(), data).unwrap()
    };
    let bias: Vec<u8> = [-1.0f32, 5.0, 0.0, 0.25].iter().flat_map(|v| v.to_le_bytes()).collect();
    let with = |keep: &dyn Fn(&str) -> bool, name: &str| {
        let kept = tensors.names().into_iter().filter(|n| keep(n));
        let data = |n: &str| if n == NAME { bias.as_slice() } else { tensors.tensor(n).unwrap().data() };
        let all: Vec<_> = kept.map(|n| (n, view(n, data(n)))).collect();
        let path = dir.path().join(name);
        std::fs::write(&path, safetensors::serialize(all, None).unwrap()).unwrap();
        path
    };
    let biased = with(&|_| true, "biased.safetensors");
    let again = std::fs::read(export(dir.path(), "again.safetensors", &load(&biased))).unwrap();
    assert_eq!(SafeTensors::deserialize(&again).unwrap().tensor(NAME).unwrap().data(), bias);
    let line = &train(dir.path(), "biased", &load(&biased))[0];
    assert_eq!(line["tokens_per_expert"]["layers.1"], serde_json::json!([0, 64, 0, 0]), "all to expert 1");

    let without = with(&|n| n != NAME, "without.safetensors");
    assert_eq!(train(dir.path(), "without", &load(&without)), train(dir.path(), "plain", &load(&plain)));
    let again = std::fs::read(export(dir.path(), "zero.safetensors", &load(&without))).unwrap();
    assert!(again == bytes, "a missing bias is written as zeros");
}

//! Weight files: dtypes, layouts, refusals.

use std::collections::BTreeMap;
use std::path::Path;

use moe8::train::weights::{FileDtype, ParamSpec, exchange_last_two, load, load_all, save};
use safetensors::tensor::{Dtype, TensorView};

/// Writes a file with the safetensors crate, so that ours is not compared with itself.
fn write(path: &Path, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)], metadata: &[(&str, &str)]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let metadata = metadata.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    safetensors::serialize_to_file(views, Some(metadata), path).unwrap();
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

fn refusal(path: &Path, specs: &[ParamSpec]) -> String {
    let error = load(path, specs, &mut |name, _| panic!("{name} was handed out")).unwrap_err().to_string();
    assert!(error.contains("hint: "), "{error}");
    error
}

#[test]
fn every_float_dtype_is_widened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let values = [0.0f32, -1.5, 0.015625, 384.0, -0.0];
    let half: Vec<u8> = values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
    let bf16: Vec<u8> = values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
    let double: Vec<u8> = values.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect();
    let e4m3: Vec<u8> = values.iter().map(|&v| float8::F8E4M3::from_f32(v).to_bits()).collect();
    let e5m2: Vec<u8> = values.iter().map(|&v| float8::F8E5M2::from_f32(v).to_bits()).collect();
    for (dtype, bytes) in [
        (Dtype::F64, double),
        (Dtype::F32, f32s(&values)),
        (Dtype::F16, half),
        (Dtype::BF16, bf16),
        (Dtype::F8_E4M3, e4m3),
        (Dtype::F8_E5M2, e5m2),
    ] {
        write(&path, &[("norm.weight", dtype, vec![5], bytes)], &[]);
        let got = load_all(&path, &[ParamSpec::new("norm.weight", [5])]).unwrap();
        let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!((got[0].0.as_str(), bits(&got[0].1)), ("norm.weight", bits(&values)), "{dtype:?}");
    }
}

#[test]
fn tensors_larger_than_a_block_come_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let n = (1 << 18) + 13;
    write(&path, &[("a", Dtype::F32, vec![n], f32s(&ramp(n))), ("b", Dtype::F32, vec![0], vec![])], &[]);
    let got = load_all(&path, &[ParamSpec::new("b", [0]), ParamSpec::new("a", [n])]).unwrap();
    assert_eq!(got, [("b".into(), vec![]), ("a".into(), ramp(n))]);
}

#[test]
fn expert_layouts_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let w1 = "layers.1.moe.experts.w1";
    let shared = "layers.1.moe.shared_expert.w2";
    let router = "layers.1.moe.router.gate.weight";
    // (name, model's shape, file's shape, metadata, turned?)
    for (name, ours, file, layout, turned) in [
        (w1, [2, 3, 5], [2, 3, 5], None, Some(false)),
        (w1, [2, 3, 5], [2, 5, 3], None, Some(true)),
        (w1, [2, 3, 5], [2, 5, 3], Some("july2025"), Some(true)),
        (w1, [2, 3, 5], [2, 3, 5], Some("july2025"), None),
        (w1, [2, 3, 5], [2, 5, 3], Some("e_hidden_dim"), None),
        (w1, [2, 3, 3], [2, 3, 3], None, Some(false)),
        (w1, [2, 3, 3], [2, 3, 3], Some("e_hidden_dim"), Some(false)),
        (w1, [2, 3, 3], [2, 3, 3], Some("july2025"), Some(true)),
        (w1, [2, 3, 5], [3, 2, 5], None, None),
        (shared, [1, 7, 2], [1, 2, 7], None, Some(true)),
        (shared, [1, 7, 7], [1, 7, 7], Some("july2025"), Some(true)),
        (router, [2, 3, 5], [2, 5, 3], None, None),
        (router, [2, 3, 5], [2, 3, 5], Some("july2025"), Some(false)),
    ] {
        let x = ramp(ours.iter().product());
        let metadata: Vec<(&str, &str)> = layout.iter().map(|l| ("expert_layout", *l)).collect();
        write(&path, &[(name, Dtype::F32, file.to_vec(), f32s(&x))], &metadata);
        let specs = [ParamSpec::new(name, ours)];
        let case = format!("{name} {ours:?} {file:?} {layout:?}");
        match turned {
            Some(false) => assert_eq!(load_all(&path, &specs).unwrap()[0].1, x, "{case}"),
            Some(true) => {
                let got = load_all(&path, &specs).unwrap().remove(0).1;
                for (e, i, j) in (0..ours[0])
                    .flat_map(|e| (0..ours[1]).flat_map(move |i| (0..ours[2]).map(move |j| (e, i, j))))
                {
                    let (at, from) = ((e * ours[1] + i) * ours[2] + j, (e * ours[2] + j) * ours[1] + i);
                    assert_eq!(got[at], x[from], "{case} [{e},{i},{j}]");
                }
                assert_eq!(exchange_last_two(&got, ours), x, "{case}: back again");
            }
            None => {
                let error = refusal(&path, &specs);
                assert!(error.contains(&format!("misshapen {name}: model {ours:?}")), "{case}: {error}");
                assert!(error.contains(&format!("file {file:?}")), "{case}: {error}");
            }
        }
    }
    write(&path, &[(w1, Dtype::F32, vec![1, 1, 1], f32s(&[0.0]))], &[("expert_layout", "july")]);
    assert!(refusal(&path, &[ParamSpec::new(w1, [1, 1, 1])]).contains("expert_layout is \"july\""));
}

#[test]
fn missing_extra_and_unreadable_tensors_are_named_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let tensors = [
        ("norm.weight", Dtype::F32, vec![3], f32s(&ramp(3))),
        ("layers.0.extra", Dtype::F32, vec![2, 1], f32s(&ramp(2))),
        ("counts", Dtype::I32, vec![1], vec![0; 4]),
        ("freqs_cis", Dtype::F32, vec![1], f32s(&[1.0])),
        ("layers.1.moe.tokens_per_expert", Dtype::F32, vec![1], f32s(&[1.0])),
    ];
    write(&path, &tensors, &[]);
    let bias = ParamSpec::new("layers.1.moe.expert_bias", [4]).or_absent();
    let specs = [
        ParamSpec::new("norm.weight", [4]),
        ParamSpec::new("output.weight", [7, 4]),
        ParamSpec::new("counts", [1]),
        bias.clone(),
    ];
    let error = refusal(&path, &specs);
    for want in [
        "differences: 4",
        "missing output.weight: model [7, 4], file none",
        "misshapen norm.weight: model [4], file [3]",
        "extra layers.0.extra: model none, file [2, 1]",
        "counts is I32, which is no float dtype",
    ] {
        assert!(error.contains(want), "{want}: {error}");
    }
    write(&path, &[tensors[0].clone(), tensors[3].clone(), tensors[4].clone()], &[]);
    let got = load_all(&path, &[ParamSpec::new("norm.weight", [3]), bias]).unwrap();
    assert_eq!(got, [("norm.weight".into(), ramp(3))]);
}

#[test]
fn files_that_are_cut_or_foreign_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    write(&path, &[("a", Dtype::F32, vec![3], f32s(&ramp(3)))], &[]);
    let whole = std::fs::read(&path).unwrap();
    let specs = [ParamSpec::new("a", [3])];
    for n in 0..whole.len() {
        std::fs::write(&path, &whole[..n]).unwrap();
        let error = refusal(&path, &specs);
        assert!(
            error.contains("cut short") || (n < 8 && error.contains("bytes are no safetensors")),
            "{n}: {error}"
        );
    }
    for (bytes, want) in [
        ([&whole[..], b"x"].concat(), "too long"),
        (b"PK\x03\x04 and more".to_vec(), "a PyTorch archive"),
        (vec![255; 40], "no safetensors file"),
        ([&2u64.to_le_bytes()[..], b"[]"].concat(), "no safetensors header"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let error = refusal(&path, &specs);
        assert!(error.contains(want), "{error}");
    }
    assert!(refusal(dir.path(), &specs).contains("no file"));
    assert!(refusal(&dir.path().join("gone"), &specs).contains("No such file"));
}

#[test]
fn what_is_saved_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out/w.safetensors");
    // Square experts: only the metadata can tell their layout.
    let specs = [
        ParamSpec::new("layers.1.moe.experts.w1", [2, 3, 3]),
        ParamSpec::new("norm.weight", [5]),
        ParamSpec::new("empty", [0, 4]),
    ];
    let values = |s: &ParamSpec| ramp(s.numel()).iter().map(|v| v / 3.0 - 1.0).collect::<Vec<f32>>();
    let metadata = BTreeMap::from([("step".to_string(), "7".to_string())]);
    for dtype in [FileDtype::F32, FileDtype::BF16] {
        save(&path, &specs, dtype, &metadata, &mut |s| Ok(values(s))).unwrap();
        for (spec, (name, got)) in specs.iter().zip(load_all(&path, &specs).unwrap()) {
            let round = |v: f32| if dtype == FileDtype::F32 { v } else { half::bf16::from_f32(v).to_f32() };
            let want: Vec<f32> = values(spec).into_iter().map(round).collect();
            assert_eq!((&name, got), (&spec.name, want), "{dtype:?}");
        }
        // The safetensors crate must agree that this is its format.
        let bytes = std::fs::read(&path).unwrap();
        let (header_len, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header_len % 8, 0);
        let strings = header.metadata().clone().unwrap();
        assert_eq!((strings["step"].as_str(), strings["expert_layout"].as_str()), ("7", "e_hidden_dim"));
    }
}

#[test]
fn a_failing_save_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let specs = [ParamSpec::new("a", [3]), ParamSpec::new("b", [3])];
    save(&path, &specs, FileDtype::F32, &BTreeMap::new(), &mut |_| Ok(ramp(3))).unwrap();
    let old = std::fs::read(&path).unwrap();
    let result = save(&path, &specs, FileDtype::BF16, &BTreeMap::new(), &mut |s| match s.name.as_str() {
        "a" => Ok(ramp(3)),
        _ => Err(moe8::Error::gpu("device lost", "try again")),
    });
    assert!(result.unwrap_err().to_string().contains("device lost"));
    assert_eq!(std::fs::read(&path).unwrap(), old);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

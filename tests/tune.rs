//! What `moe8 tune` finds out and later runs do with it: faults are planted, marks left behind, files damaged.

use moe8::bench::gemm::Pass;
use moe8::bench::runner::Case;
use moe8::bench::step::Precision;
use moe8::check::{Trial, tune};
use moe8::gpu::{Decisions, DeviceChoice, GemmKernel, Gpu, Options};
use moe8::num::{DType, rng::Stream};
use moe8::ops::elementwise;
use moe8::ops::gemm::{self, GemmOptions};
use moe8::ops::gemm_choice::{Form, Product, Size, choice};
use moe8::tensor::Tensor;
use std::path::Path;

const SIZES: [usize; 3] = [128; 3];

fn open(options: Options) -> Gpu {
    Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
}

/// The adapter as a later run opens it, with the rules for real GPUs.
fn later(folder: &Path) -> Gpu {
    open(Options { cache: Some(folder.into()), treat_as_hardware: true, no_coop: true, ..Options::default() })
}

fn decisions(folder: &Path) -> Decisions {
    let gpu = open(Options::default());
    Decisions::load(folder, gpu.name(), gpu.driver())
}

/// Tries two kernels on small forward products in f32.
fn run(folder: &Path, spoil: &dyn Fn(&Trial, Case) -> Case) -> (Decisions, Vec<String>) {
    let kernels = [GemmKernel::Scalar, GemmKernel::Tiled];
    let trials = kernels.map(|kernel| Trial {
        kernel,
        precision: Precision::F32,
        pass: Pass::Forward,
        size: Size::Small,
    });
    let open = |kernel| {
        Gpu::open_with(&DeviceChoice::from_env(), Options { kernel: Some(kernel), ..Options::default() })
    };
    let (mut decisions, mut said) = (decisions(folder), Vec::new());
    tune(&trials, &open, &mut decisions, spoil, &mut |line| said.push(line.into())).expect("a tuned adapter");
    (decisions, said)
}

fn chosen(gpu: &Gpu) -> (GemmKernel, String) {
    choice(gpu, &Product { form: Form::Nt, operands: [DType::F32; 2], sizes: SIZES })
}

/// Doubles a kernel's results: all of them, or those of the larger case alone.
fn doubled(trial: &Trial, case: Case, in_groups: bool) -> Case {
    if trial.kernel != GemmKernel::Tiled || (case.groups == "ragged") != in_groups {
        return case;
    }
    let run = case.run;
    let twice = move |gpu: &Gpu| {
        let results = run(gpu)?;
        results.iter().try_for_each(|t| elementwise::scale_into(gpu, t, 2.0))?;
        Ok(results)
    };
    Case { run: Box::new(twice), ..case }
}

#[test]
fn a_wrong_kernel_is_rejected_and_stays_so() {
    for in_groups in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(chosen(&later(dir.path())).0, GemmKernel::Tiled, "the rule, before anything is known");
        let (found, said) = run(dir.path(), &|trial, case| doubled(trial, case, in_groups));
        let why = found.rejection("gemm nt f32", GemmKernel::Tiled).expect("the planted fault is seen");
        assert!(why.contains("wrong result") && why.contains("ragged") == in_groups, "{why}");
        assert!(said.iter().any(|line| line.starts_with("gemm nt f32 small: scalar (")), "{said:?}");
        let gpu = later(dir.path());
        assert_eq!(chosen(&gpu).0, GemmKernel::Scalar);
        let large = Product { form: Form::Nt, operands: [DType::F32; 2], sizes: [4096; 3] };
        let (kernel, why) = choice(&gpu, &large);
        assert!(kernel == GemmKernel::Scalar && why.contains("tiled: a wrong result"), "never again: {why}");
        let other = Product { form: Form::Nn, ..large };
        assert_eq!(choice(&gpu, &other).0, GemmKernel::Tiled, "another op is another kernel");
        let again = |trial: &Trial, case| {
            assert_ne!(trial.kernel, GemmKernel::Tiled, "tried again");
            case
        };
        assert!(run(dir.path(), &again).0.rejection("gemm nt f32", GemmKernel::Tiled).is_some());
        let wish =
            Options { cache: Some(dir.path().into()), kernel: Some(GemmKernel::Tiled), ..Options::default() };
        assert_eq!(chosen(&open(wish)), (GemmKernel::Tiled, "--kernel tiled".into()));
    }
}

#[test]
fn a_mark_left_behind_disables_the_kernel() {
    let dir = tempfile::tempdir().unwrap();
    decisions(dir.path()).begin("gemm nt f32", GemmKernel::Tiled).unwrap();
    let (kernel, why) = chosen(&later(dir.path()));
    assert!(kernel == GemmKernel::Scalar && why.contains("the program ended while it was tried"), "{why}");
    // Ctrl-C looks the same, so tuning tries it once more.
    let mut again = decisions(dir.path());
    assert!(again.may_try("gemm nt f32", GemmKernel::Tiled));
    again.begin("gemm nt f32", GemmKernel::Tiled).unwrap();
    assert!(!decisions(dir.path()).may_try("gemm nt f32", GemmKernel::Tiled));
    let mut survived = again;
    survived.end(None).unwrap();
    assert!(decisions(dir.path()).rejected().is_empty(), "it survived its second try");
    std::fs::remove_file(decisions(dir.path()).path()).unwrap();
    assert_eq!(chosen(&later(dir.path())), (GemmKernel::Tiled, "by capability; not coop: --no-coop".into()));
}

#[test]
fn the_fastest_is_used_until_its_file_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let (found, _) = run(dir.path(), &|_, case| case);
    let fastest = found.fastest("gemm nt f32 small").expect("a finding").clone();
    assert!(fastest.times >= 1.0 && found.rejected().is_empty(), "{fastest:?}");
    let gpu = open(Options { cache: Some(dir.path().into()), no_coop: true, ..Options::default() });
    let (kernel, why) = chosen(&gpu);
    assert_eq!(kernel.name(), fastest.kernel);
    let other = if kernel == GemmKernel::Scalar { "tiled" } else { "scalar" };
    assert_eq!(why, format!("tuned: {:.1}x faster than {other}", fastest.times));
    assert_eq!(chosen(&gpu.planner()).0, kernel, "a planner plans what will run");
    // The same choice with all checks on, and the same bits.
    let checked = open(Options { safe_shaders: true, ..gpu.options().clone() });
    assert_eq!(product(&checked), product(&gpu));
    assert_eq!(chosen(&checked).0, kernel);
    let path = found.path();
    std::fs::write(path, "{\"adapter\": 3").unwrap();
    assert_eq!(chosen(&later(dir.path())).0, GemmKernel::Tiled);
}

/// The bits of a product.
fn product(gpu: &Gpu) -> Vec<u32> {
    let [m, n, k] = SIZES;
    let make = |name: &str, rows: usize| {
        let stream = Stream::new(5, name);
        let values: Vec<f32> = (0..(rows * k) as u64).map(|i| stream.normal(i)).collect();
        Tensor::from_f32(gpu, name, &[rows, k], DType::F32, &values).unwrap()
    };
    let out = gemm::nt(gpu, &make("a", m), &make("w", n), DType::F32, GemmOptions::default()).unwrap();
    out.to_f32(gpu).unwrap().iter().map(|v| v.to_bits()).collect()
}

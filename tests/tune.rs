//! What `moe8 tune` finds out and later runs do with it: faults are planted, marks left behind, files damaged.

use moe8::bench::gemm::Pass;
use moe8::bench::runner::Case;
use moe8::bench::step::Precision;
use moe8::check::{AnyKernel, Subject, Trial, tune};
use moe8::gpu::{Decisions, DeviceChoice, GemmKernel, Gpu, Options, QuantizeKernel};
use moe8::num::{DType, rng::Stream};
use moe8::ops::attention_choice::Pass as Half;
use moe8::ops::choice::explain;
use moe8::ops::elementwise;
use moe8::ops::gemm::{self, GemmOptions};
use moe8::ops::gemm_choice::{Form, Product, Size};
use moe8::ops::quantize_choice::{Axes, Quantization};
use moe8::tensor::Tensor;
use moe8::{Error, Result};
use std::cell::RefCell;
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

const PRODUCT: Subject =
    Subject::Product { precision: Precision::F32, pass: Pass::Forward, size: Size::Small };
const SCALAR: AnyKernel = AnyKernel::Matrix(GemmKernel::Scalar);
const TILED: AnyKernel = AnyKernel::Matrix(GemmKernel::Tiled);

/// The adapter with one kernel, with the rules for real GPUs if that kernel is of quantizers.
fn with(kernel: AnyKernel) -> Result<Gpu> {
    let treat_as_hardware = matches!(kernel, AnyKernel::Quantizer(_));
    let options = Options { treat_as_hardware, ..Options::default() };
    Gpu::open_with(&DeviceChoice::from_env(), kernel.demanded(options))
}

/// Tries `kernels` on `subject`; the findings, and what was said.
fn try_on(
    folder: &Path,
    subject: Subject,
    kernels: &[AnyKernel],
    spoil: &dyn Fn(&Trial, Case) -> Case,
) -> (Decisions, Vec<String>) {
    let trials: Vec<_> = kernels.iter().map(|kernel| Trial { kernel: *kernel, subject }).collect();
    let (mut decisions, mut said) = (decisions(folder), Vec::new());
    let mut say = |p: moe8::check::Progress<'_>| said.extend(p.result.map(String::from));
    tune(&trials, &with, &mut decisions, spoil, &mut say).expect("a tuned adapter");
    (decisions, said)
}

/// Tries two kernels on small forward products in f32.
fn run(folder: &Path, spoil: &dyn Fn(&Trial, Case) -> Case) -> (Decisions, Vec<String>) {
    try_on(folder, PRODUCT, &[SCALAR, TILED], spoil)
}

fn chosen(gpu: &Gpu) -> (GemmKernel, String) {
    explain(gpu, &Product { form: Form::Nt, operands: [DType::F32; 2], sizes: SIZES, groups: None })
}

/// Doubles a kernel's results (a quantizer's de-scales): those of small ragged cases, or those of the timed case alone.
fn doubled(kernel: AnyKernel, trial: &Trial, case: Case, in_groups: bool) -> Case {
    if trial.kernel != kernel || (case.groups == "ragged") != in_groups {
        return case;
    }
    let (run, of_quantizer) = (case.run, matches!(kernel, AnyKernel::Quantizer(_)));
    let twice = move |gpu: &Gpu| {
        let results = run(gpu)?;
        if of_quantizer {
            let one = Tensor::flat(gpu, "ones", results[1].numel(), DType::F32)?;
            gpu.clear(one.memory().0);
            return Ok(vec![results[0].clone(), one]);
        }
        results
            .iter()
            .filter(|t| t.shape().len() > 1)
            .try_for_each(|t| elementwise::scale_into(gpu, t, 2.0))?;
        Ok(results)
    };
    Case { run: Box::new(twice), ..case }
}

#[test]
fn a_wrong_kernel_is_rejected_and_stays_so() {
    for in_groups in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(chosen(&later(dir.path())).0, GemmKernel::Tiled, "the rule, before anything is known");
        let (found, said) = run(dir.path(), &|trial, case| doubled(TILED, trial, case, in_groups));
        let why = found.rejection("gemm nt f32", "tiled").expect("the planted fault is seen");
        assert!(why.contains("wrong result") && why.contains("ragged") == in_groups, "{why}");
        assert!(said.iter().any(|line| line.starts_with("gemm nt f32 small: scalar (")), "{said:?}");
        let gpu = later(dir.path());
        assert_eq!(chosen(&gpu).0, GemmKernel::Scalar);
        let large = Product { form: Form::Nt, operands: [DType::F32; 2], sizes: [4096; 3], groups: None };
        let (kernel, why) = explain(&gpu, &large);
        assert!(kernel == GemmKernel::Scalar && why.contains("tiled: a wrong result"), "never again: {why}");
        let other = Product { form: Form::Nn, ..large };
        assert_eq!(explain(&gpu, &other).0, GemmKernel::Tiled, "another op is another kernel");
        let again = |trial: &Trial, case| {
            assert_ne!(trial.kernel, TILED, "tried again");
            case
        };
        assert!(run(dir.path(), &again).0.rejection("gemm nt f32", "tiled").is_some());
        let wish =
            Options { cache: Some(dir.path().into()), kernel: Some(GemmKernel::Tiled), ..Options::default() };
        assert_eq!(chosen(&open(wish)), (GemmKernel::Tiled, "--kernel tiled".into()));
    }
}

#[test]
fn a_mark_left_behind_disables_the_kernel() {
    let dir = tempfile::tempdir().unwrap();
    decisions(dir.path()).begin("gemm nt f32", "tiled").unwrap();
    let (kernel, why) = chosen(&later(dir.path()));
    assert!(kernel == GemmKernel::Scalar && why.contains("the program ended while it was tried"), "{why}");
    // Ctrl-C looks the same, so tuning tries it once more.
    let mut again = decisions(dir.path());
    assert!(again.may_try("gemm nt f32", "tiled"));
    again.begin("gemm nt f32", "tiled").unwrap();
    assert!(!decisions(dir.path()).may_try("gemm nt f32", "tiled"));
    let mut survived = again;
    survived.end(None).unwrap();
    assert!(decisions(dir.path()).rejected().is_empty(), "it survived its second try");
    std::fs::remove_file(decisions(dir.path()).path()).unwrap();
    assert_eq!(
        chosen(&later(dir.path())),
        (GemmKernel::Tiled, "by capability; not narrow: no size that is narrow; not coop: --no-coop".into())
    );
}

/// The cases of a kernel whose mark was left behind, tried again.
fn second_try(spoil: impl Fn(Case) -> Case) -> (Vec<String>, Decisions) {
    let dir = tempfile::tempdir().unwrap();
    decisions(dir.path()).begin("gemm nt f32", "tiled").unwrap();
    let tried = RefCell::new(Vec::new());
    let (_, said) = run(dir.path(), &|trial, case| {
        tried.borrow_mut().push(trial.kernel.name());
        if trial.kernel == TILED { spoil(case) } else { case }
    });
    assert!(tried.borrow().contains(&"tiled"), "it is tried once more: {said:?}");
    (said, decisions(dir.path()))
}

#[test]
fn a_second_try_decides() {
    let (said, found) = second_try(|case| case);
    assert!(found.rejected().is_empty() && found.fastest("gemm nt f32 small").is_some(), "{said:?}");
    // What could not be tried for want of memory is as it was: left out, and worth another try.
    let no_memory = |case: Case| Case {
        run: Box::new(|gpu: &Gpu| match gpu.is_planner() {
            true => Ok(Vec::new()),
            false => Err(Error::user("out of memory for tensor x", "a larger device")),
        }),
        ..case
    };
    let (said, found) = second_try(no_memory);
    assert!(said.iter().any(|line| line.contains("not measured: out of memory")), "{said:?}");
    let why = found.rejection("gemm nt f32", "tiled").expect("its mark stays");
    assert!(why.contains("the program ended while") && found.may_try("gemm nt f32", "tiled"), "{why}");
    assert_eq!(found.fastest("gemm nt f32 small").map(|f| f.kernel.as_str()), Some("scalar"));
    // A lost device is final.
    let lost = |case: Case| Case { run: Box::new(|_: &Gpu| Err(Error::gpu("device lost", ""))), ..case };
    let (_, found) = second_try(lost);
    assert!(!found.may_try("gemm nt f32", "tiled"));
    assert_eq!(found.rejection("gemm nt f32", "tiled"), Some("device lost"));
}

#[test]
fn an_interrupted_tuning_keeps_its_times() {
    let dir = tempfile::tempdir().unwrap();
    let interrupted = std::panic::catch_unwind(|| {
        run(dir.path(), &|trial, case| {
            assert!(trial.kernel != TILED, "the user's patience has an end");
            case
        })
    });
    assert!(interrupted.is_err());
    let kept = decisions(dir.path());
    assert_eq!(kept.timings()["gemm nt f32 small"].keys().collect::<Vec<_>>(), ["scalar"]);
    assert!(kept.fastest("gemm nt f32 small").is_none(), "one time alone says nothing");
    let (found, _) = run(dir.path(), &|trial, case| {
        assert_eq!(trial.kernel, TILED, "the other one was timed");
        case
    });
    assert!(found.fastest("gemm nt f32 small").is_some_and(|f| f.than.is_some()));
    assert!(decisions(dir.path()).timings().is_empty(), "the next tuning begins anew");
}

#[test]
fn attention_and_quantizers_are_tuned_too() {
    let wide = AnyKernel::Quantizer(QuantizeKernel::Wide);
    let simple = AnyKernel::Quantizer(QuantizeKernel::Simple);
    for in_groups in [true, false] {
        let rows = Subject::Quantization { axes: Axes::Rows, narrow: true };
        let attention = Subject::Attention { pass: Half::Backward, head_dim: 16 };
        for (subject, kernels, faulty, op, size) in [
            (rows, &[simple, wide][..], wide, "quantize rows", "narrow"),
            (attention, &[SCALAR][..], SCALAR, "attention backward bf16", "d16"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let (found, said) = try_on(dir.path(), subject, kernels, &|_, case| case);
            assert!(found.rejected().is_empty(), "{said:?}");
            assert!(found.fastest(&format!("{op} {size}")).is_some(), "{said:?}");
            let (found, said) =
                try_on(dir.path(), subject, kernels, &|trial, case| doubled(faulty, trial, case, in_groups));
            let why = found.rejection(op, faulty.name()).unwrap_or_else(|| panic!("unseen: {said:?}"));
            assert!(why.contains("wrong result") && why.contains("ragged") == in_groups, "{why}");
            let gpu = later(dir.path());
            let x = Tensor::empty(&gpu, "x", &[8, 256], DType::BF16).unwrap();
            let (kernel, _) = explain(&gpu, &Quantization::of(&gpu, &x, Axes::Rows));
            let want = if faulty == wide { QuantizeKernel::Simple } else { QuantizeKernel::Wide };
            assert_eq!(kernel, want);
        }
    }
}

#[test]
fn every_class_has_a_trial_of_every_kernel() {
    let all = Trial::all();
    for (class, kernels) in [
        ("gemm tn fp8 narrow", &["scalar", "tiled", "narrow", "coop"][..]),
        ("attention forward bf16 d128", &["scalar", "coop"]),
        ("attention backward bf16 d32", &["scalar", "coop"]),
        ("quantize both wide", &["simple", "wide"]),
    ] {
        let of: Vec<_> = all.iter().filter(|t| t.class() == class).map(|t| t.kernel.name()).collect();
        assert_eq!(of, kernels, "{class}");
    }
    assert!(all.iter().all(|t| t.class().starts_with(&t.op())));
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

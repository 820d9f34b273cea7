//! The table of `moe8 selftest` on the running adapter, with every matrix kernel that it can run, and how one is chosen.

use moe8::check;
use moe8::gpu::{DeviceChoice, GemmKernel, Gpu, Options};
use moe8::num::DType;
use moe8::ops::attention;
use moe8::ops::attention_choice::{Attention, Pass};
use moe8::ops::choice::choose;
use moe8::ops::gemm_choice::{Form, Product};

fn open(options: Options) -> Gpu {
    Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
}

fn attend(gpu: &Gpu, dtype: DType, seq: usize, head_dim: usize) -> GemmKernel {
    let shape = attention::Shape { batch: 1, seq, heads: 1, kv_heads: 1, head_dim, block: None };
    let [forward, backward] = Pass::ALL.map(|pass| choose(gpu, &Attention { pass, dtype, shape }));
    assert_eq!(forward, backward, "the rules are the same");
    forward
}

/// Runs the `count` products of the table that the kernel can compute.
fn agrees_with_the_reference(kernel: GemmKernel, count: usize) {
    let gpu = open(Options { kernel: Some(kernel), poison: true, ..Options::default() });
    let outcomes = check::gemm(&gpu).unwrap();
    assert_eq!(outcomes.len(), count);
    assert_eq!(
        gpu.launches().values().sum::<u64>(),
        gpu.counters().dispatches,
        "the word is that of the launches"
    );
    for outcome in outcomes {
        assert_eq!((outcome.kernel.as_str(), outcome.error), (kernel.name(), None), "{}", outcome.case);
    }
}

#[test]
fn register_tiles_agree_with_the_reference() {
    agrees_with_the_reference(GemmKernel::Scalar, 135);
}

#[test]
fn tiles_in_workgroup_memory_agree_with_the_reference() {
    agrees_with_the_reference(GemmKernel::Tiled, 135);
}

#[test]
fn narrow_products_agree_with_the_reference() {
    agrees_with_the_reference(GemmKernel::Narrow, 40);
}

#[test]
fn products_on_matrix_units_agree_with_the_reference() {
    if open(Options::default()).caps().coop.is_some() {
        agrees_with_the_reference(GemmKernel::Coop, 153);
    }
}

#[test]
fn attention_on_matrix_units_agrees_with_the_reference() {
    // The other kernel has its own table in ops_attn.rs.
    let Some(_) = open(Options::default()).caps().coop else { return };
    let gpu = open(Options { kernel: Some(GemmKernel::Coop), poison: true, ..Options::default() });
    for outcome in check::attention(&gpu).unwrap() {
        assert_eq!((outcome.kernel.as_str(), outcome.error), ("coop", None), "{}", outcome.case);
    }
}

#[test]
fn the_kernel_is_chosen_by_adapter_operands_and_wish() {
    let plain = open(Options::default());
    let no_coop = open(Options { no_coop: true, ..Options::default() });
    let hardware = open(Options { treat_as_hardware: true, ..Options::default() });
    let named = |kernel| open(Options { kernel: Some(kernel), ..Options::default() });
    let (scalar, tiled) = (named(GemmKernel::Scalar), named(GemmKernel::Tiled));
    let large = [4096; 3];
    let choice = |gpu: &Gpu, operand: DType, sizes| {
        choose(gpu, &Product { form: Form::Nt, operands: [operand; 2], sizes, groups: None })
    };
    let software = plain.caps().software;
    let without = if software { GemmKernel::Scalar } else { GemmKernel::Tiled };
    let with = if plain.caps().coop.is_some() { GemmKernel::Coop } else { without };
    assert_eq!(no_coop.caps().coop, None);
    for (gpu, fp8, f32) in [
        (&plain, with, without),
        (&no_coop, without, without),
        (&scalar, GemmKernel::Scalar, GemmKernel::Scalar),
        (&tiled, GemmKernel::Tiled, GemmKernel::Tiled),
        (&hardware, if software { GemmKernel::Tiled } else { with }, GemmKernel::Tiled),
    ] {
        assert_eq!([choice(gpu, DType::E4M3, large), choice(gpu, DType::F32, large)], [fp8, f32]);
    }
    let narrow = if software { GemmKernel::Scalar } else { GemmKernel::Narrow };
    for (gpu, kernel) in [(&plain, narrow), (&scalar, GemmKernel::Scalar), (&hardware, GemmKernel::Narrow)] {
        assert_eq!(choice(gpu, DType::E4M3, [4096, 8, 4096]), kernel);
    }
    for gpu in [&no_coop, &scalar, &tiled] {
        assert_eq!(attend(gpu, DType::BF16, 64, 64), GemmKernel::Scalar);
    }
    let want = if with == GemmKernel::Coop { with } else { GemmKernel::Scalar };
    assert_eq!(attend(&plain, DType::BF16, 64, 64), want);
    for (dtype, seq, head_dim) in [(DType::F32, 64, 64), (DType::BF16, 15, 64), (DType::BF16, 64, 20)] {
        assert_eq!(attend(&plain, dtype, seq, head_dim), GemmKernel::Scalar, "{dtype} {seq} {head_dim}");
    }
}

#[test]
fn matrix_units_that_are_not_there_cannot_be_demanded() {
    if open(Options::default()).caps().coop.is_some() {
        return;
    }
    let wish = Options { kernel: Some(GemmKernel::Coop), ..Options::default() };
    let error = Gpu::open_with(&DeviceChoice::from_env(), wish).expect_err("no matrix units").to_string();
    assert!(error.contains("no matrix units") && error.contains("--kernel"), "{error}");
    let error = GemmKernel::parse("fast").expect_err("no such kernel").to_string();
    assert!(error.contains("fast") && error.contains("scalar, tiled, narrow or coop"), "{error}");
}

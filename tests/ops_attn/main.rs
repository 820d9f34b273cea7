//! The ops of a block outside its GEMMs, on the running adapter against their references: norm, rotary embedding,
//! attention, gate. Every table runs on the code for software adapters and on the code for GPUs.

mod attention;
mod rows;

use moe8::gpu::{DeviceChoice, Gpu, Options};
use moe8::num::{DType, rng::Stream};
use moe8::tensor::Tensor;
use std::sync::OnceLock;

/// What activations can be.
pub const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

/// Without matrix units, whose attention rounds probabilities to f16: `moe8 selftest` has a table of its own for them.
fn open(options: Options) -> Gpu {
    Gpu::open_with(&DeviceChoice::from_env(), Options { no_coop: true, ..options }).expect("an adapter")
}

/// The two code paths, with memory poisoned: a kernel that reads what nobody wrote gives NaN.
pub fn gpus() -> &'static [Gpu; 2] {
    static GPUS: OnceLock<[Gpu; 2]> = OnceLock::new();
    GPUS.get_or_init(|| {
        [false, true]
            .map(|treat_as_hardware| open(Options { poison: true, treat_as_hardware, ..Options::default() }))
    })
}

/// Runs `case` on both code paths plain, poisoned and with the shaders' checks on: the bits must be the same.
pub fn same_bits_everywhere(case: impl Fn(&Gpu) -> Vec<Vec<f32>>) {
    static PLAIN: OnceLock<[[Gpu; 2]; 2]> = OnceLock::new();
    let plain = PLAIN.get_or_init(|| {
        [false, true].map(|treat_as_hardware| {
            [false, true]
                .map(|safe_shaders| open(Options { safe_shaders, treat_as_hardware, ..Options::default() }))
        })
    });
    let bits = |gpu: &Gpu| -> Vec<Vec<u32>> {
        case(gpu).iter().map(|t| t.iter().map(|v| v.to_bits()).collect()).collect()
    };
    for ([unchecked, safe], poisoned) in plain.iter().zip(gpus()) {
        let want = bits(poisoned);
        assert!(want.iter().flatten().all(|b| f32::from_bits(*b).is_finite()), "poison came through");
        assert!(want == bits(unchecked), "poisoned and plain memory differ");
        assert!(want == bits(safe), "checked and unchecked shaders differ");
    }
}

/// Normally distributed values that `dtype` represents exactly.
pub fn values(name: &str, n: usize, dtype: DType) -> Vec<f32> {
    let stream = Stream::new(7, name);
    let v: Vec<f32> = (0..n as u64).map(|i| stream.normal(i)).collect();
    if dtype == DType::BF16 { moe8::num::bf16::round_all(&v) } else { v }
}

/// An operand on the adapter.
pub fn tensor(gpu: &Gpu, shape: &[usize], dtype: DType, v: &[f32]) -> Tensor {
    Tensor::from_f32(gpu, "test operand", shape, dtype, v).unwrap()
}

/// A flat tensor's values.
pub fn flat(gpu: &Gpu, t: &Tensor) -> Vec<f32> {
    t.to_f32(gpu).unwrap()
}

/// The largest magnitude.
pub fn largest(v: &[f32]) -> f64 {
    v.iter().fold(0.0, |m: f64, v| m.max(f64::from(v.abs())))
}

/// Fails unless every element is within `tolerance` of the largest magnitude plus, in bf16, one rounding.
#[track_caller]
pub fn close(what: &str, got: &[f32], want: &[f32], dtype: DType, tolerance: f64) {
    close_to(what, got, want, dtype, tolerance * largest(want));
}

/// Fails unless every element is within `error` plus, in bf16, one rounding.
#[track_caller]
pub fn close_to(what: &str, got: &[f32], want: &[f32], dtype: DType, error: f64) {
    let bound = |w: &f32| match dtype {
        DType::BF16 => 0.51 * moe8::reference::compare::bf16_ulp(f64::from(*w)),
        _ => 0.0,
    };
    let bounds: Vec<f64> = want.iter().map(|w| bound(w) + error).collect();
    moe8::reference::compare::within(got, want, &bounds, &[want.len()])
        .unwrap_or_else(|e| panic!("{what} in {dtype}: {e}"));
}

//! The grouped GEMM's three forms on the running adapter against f64 sums, in ragged cases, on the paths of software
//! adapters and of GPUs, the latter with `tn` in parts.
//!
//! Tolerance: f32 sums of at most `rows` terms of size 1, `rows * 2^-22`, plus half a unit of the output's dtype.

mod common;

use moe8::gpu::{DeviceChoice, GemmKernel, Gpu, Options};
use moe8::num::{DType, bf16, rng::Stream};
use moe8::ops::gemm::{self, GemmOptions, Scale};
use moe8::reference::{compare, gemm as oracle};
use moe8::tensor::Tensor;

struct Case {
    ends: Vec<u32>,
    rows: usize,
    k: usize,
    n: usize,
}

fn cases() -> Vec<Case> {
    let case = |ends: &[u32], rows, k, n| Case { ends: ends.to_vec(), rows, k, n };
    vec![
        case(&[1], 1, 1, 1),
        case(&[7, 7, 20, 33], 33, 5, 9),
        case(&[0, 0, 65], 65, 64, 64),
        case(&[0, 0], 3, 17, 31),
        case(&[130, 130], 141, 33, 65),
        case(&[3, 600, 601], 640, 12, 40),
        case(&[0, 3, 500, 500], 530, 20, 36),
    ]
}

/// Values in [-1, 1], rounded to `dtype`.
fn values(name: &str, count: usize, dtype: DType) -> Vec<f32> {
    let stream = Stream::new(3, name);
    let v: Vec<f32> = (0..count).map(|i| 2.0 * stream.uniform(i as u64) - 1.0).collect();
    if dtype == DType::BF16 { bf16::round_all(&v) } else { v }
}

fn check(what: &str, got: &[f32], want: &[f32], shape: &[usize], terms: usize, out: DType) {
    let rounding = if out == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-23) };
    compare::close(got, want, shape, terms as f64 * 2f64.powi(-22) + 1e-7, rounding)
        .unwrap_or_else(|e| panic!("{what} {shape:?}: {e}"));
}

fn run(g: &Gpu, c: &Case, dtype: DType, out: DType) {
    let groups = c.ends.len();
    let (x, w, d) = (
        values("x", c.rows * c.k, dtype),
        values("w", groups * c.n * c.k, dtype),
        values("d", c.rows * c.n, dtype),
    );
    let tensor = |name, shape: &[usize], v: &[f32]| Tensor::from_f32(g, name, shape, dtype, v).unwrap();
    let a = tensor("a", &[c.rows, c.k], &x);
    let weight = tensor("w", &[groups, c.n, c.k], &w);
    let d_out = tensor("d", &[c.rows, c.n], &d);
    let offs = Tensor::from_u32(g, "offs", &c.ends).unwrap();
    let (by_row, by_col) = (values("rs", c.rows, DType::F32), values("cs", groups * c.n, DType::F32));
    let row = Tensor::from_flat_f32(g, "rs", &by_row).unwrap();
    let col = Tensor::from_flat_f32(g, "cs", &by_col).unwrap();
    let scales = Some((Scale::per_row(&row), Scale::per_group(&col, c.n)));
    let plain = GemmOptions { offs: Some(&offs), ..GemmOptions::default() };
    let scaled = GemmOptions { offs: Some(&offs), scales, kernel: None };
    let what = |form| format!("{form} {dtype} to {out}");
    let of = |t: Tensor| t.to_f32(g).unwrap();

    let factors = oracle::Scales { row: Some(&by_row), col: Some(&by_col) };
    let want = oracle::nt(&x, &w, &c.ends, c.n, c.k, factors);
    check(&what("nt"), &of(gemm::nt(g, &a, &weight, out, scaled).unwrap()), &want, &[c.rows, c.n], c.k, out);
    let want = oracle::nn(&d, &w, &c.ends, c.n, c.k, oracle::Scales::NONE);
    check(
        &what("nn"),
        &of(gemm::nn(g, &d_out, &weight, out, plain).unwrap()),
        &want,
        &[c.rows, c.k],
        c.n,
        out,
    );
    let want = oracle::tn(&d, &x, &c.ends, c.n, c.k, oracle::Scales::NONE);
    let shape = [groups, c.n, c.k];
    let d_w = gemm::tn(g, &d_out, &a, out, plain).unwrap();
    check(&what("tn"), &of(d_w.clone()), &want, &shape, c.rows, out);
    // Added to itself: twice the sum.
    gemm::tn_into(g, &d_out, &a, &d_w, true, plain).unwrap();
    let twice: Vec<f32> = want.iter().map(|v| 2.0 * v).collect();
    check(&what("tn, accumulated"), &of(d_w), &twice, &shape, 2 * c.rows, out);
}

fn all(options: Options, kinds: &[(DType, DType)]) {
    let g =
        Gpu::open_with(&DeviceChoice::from_env(), Options { poison: true, ..options }).expect("an adapter");
    for c in &cases() {
        for (dtype, out) in kinds {
            run(&g, c, *dtype, *out);
        }
    }
}

#[test]
fn software_path_equals_the_reference() {
    all(Options::default(), &[(DType::F32, DType::F32), (DType::BF16, DType::BF16)]);
}

#[test]
fn hardware_path_equals_the_reference() {
    let hardware =
        Options { treat_as_hardware: true, kernel: Some(GemmKernel::Scalar), ..Options::default() };
    all(hardware, &[(DType::F32, DType::F32), (DType::BF16, DType::F32)]);
}

#[test]
fn tiles_in_workgroup_memory_equal_the_reference() {
    let tiled = Options { kernel: Some(GemmKernel::Tiled), ..Options::default() };
    all(tiled, &[(DType::F32, DType::F32)]);
}

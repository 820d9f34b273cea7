//! The kernel's text with its matrices emulated, so that any adapter can run everything else in it: tiles, panels, decoding, the
//! order of slices, the way out. Minutes, so only when asked for: `cargo test --lib emulated -- --ignored`.
#![cfg(test)]

use super::MAIN;
use crate::gpu::{DeviceChoice, GemmKernel, Gpu, Kernel, MatrixUnits, Options};
use crate::num::rng::Stream;
use crate::num::{DType, Fp8, bf16};
use crate::ops::gemm::{self, GemmOptions, Scale};
use crate::ops::panels::{Codes, Contraction, Order};
use crate::ops::quantize;
use crate::reference::compare::{bf16_ulp, within};
use crate::reference::gemm::{self as reference, Scales};
use crate::tensor::Tensor;
use std::cell::Cell;
use std::sync::LazyLock;

thread_local! {
    static EMULATE: Cell<Option<MatrixUnits>> = const { Cell::new(None) };
}

/// Of EDGE x EDGE numbers a lane has those of column `lane % EDGE` and every 32 / EDGE th row, OWN of them: of each of 16 results,
/// and what it takes of the operands for them, in use and loaded ahead. Blocks of text become calls, and loops have a bound
/// that compilers do not see, so that they stay loops: `emu_one` is 1.
const MATRICES: &str = "
const OWN = EDGE * EDGE / 32u;
const APART = 32u / EDGE;
var<private> emu_lane: u32;
var<private> emu_turn: u32;
var<private> emu_one: u32;
var<private> emu_a: array<f32, 128u * OWN>;
var<private> emu_b: array<f32, 128>;
var<private> emu_c: array<f32, 16u * OWN>;

fn emu_half(h: H8, i: u32) -> f32 {
//!repeat y EDGE16
  return select(h.x, h.y, i >= 4u)[i % 4u];
//!end
//!repeat y EDGE8
  return select(vec4<f32>(h.x, h.x1, h.x2, h.x3), vec4<f32>(h.y, h.y1, h.y2, h.y3), i >= 4u)[i % 4u];
//!end
}
fn emu_load(fa: u32, fb: u32) {
  for (var i = 0u; i < emu_one * 64u * OWN; i++) {
    let row = i / (16u * OWN) * EDGE + i / 16u % OWN * APART + emu_lane / EDGE;
    let h = row * 24u + i % 16u;
    emu_a[(1u - emu_turn) * 64u * OWN + i] = emu_half(ta[fa + h / 8u], h % 8u);
  }
  for (var i = 0u; i < emu_one * 64u; i++) {
    let h = (i / 16u * EDGE + emu_lane % EDGE) * 24u + i % 16u;
    emu_b[(1u - emu_turn) * 64u + i] = emu_half(tb[fb + h / 8u], h % 8u);
  }
}
fn emu_next() {
  emu_turn = 1u - emu_turn;
}
fn emu_products(first: u32, end: u32) {
  for (var n = 0u; n < emu_one * 16u * OWN; n++) {
    let j = n / OWN % 4u;
    if j >= first && j < end {
      var sum = emu_c[n];
      for (var k = 0u; k < emu_one * 16u; k++) {
        let a = emu_turn * 64u * OWN + (n / (4u * OWN) * OWN + n % OWN) * 16u + k;
        sum += emu_a[a] * emu_b[emu_turn * 64u + j * 16u + k];
      }
      emu_c[n] = sum;
    }
  }
}
fn emu_store(fragment: u32, at: u32, stride: u32) {
  for (var s = 0u; s < emu_one * OWN; s++) {
    let n = emu_lane % EDGE;
    let x = emu_c[fragment * OWN + s];
    let to = at + (s * APART + emu_lane / EDGE) * (stride / QUAD) + n / 4u;
//!repeat y EDGE16
    te[to][n % 4u] = x;
//!end
//!repeat y EDGE8
    switch n % 4u {
      case 0u: { te[to].x = x; }
      case 1u: { te[to].y = x; }
      case 2u: { te[to].z = x; }
      default: { te[to].w = x; }
    }
//!end
  }
}
";

const REPLACEMENTS: [(&str, &str); 16] = [
    ("enable f16;\nenable wgpu_cooperative_matrix;\n", ""),
    (
        "alias FragmentA = coop_mat16x16<f16, A>;
alias FragmentB = coop_mat16x16<f16, B>;
alias FragmentC = coop_mat16x16<f32, C>;
",
        "",
    ),
    (
        "alias FragmentA = coop_mat8x8<f16, A>;
alias FragmentB = coop_mat8x8<f16, B>;
alias FragmentC = coop_mat8x8<f32, C>;
",
        "",
    ),
    (
        "//!repeat i 4\n//!repeat j 4\n  var c$i_$j = FragmentC();\n//!end\n//!end\n",
        "  for (var i = 0u; i < 16u * OWN; i++) {\n    emu_c[i] = 0.0;\n  }\n",
    ),
    (
        "//!repeat i 4
//!repeat k PIECES
  var fa$i_$k = FragmentA();
  var fb$i_$k = FragmentB();
//!end
//!end
",
        "",
    ),
    (
        "//!repeat i 4
//!repeat k PIECES
  fa$i_$k = coopLoadT<FragmentA>(&ta[fa + ($iu * STEP + $ku)].x, SLICE_STRIDE);
  fb$i_$k = coopLoad<FragmentB>(&tb[fb + ($iu * STEP + $ku)].x, SLICE_STRIDE);
//!end
//!end
",
        "emu_load(fa, fb);\nemu_next();\n",
    ),
    (
        "//!repeat i 4
//!repeat k PIECES
      let na$i_$k = coopLoadT<FragmentA>(&ta[fa + ($iu * STEP + $ku)].x, SLICE_STRIDE);
      let nb$i_$k = coopLoad<FragmentB>(&tb[fb + ($iu * STEP + $ku)].x, SLICE_STRIDE);
//!end
//!end
",
        "emu_load(fa, fb);\n",
    ),
    (
        "//!repeat j 3
//!repeat k PIECES
//!repeat i 4
      c$i_$j = coopMultiplyAdd(fa$i_$k, fb$j_$k, c$i_$j);
//!end
//!end
//!end
",
        "emu_products(0u, 3u);\n",
    ),
    (
        "//!repeat k PIECES
//!repeat i 4
      c$i_3 = coopMultiplyAdd(fa$i_$k, fb3_$k, c$i_3);
//!end
//!end
",
        "emu_products(3u, 4u);\n",
    ),
    (
        "//!repeat i 4
//!repeat k PIECES
      fa$i_$k = na$i_$k;
      fb$i_$k = nb$i_$k;
//!end
//!end
",
        "emu_next();\n",
    ),
    ("coopStoreT(c$i_$j, &te[te0], stride)", "emu_store($iu * 4u + $ju, te0, stride)"),
    ("coopStoreT(c$i_$h, &te[turn$h].x, stride)", "emu_store($iu * 4u + $hu, turn$h, stride)"),
    ("subgroupBarrier()", "workgroupBarrier()"),
    ("<f16>", "<f32>"),
    (": f16", ": f32"),
    (
        "  let lane = li % LANES;\n",
        "  let lane = li % LANES;\n  emu_lane = lane;\n  emu_one = 1u + (p.n >> 31u);\n",
    ),
];

static TEXT: LazyLock<String> = LazyLock::new(|| {
    let text = REPLACEMENTS.iter().fold(MAIN.text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "the kernel has no `{from}` to emulate");
        text.replace(from, to)
    });
    text + MATRICES
});

/// What stands in for the kernel, with subgroups of 32, where this thread asked for it.
pub(super) fn kernel() -> Option<Kernel> {
    units().map(|_| Kernel { name: "gemm_coop.emulated", text: TEXT.as_str(), entry: "main" })
}

/// The matrix units that this thread emulates.
pub(super) fn units() -> Option<MatrixUnits> {
    EMULATE.get()
}

/// Finite codes, row by row, and their values.
fn codes(gpu: &Gpu, name: &str, shape: &[usize], format: Fp8) -> (Tensor, Vec<f64>) {
    let dtype = if format == Fp8::E4m3 { DType::E4M3 } else { DType::E5M2 };
    let tensor = Tensor::empty(gpu, name, shape, dtype).unwrap();
    let (cols, padded, stream) = (tensor.cols(), 4 * tensor.quads(), Stream::new(0, name));
    let finite = |i: usize| {
        let code = (stream.word(i as u64) & 0xff) as u8;
        if format.decode(code).is_finite() { code } else { code & 0x83 }
    };
    let all: Vec<u8> = (0..shape.iter().product()).map(finite).collect();
    let mut bytes = vec![0; tensor.rows() * padded];
    for (from, to) in all.chunks(cols).zip(bytes.chunks_mut(padded)) {
        to[..cols].copy_from_slice(from);
    }
    gpu.upload(tensor.memory().0, tensor.memory().1, &bytes).unwrap();
    (tensor, all.iter().map(|c| f64::from(format.decode(*c))).collect())
}

fn factors(gpu: &Gpu, name: &str, len: usize) -> (Tensor, Vec<f32>) {
    let stream = Stream::new(1, name);
    let all: Vec<f32> = (0..len as u64).map(|i| 2f32.powi((stream.word(i) % 8) as i32 - 4)).collect();
    (Tensor::from_flat_f32(gpu, name, &all).unwrap(), all)
}

/// Compares a result with sums of `terms` products whose magnitudes are `sizes`.
fn check(gpu: &Gpu, what: &str, got: &Tensor, want: &[f64], sizes: &[f64], terms: usize) {
    let rounding = |v: f64| if got.dtype() == DType::BF16 { bf16_ulp(v) } else { v.abs() * 2f64.powi(-23) };
    let bound: Vec<f64> = want
        .iter()
        .zip(sizes)
        .map(|(w, s)| (terms + 2) as f64 * 2f64.powi(-23) * s + rounding(*w) * 0.500_001)
        .collect();
    let values: Vec<f64> = got.to_f32(gpu).unwrap().iter().map(|v| f64::from(*v)).collect();
    within(&values, want, &bound, got.shape()).unwrap_or_else(|e| panic!("{what}: {e}"));
}

/// All three forms over ragged groups, an empty one among them, with rows past the last end, and every kind of operand; tiles,
/// blocks and quads that are not full; onto a sum. All are short products: the loop of long ones runs on matrix units alone.
fn run_table(units: MatrixUnits) {
    EMULATE.set(Some(units));
    let options = Options { poison: true, ..Options::default() };
    let gpu = Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter");
    let (m, n, k) = (210, 133, 70);
    let ends = [3, 3, 150, 200];
    let e = ends.len();
    let offs = Tensor::from_u32(&gpu, "ends", &ends).unwrap();
    let size = |v: &[f64]| v.iter().map(|x| x.abs()).collect::<Vec<_>>();
    let in_panels = |t: Tensor, along: Contraction<'_>| Codes::Rows(t).to_panels(&gpu, along).unwrap();
    let (columns, rows) = (Contraction::Columns, Contraction::GroupRows(Some(&offs)));
    let (x, x_values) = codes(&gpu, "x", &[m, k], Fp8::E4m3);
    let (w, w_values) = codes(&gpu, "w", &[e, n, k], Fp8::E4m3);
    let (d, d_values) = codes(&gpu, "d", &[m, n], Fp8::E5m2);
    let (by_m, m_factors) = factors(&gpu, "m", m);
    let (by_n, n_factors) = factors(&gpu, "n", e * n);
    let (by_k, k_factors) = factors(&gpu, "k", e * k);
    let on_matrices = GemmOptions { kernel: Some(GemmKernel::Coop), ..GemmOptions::default() };
    let scaled = |row, col| GemmOptions { offs: Some(&offs), scales: Some((row, col)), ..on_matrices };

    let (a, b) = (in_panels(x.clone(), columns), in_panels(w.clone(), columns));
    let options = scaled(Scale::per_row(&by_m), Scale::per_group(&by_n, n));
    let scales = Scales { row: Some(&m_factors), col: Some(&n_factors) };
    let want = reference::nt(&x_values, &w_values, &ends, n, k, scales);
    let sizes = reference::nt(&size(&x_values), &size(&w_values), &ends, n, k, scales);
    check(&gpu, "nt", &gemm::nt_of(&gpu, &a, &b, DType::BF16, options).unwrap(), &want, &sizes, k);

    let (a, b) = (in_panels(d.clone(), columns), in_panels(w, Contraction::WeightRows));
    let options = scaled(Scale::per_row(&by_m), Scale::per_group(&by_k, k));
    let scales = Scales { row: Some(&m_factors), col: Some(&k_factors) };
    let mut want = reference::nn(&d_values, &w_values, &ends, n, k, scales);
    let mut sizes = reference::nn(&size(&d_values), &size(&w_values), &ends, n, k, scales);
    want.iter_mut().chain(&mut sizes).for_each(|v| *v += 1.0);
    let sum = Tensor::from_f32(&gpu, "sum", &[m, k], DType::F32, &vec![1.0; m * k]).unwrap();
    gemm::nn_codes_into(&gpu, &a, &b, &sum, true, options).unwrap();
    check(&gpu, "nn", &sum, &want, &sizes, n);

    let (a, b) = (in_panels(d, rows), in_panels(x, rows));
    let options = scaled(Scale::per_group(&by_n, n), Scale::per_group(&by_k, k));
    let scales = Scales { row: Some(&n_factors), col: Some(&k_factors) };
    let want = reference::tn(&d_values, &x_values, &ends, n, k, scales);
    let sizes = reference::tn(&size(&d_values), &size(&x_values), &ends, n, k, scales);
    check(&gpu, "tn", &gemm::tn_of(&gpu, &a, &b, DType::F32, options).unwrap(), &want, &sizes, m);

    stacks(&gpu, [m, n, k], &ends, &offs);

    let stream = Stream::new(2, "halves");
    let values = |len: usize| (0..len as u64).map(|i| bf16::round(stream.normal(i))).collect::<Vec<_>>();
    let (x_values, w_values) = (values(m * k), values(n * k));
    let x = Tensor::from_f32(&gpu, "x", &[m, k], DType::BF16, &x_values).unwrap();
    let w = Tensor::from_f32(&gpu, "w", &[n, k], DType::BF16, &w_values).unwrap();
    let [a, b] = [&x, &w].map(|t| quantize::along_rows(&gpu, t, DType::F16, Order::Panels).unwrap());
    let scales = Some((Scale::per_row(&a.descale), Scale::per_group(&b.descale, n)));
    let out =
        gemm::nt_of(&gpu, &a.codes, &b.codes, DType::BF16, GemmOptions { scales, ..on_matrices }).unwrap();
    let wide = |v: &[f32]| v.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let (x_values, w_values) = (wide(&x_values), wide(&w_values));
    let want = reference::nt(&x_values, &w_values, &[m as u32], n, k, Scales::NONE);
    let sizes = reference::nt(&size(&x_values), &size(&w_values), &[m as u32], n, k, Scales::NONE);
    check(&gpu, "nt of halves", &out, &want, &sizes, k);
}

/// Two results of each: forward in groups, and weights' gradients without, in parts and whole. And input gradients of two, added up.
fn stacks(gpu: &Gpu, [m, n, k]: [usize; 3], ends: &[u32], offs: &Tensor) {
    let e = ends.len();
    let (x, x_values) = codes(gpu, "x", &[m, k], Fp8::E4m3);
    let (w, w_values) = codes(gpu, "ws", &[2 * e, n, k], Fp8::E4m3);
    let (by_m, m_factors) = factors(gpu, "m", m);
    let (by_n, n_factors) = factors(gpu, "n", 2 * e * n);
    let scales = Some((Scale::per_row(&by_m), Scale::per_group(&by_n, n)));
    let options = GemmOptions { offs: Some(offs), scales, kernel: Some(GemmKernel::Coop) };
    let out = gemm::nt_stacked(gpu, &Codes::Rows(x), &Codes::Rows(w), 2, DType::BF16, options).unwrap();
    let [want, sizes] = [false, true].map(|size| {
        let of = |v: &[f64]| v.iter().map(|x| if size { x.abs() } else { *x }).collect::<Vec<_>>();
        let x = of(&x_values);
        let each = w_values.chunks(e * n * k).zip(n_factors.chunks(e * n)).map(|(w, col)| {
            reference::nt(&x, &of(w), ends, n, k, Scales { row: Some(&m_factors), col: Some(col) })
        });
        each.flatten().collect::<Vec<_>>()
    });
    check(gpu, "nt of a stack", &out, &want, &sizes, k);
    for rows in [m, 100] {
        weight_gradients(gpu, [rows, n, k]);
    }
    input_gradients(gpu, [m, n, k], ends, offs);
}

fn input_gradients(gpu: &Gpu, [m, n, k]: [usize; 3], ends: &[u32], offs: &Tensor) {
    let e = ends.len();
    let (d, d_values) = codes(gpu, "d2", &[2, m, n], Fp8::E4m3);
    let (w, w_values) = codes(gpu, "w2", &[2 * e, n, k], Fp8::E4m3);
    let (by_m, m_factors) = factors(gpu, "m", 2 * m);
    let (by_k, k_factors) = factors(gpu, "k", 2 * e * k);
    let scales = Some((Scale::per_row(&by_m), Scale::per_group(&by_k, k)));
    let options = GemmOptions { offs: Some(offs), scales, kernel: Some(GemmKernel::Coop) };
    let sum = Tensor::empty(gpu, "sum", &[m, k], DType::F32).unwrap();
    gemm::nn_summed(gpu, &Codes::Rows(d), &Codes::Rows(w), &sum, false, options).unwrap();
    let [want, sizes] = [false, true].map(|size| {
        let of = |v: &[f64]| v.iter().map(|x| if size { x.abs() } else { *x }).collect::<Vec<_>>();
        let product = |p: usize| {
            let part = |p: usize, len: usize| p * len / 2..(p + 1) * len / 2;
            let row = Some(&m_factors[part(p, 2 * m)]);
            let scales = Scales { row, col: Some(&k_factors[part(p, 2 * e * k)]) };
            let (d, w) = (&d_values[part(p, d_values.len())], &w_values[part(p, w_values.len())]);
            reference::nn(&of(d), &of(w), ends, n, k, scales)
        };
        product(0).iter().zip(product(1)).map(|(a, b)| a + b).collect::<Vec<_>>()
    });
    check(gpu, "nn, added up", &sum, &want, &sizes, 2 * n);
}

fn weight_gradients(gpu: &Gpu, [m, n, k]: [usize; 3]) {
    let (x, x_values) = codes(gpu, "x", &[m, k], Fp8::E4m3);
    let (d, d_values) = codes(gpu, "ds", &[2, m, n], Fp8::E5m2);
    let (by_n, n_factors) = factors(gpu, "n", 2 * n);
    let (by_k, k_factors) = factors(gpu, "k", k);
    let scales = Some((Scale::per_group(&by_n, n), Scale::per_group(&by_k, k)));
    let options = GemmOptions { offs: None, scales, kernel: Some(GemmKernel::Coop) };
    let out = Tensor::empty(gpu, "out", &[2, n, k], DType::F32).unwrap();
    gemm::tn_stacked(gpu, &Codes::Rows(d), &Codes::Rows(x), &out, options).unwrap();
    let [want, sizes] = [false, true].map(|size| {
        let of = |v: &[f64]| v.iter().map(|x| if size { x.abs() } else { *x }).collect::<Vec<_>>();
        let x = of(&x_values);
        let each = d_values.chunks(m * n).zip(n_factors.chunks(n)).map(|(d, row)| {
            let scales = Scales { row: Some(row), col: Some(&k_factors) };
            reference::tn(&of(d), &x, &[m as u32], n, k, scales)
        });
        each.flatten().collect::<Vec<_>>()
    });
    check(gpu, &format!("tn of a stack, {m} rows"), &out, &want, &sizes, m);
}

#[test]
#[ignore = "a software adapter takes minutes to compile the kernel: its barriers are many"]
fn emulated_matrices_of_16_equal_the_reference() {
    run_table(MatrixUnits::Coop16);
}

#[test]
#[ignore = "as above"]
fn emulated_matrices_of_8_equal_the_reference() {
    run_table(MatrixUnits::Coop8);
}

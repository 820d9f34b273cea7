//! The quantizer on the running adapter: every code and every de-scale, bit for bit, against torchao's output and the
//! reference, also with memory full of NaN and with every shader check on.

mod common;

use common::{Fixture, fixture_bytes};
use moe8::gpu::{DeviceChoice, Gpu, Options};
use moe8::num::rng::Stream;
use moe8::num::{DType, Fp8, bf16};
use moe8::ops::gemm::{self, GemmOptions};
use moe8::ops::quantize::{self, Quantized};
use moe8::reference::compare::{first_mismatch, same_bits};
use moe8::reference::quantize as reference;
use moe8::tensor::Tensor;
use std::sync::OnceLock;

fn open(options: Options) -> Gpu {
    Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
}

fn gpu() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(|| open(Options::default()))
}

fn upload(g: &Gpu, shape: &[usize], dtype: DType, values: &[f32]) -> Tensor {
    Tensor::from_f32(g, "x", shape, dtype, values).unwrap()
}

/// Codes and de-scales equal bit for bit; where the reference has the de-scale infinity, the op has NaN.
fn check(what: &str, g: &Gpu, got: &Quantized, want: &reference::Quantized) {
    let shape = got.codes.shape();
    first_mismatch(&got.codes.to_codes(g).unwrap(), &want.codes, shape)
        .unwrap_or_else(|e| panic!("{what} {shape:?} codes: {e}"));
    let factors: Vec<f32> =
        want.inverse().iter().map(|&r| if r.is_infinite() { f32::NAN } else { r }).collect();
    same_bits(&got.descale.to_f32(g).unwrap(), &factors, &[factors.len()])
        .unwrap_or_else(|e| panic!("{what} {shape:?} de-scales: {e}"));
    check_padding(what, g, &got.codes);
}

/// The elements past the width are zero in every row.
fn check_padding(what: &str, g: &Gpu, codes: &Tensor) {
    let (memory, at) = codes.memory();
    let bytes = g.download(memory, at, codes.bytes()).unwrap();
    for (row, bytes) in bytes.chunks(4 * codes.quads()).enumerate() {
        assert!(bytes[codes.cols()..].iter().all(|&c| c == 0), "{what}: padding of row {row}: {bytes:x?}");
    }
}

#[test]
fn torchao_codes_and_scales() {
    let g = gpu();
    let file = Fixture::read("quantize.safetensors");
    let axes: serde_json::Value = serde_json::from_slice(&fixture_bytes("quantize.json")).unwrap();
    for (name, case) in axes.as_object().unwrap() {
        let (x, shape) = file.floats(&format!("{name}.x"));
        let (scale, _) = file.floats(&format!("{name}.scale"));
        let codes = file.bytes(&format!("{name}.codes"));
        let want = reference::Quantized { codes, scale, format: Fp8::E4m3 };
        let dtypes = if name.ends_with("f32") { vec![DType::F32] } else { vec![DType::BF16, DType::F32] };
        for dtype in dtypes {
            let x = upload(g, &shape, dtype, &x);
            let got = match case["axis"].as_i64().unwrap() {
                -1 => quantize::rowwise(g, &x).unwrap(),
                _ => quantize::colwise(g, &x, None).unwrap(),
            };
            check(name, g, &got, &want);
        }
    }
}

/// Scales against the reference, since torchao's kernel overwrote some (see tests/numbers.rs).
#[test]
fn torchao_codes_of_ragged_groups() {
    let g = gpu();
    let file = Fixture::read("jagged_colwise.safetensors");
    for name in ["aligned", "ragged", "one_big"] {
        let (x, shape) = file.floats(&format!("{name}.x"));
        let ends = file.words(&format!("{name}.offs"));
        let mut want = reference::colwise(&x, shape[0], shape[1], &ends, Fp8::E4m3);
        want.codes = file.bytes(&format!("{name}.codes"));
        let offs = Tensor::from_u32(g, "offs", &ends).unwrap();
        let x = upload(g, &shape, DType::BF16, &x);
        check(name, g, &quantize::colwise(g, &x, Some(&offs)).unwrap(), &want);
    }
}

#[test]
fn every_code_decodes() {
    let g = gpu();
    let one = Tensor::empty(g, "one", &[1, 1], DType::E4M3).unwrap();
    let set = |t: &Tensor, codes: &[u8]| {
        let padded: Vec<u8> = codes.iter().flat_map(|&c| [c, 0, 0, 0]).collect();
        g.upload(t.memory().0, t.memory().1, &padded).unwrap();
    };
    set(&one, &[Fp8::E4m3.encode(1.0)]);
    let all: Vec<u8> = (0..=u8::MAX).collect();
    for (dtype, format) in [(DType::E4M3, Fp8::E4m3), (DType::E5M2, Fp8::E5m2)] {
        let codes = Tensor::empty(g, "codes", &[256, 1], dtype).unwrap();
        set(&codes, &all);
        let got = gemm::nt(g, &codes, &one, DType::F32, GemmOptions::default()).unwrap();
        // Sums start at +0, so that -0 comes out as +0.
        let want: Vec<f32> = all.iter().map(|&c| format.decode(c) + 0.0).collect();
        same_bits(&got.to_f32(g).unwrap(), &want, &[256]).unwrap_or_else(|e| panic!("{format:?}: {e}"));
    }
}

fn every_bf16() -> Vec<f32> {
    (0..=u16::MAX).map(bf16::from_bits).collect()
}

/// As rows of one element each: every scale of the rule, NaN and infinity among them.
#[test]
fn every_bf16_has_its_scale() {
    let g = gpu();
    let x = every_bf16();
    let want = reference::rowwise(&x, x.len(), 1, Fp8::E4m3);
    let t = upload(g, &[x.len(), 1], DType::BF16, &x);
    check("rows", g, &quantize::rowwise(g, &t).unwrap(), &want);
    let t = upload(g, &[1, x.len()], DType::BF16, &x);
    let want = reference::colwise(&x, 1, x.len(), &[1], Fp8::E4m3);
    check("columns", g, &quantize::colwise(g, &t, None).unwrap(), &want);
}

/// All bf16 values up to some largest magnitudes, which set the scale.
#[test]
fn every_bf16_encodes_at_several_scales() {
    let g = gpu();
    for top in [f32::MAX, 3e20, 448.0, 3.0, 1.75, 0.7, 6e-5, 1e-12, 2e-38, 1e-40] {
        let mut x = every_bf16();
        x.retain(|v| v.abs() <= top);
        let t = upload(g, &[x.len()], DType::BF16, &x);
        let want = |format, pow2| reference::tensorwise(&x, format, pow2);
        check("pow2", g, &quantize::tensorwise_pow2(g, &t).unwrap(), &want(Fp8::E4m3, true));
        for (dtype, format) in [(DType::E4M3, Fp8::E4m3), (DType::E5M2, Fp8::E5m2)] {
            let got = quantize::tensorwise(g, &t, dtype).unwrap();
            check(&format!("{format:?} {top:e}"), g, &got, &want(format, false));
        }
    }
}

/// The long division against f64, at the edges and at random mantissas and exponents.
#[test]
fn tensor_scales_are_correctly_rounded() {
    let g = gpu();
    let eps = 1e-12f32;
    let mut tops = vec![0.0, 1e-45, f32::MIN_POSITIVE, eps.next_down(), eps, eps.next_up(), 1.75];
    tops.extend([1.0, 1f32.next_up(), 1.75f32.next_down(), 1.75f32.next_up(), 2f32.next_down(), f32::MAX]);
    let stream = Stream::new(5, "tops");
    tops.extend((0..400).map(|i| f32::from_bits(stream.word(i) % 0x7F80_0000)));
    for top in tops {
        for (dtype, format) in [(DType::E4M3, Fp8::E4m3), (DType::E5M2, Fp8::E5m2)] {
            let x = [top / 3.0, -top];
            let got = quantize::tensorwise(g, &upload(g, &[1, 2], DType::F32, &x), dtype).unwrap();
            check(&format!("{format:?} {top:e}"), g, &got, &reference::tensorwise(&x, format, false));
        }
    }
}

/// Normal values over many binades, a row and a column of zeros, and, if `bad`, some that are not finite.
fn values(rows: usize, cols: usize, bad: bool) -> Vec<f32> {
    let stream = Stream::new(1, "values");
    let mut x: Vec<f32> = (0..(rows * cols) as u64)
        .map(|i| bf16::round(stream.normal(i) * 2f32.powi(stream.word(1 << 20 | i) as i32 % 30)))
        .collect();
    for (i, v) in x.iter_mut().enumerate() {
        if i / cols == 3 || i % cols == 5 {
            *v = if i % 2 == 0 { 0.0 } else { -0.0 };
        }
    }
    if bad {
        let n = x.len();
        let spoil = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN];
        for (i, v) in spoil.into_iter().enumerate() {
            x[(n - 1) * (i + 1) / 4] = v;
        }
    }
    x
}

/// rows, columns, group ends: primes, 1, one past the rows and columns of a workgroup, groups that are
/// empty; 2 to 275 quads a row, for every number of lanes that share one.
const TABLE: [(usize, usize, &[u32]); 9] = [
    (1, 1, &[1]),
    (7, 13, &[0, 7, 7]),
    (17, 100, &[1, 1, 17]),
    (64, 4, &[64]),
    (66, 33, &[65, 65, 66]),
    (131, 31, &[64, 129]),
    (150, 139, &[0, 64, 64, 129, 134]),
    (16, 3, &[0, 0, 0]),
    (5, 1100, &[2, 5]),
];

fn ragged(g: &Gpu) {
    for (i, (rows, cols, ends)) in TABLE.into_iter().enumerate() {
        for (dtype, bad) in [(DType::F32, i % 2 == 0), (DType::BF16, i % 2 == 1)] {
            let x = values(rows, cols, bad);
            let t = upload(g, &[rows, cols], dtype, &x);
            let offs = Tensor::from_u32(g, "offs", ends).unwrap();
            let what = format!("{dtype} {ends:?}");
            check_axes(&what, g, &t, &x, Some((&offs, ends)));
            let want = reference::colwise(&x, rows, cols, &[rows as u32], Fp8::E4m3);
            check(&what, g, &quantize::colwise(g, &t, None).unwrap(), &want);
            let want = reference::tensorwise(&x, Fp8::E4m3, false);
            check(&what, g, &quantize::tensorwise(g, &t, DType::E4M3).unwrap(), &want);
            let want = reference::tensorwise(&x, Fp8::E4m3, true);
            check(&what, g, &quantize::tensorwise_pow2(g, &t).unwrap(), &want);
        }
    }
    for (e, n, k) in [(1, 1, 1), (3, 5, 3), (2, 65, 9), (5, 64, 36)] {
        let w = values(e * n, k, e == 3);
        let t = upload(g, &[e, n, k], DType::BF16, &w);
        check(
            "weight",
            g,
            &quantize::rowwise(g, &t).unwrap(),
            &reference::weight_along_k(&w, e, n, k, Fp8::E4m3),
        );
        let want = reference::weight_along_n(&w, e, n, k, Fp8::E4m3);
        check("weight", g, &quantize::weight_colwise(g, &t).unwrap(), &want);
        let (by_row, by_column) = quantize::weight_both(g, &t).unwrap();
        check("weight, both", g, &by_row, &reference::weight_along_k(&w, e, n, k, Fp8::E4m3));
        check("weight, both", g, &by_column, &want);
    }
}

/// Rows, columns of groups, and both at once.
fn check_axes(what: &str, g: &Gpu, t: &Tensor, x: &[f32], groups: Option<(&Tensor, &[u32])>) {
    let (rows, cols) = (t.rows(), t.cols());
    let all = [rows as u32];
    let (offs, ends) = groups.map_or((None, &all[..]), |(offs, ends)| (Some(offs), ends));
    let by_row = reference::rowwise(x, rows, cols, Fp8::E4m3);
    let by_column = reference::colwise(x, rows, cols, ends, Fp8::E4m3);
    check(what, g, &quantize::rowwise(g, t).unwrap(), &by_row);
    check(what, g, &quantize::colwise(g, t, offs).unwrap(), &by_column);
    let both = quantize::both(g, t, offs).unwrap();
    check(&format!("{what}, both"), g, &both.0, &by_row);
    check(&format!("{what}, both"), g, &both.1, &by_column);
}

#[test]
fn ragged_cases_match_the_reference() {
    ragged(gpu());
}

#[test]
fn no_kernel_reads_what_it_did_not_write() {
    ragged(&open(Options { poison: true, ..Options::default() }));
}

/// The code for real GPUs: whole workgroups on a row, and other chunks.
#[test]
fn hardware_code_matches_the_reference() {
    let hardware = || Options { treat_as_hardware: true, ..Options::default() };
    ragged(&open(hardware()));
    wide(&open(Options { poison: true, ..hardware() }));
}

/// Rows of whole units of eight columns: 8 and 64 lanes a row, past the registers, several blocks of columns, several
/// chunks a group. Few shapes, since each has kernels of its own to compile.
fn wide(g: &Gpu) {
    let table: [(usize, usize, &[u32]); 3] =
        [(200, 136, &[3, 150, 150]), (9, 1029, &[0, 0, 0]), (5, 5128, &[2, 5])];
    for (i, (rows, cols, ends)) in table.into_iter().enumerate() {
        let x = values(rows, cols, i % 2 == 0);
        let t = upload(g, &[rows, cols], DType::BF16, &x);
        let offs = Tensor::from_u32(g, "offs", ends).unwrap();
        check_axes(&format!("{rows}x{cols} {ends:?}"), g, &t, &x, Some((&offs, ends)));
    }
    // One group of more rows than a strip takes at once: tops and casts apart.
    let x = values(1025, 8, true);
    check_axes("1025x8", g, &upload(g, &[1025, 8], DType::BF16, &x), &x, None);
    let (e, n, k) = (3, 70, 136);
    let w = values(e * n, k, true);
    let t = upload(g, &[e, n, k], DType::BF16, &w);
    let (by_row, by_column) = quantize::weight_both(g, &t).unwrap();
    check("wide weight", g, &by_row, &reference::weight_along_k(&w, e, n, k, Fp8::E4m3));
    check("wide weight", g, &by_column, &reference::weight_along_n(&w, e, n, k, Fp8::E4m3));
}

/// Every bf16 up to the largest magnitude of its row, which sets the scale, by all ways to a code.
#[test]
fn hardware_encodes_every_bf16_at_several_scales() {
    let g = open(Options { treat_as_hardware: true, ..Options::default() });
    for top in [f32::MAX, 3e20, 448.0, 3.0, 1.75, 0.7, 6e-5, 1e-12, 2e-38, 1e-40] {
        let mut x = every_bf16();
        x.retain(|v| v.abs() <= top);
        let (rows, cols) = (x.len().div_ceil(136), 136);
        x.resize(rows * cols, 0.0);
        for row in x.chunks_mut(cols) {
            row[7] = bf16::round(top);
        }
        check_axes(&format!("{top:e}"), &g, &upload(&g, &[rows, cols], DType::BF16, &x), &x, None);
        // Columns, each with the largest magnitude.
        x[..cols].fill(bf16::round(top));
        check_axes(&format!("{top:e}"), &g, &upload(&g, &[rows, cols], DType::BF16, &x), &x, None);
    }
}

#[test]
fn shader_checks_change_nothing() {
    ragged(&open(Options { safe_shaders: true, ..Options::default() }));
}

#[test]
fn nothing_to_quantize() {
    let g = gpu();
    let x = Tensor::empty(g, "x", &[0, 12], DType::F32).unwrap();
    let offs = Tensor::from_u32(g, "offs", &[0, 0]).unwrap();
    assert!(quantize::rowwise(g, &x).unwrap().codes.to_codes(g).unwrap().is_empty());
    let got = quantize::colwise(g, &x, Some(&offs)).unwrap();
    assert_eq!(got.descale.to_f32(g).unwrap(), [2f32.powi(-48); 24]);
    assert_eq!(quantize::tensorwise(g, &x, DType::E5M2).unwrap().descale.to_f32(g).unwrap().len(), 1);
}

//! The oracles against upstream's outputs and against cases whose answer is known by hand.

mod common;

use common::Fixture;
use moe8::num::{Fp8, bf16, rng::Stream, scale};
use moe8::reference::compare::{bf16_ulp, close, same_bits, sqnr_at_least, sqnr_db, within};
use moe8::reference::fp8_linear::{self, Layer, Recipe};
use moe8::reference::gemm::{self, Scales};
use moe8::reference::quantize::rowwise;

/// Standard normal values, rounded to bf16.
fn normal(name: &str, len: usize) -> Vec<f32> {
    let stream = Stream::new(0, name);
    (0..len as u64).map(|i| bf16::round(stream.normal(i))).collect()
}

/// The op's three products against torchao's on an H200, whose tensor cores keep fewer bits of the sums (55.6 dB).
#[test]
fn fp8_op_agrees_with_cuda() {
    for name in ["op_small.safetensors", "op_one_expert.safetensors"] {
        let file = Fixture::read(name);
        let (a, shape_a) = file.floats("A");
        let (w, shape_w) = file.floats("W");
        let (d_out, _) = file.floats("dO");
        let offs = file.words("offs");
        let layer = Layer { recipe: Recipe::Rowwise, offs: &offs, n: shape_w[1], k: shape_w[2] };
        assert_eq!(shape_a[1], shape_w[2]);
        let out = fp8_linear::forward(layer, &a, &w);
        let (d_a, d_w) = fp8_linear::backward(layer, &a, &w, &d_out);
        for (what, got) in [("out", &out), ("dA", &d_a), ("dW", &d_w)] {
            let (want, _) = file.floats(what);
            sqnr_at_least(&want, got, 50.0).unwrap_or_else(|e| panic!("{name} {what}: {e}"));
        }
        let plain = gemm::nt(&a, &w, &offs, layer.n, layer.k, Scales::NONE);
        let noise = sqnr_db(&plain, &out);
        assert!((27.5..29.5).contains(&noise), "{name}: {noise} dB from the unquantized product");
    }
}

#[test]
fn outputs_are_products_rounded_to_bf16() {
    let (offs, n, k) = ([5, 5, 12], 7, 11);
    let layer = Layer { recipe: Recipe::Rowwise, offs: &offs, n, k };
    let (x, w, d_out) = (normal("x", 13 * k), normal("w", 3 * n * k), normal("d", 13 * n));
    let exact = fp8_linear::fprop(layer, &x, &w);
    let rounded: Vec<f64> = fp8_linear::forward(layer, &x, &w).iter().map(|&v| v as f64).collect();
    let half: Vec<f64> = exact.iter().map(|&v| bf16_ulp(v) / 2.0).collect();
    within(&rounded, &exact, &half, &[13, n]).unwrap();
    let (d_x, d_w) = fp8_linear::backward(layer, &x, &w, &d_out);
    assert!(d_x[12 * k..].iter().chain(&d_w[n * k..2 * n * k]).all(|v| v.to_bits() == 0));
}

/// The three recipes of a dense layer stay about as close to the plain products as e4m3 and e5m2 allow.
#[test]
fn dense_recipes_have_the_noise_of_their_formats() {
    let (m, n, k) = (67, 45, 131);
    let (x, w, d_out) = (normal("x", m * k), normal("w", n * k), normal("d", m * n));
    let offs = [m as u32];
    let plain = [
        gemm::nt(&x, &w, &offs, n, k, Scales::NONE),
        gemm::nn(&d_out, &w, &offs, n, k, Scales::NONE),
        gemm::tn(&d_out, &x, &offs, n, k, Scales::NONE),
    ];
    let expected = [
        (Recipe::Rowwise, [27.0..30.0, 27.0..30.0, 27.0..30.0]),
        (Recipe::Tensorwise, [27.0..30.0, 23.0..26.5, 23.0..26.5]),
        (Recipe::RowwiseWithGwHp, [27.0..30.0, 27.0..30.0, 45.0..60.0]),
    ];
    for (recipe, ranges) in expected {
        let layer = Layer { recipe, offs: &offs, n, k };
        let (d_x, d_w) = fp8_linear::backward(layer, &x, &w, &d_out);
        let got = [fp8_linear::forward(layer, &x, &w), d_x, d_w];
        for ((got, plain), range) in got.iter().zip(&plain).zip(ranges) {
            let db = sqnr_db(plain, got);
            assert!(range.contains(&db), "{recipe:?}: {db} dB, want {range:?}");
        }
    }
}

#[test]
fn a_power_of_two_factor_moves_exponents_only() {
    let (m, n, k) = (6, 5, 17);
    let layer = Layer { recipe: Recipe::Rowwise, offs: &[6], n, k };
    let (x, w) = (normal("x", m * k), normal("w", n * k));
    let scaled: Vec<f32> = x.iter().map(|v| v * 1024.0).collect();
    let out: Vec<f32> = fp8_linear::forward(layer, &x, &w).iter().map(|v| v * 1024.0).collect();
    same_bits(&fp8_linear::forward(layer, &scaled, &w), &out, &[m, n]).unwrap();
}

#[test]
fn bad_rows_poison_themselves_only() {
    let (m, n, k) = (5, 3, 8);
    let layer = Layer { recipe: Recipe::Rowwise, offs: &[3, 4], n, k };
    let (mut x, w) = (normal("x", m * k), normal("w", 2 * n * k));
    let clean = fp8_linear::forward(layer, &x, &w);
    x[0] = f32::NAN;
    x[2 * k + 1] = f32::NEG_INFINITY;
    x[4 * k] = f32::NAN; // past the last group
    let q = rowwise(&x, m, k, Fp8::E4m3);
    assert!(q.codes[..k].iter().all(|&c| c == Fp8::NAN_CODE) && q.scale[0].is_nan());
    assert!(q.scale[2] == 0.0 && scale::inverse(q.scale[2]) == f32::INFINITY);
    let out = fp8_linear::forward(layer, &x, &w);
    for row in [0, 2] {
        assert!(out[row * n..][..n].iter().all(|v| v.is_nan()), "row {row}");
    }
    for row in [1, 3] {
        same_bits(&out[row * n..][..n], &clean[row * n..][..n], &[n]).unwrap();
    }
    assert!(out[4 * n..].iter().all(|v| v.to_bits() == 0));
}

/// nt against a triple loop in the other order; nn and tn follow from it by transposing.
#[test]
fn grouped_products_match_a_plain_loop() {
    for (offs, n, k) in [(vec![7], 5, 3), (vec![0, 4, 4, 9], 2, 1), (vec![9, 9], 1, 13), (vec![1, 2], 3, 4)] {
        let m = 9;
        let (a, w, d) = (normal("a", m * k), normal("w", offs.len() * n * k), normal("d", m * n));
        let (mut out, mut d_a, mut d_w) = (vec![0.0; m * n], vec![0.0; m * k], vec![0.0; offs.len() * n * k]);
        for row in 0..m {
            let Some(g) = offs.iter().position(|&end| row < end as usize) else { continue };
            for (i, j) in (0..k).flat_map(|i| (0..n).map(move |j| (i, j))) {
                out[row * n + j] += a[row * k + i] as f64 * w[(g * n + j) * k + i] as f64;
                d_a[row * k + i] += d[row * n + j] as f64 * w[(g * n + j) * k + i] as f64;
                d_w[(g * n + j) * k + i] += d[row * n + j] as f64 * a[row * k + i] as f64;
            }
        }
        let wide = |x: &[f32]| x.iter().map(|&v| v as f64).collect::<Vec<_>>();
        let (a, w, d) = (wide(&a), wide(&w), wide(&d));
        close(&gemm::nt(&a, &w, &offs, n, k, Scales::NONE), &out, &[m, n], 1e-12, 0.0).unwrap();
        close(&gemm::nn(&d, &w, &offs, n, k, Scales::NONE), &d_a, &[m, k], 1e-12, 0.0).unwrap();
        close(&gemm::tn(&d, &a, &offs, n, k, Scales::NONE), &d_w, &[offs.len(), n, k], 1e-12, 0.0).unwrap();
    }
}

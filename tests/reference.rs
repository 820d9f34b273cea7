//! The oracles against upstream's outputs and against cases whose answer is known by hand.

mod common;

use common::Fixture;
use moe8::num::{Fp8, bf16, rng::Stream, scale};
use moe8::reference::adamw::{self, State};
use moe8::reference::attention::{self, Mask};
use moe8::reference::compare::{bf16_ulp, close, same_bits, sqnr_at_least, sqnr_db, within};
use moe8::reference::dispatch::{self, Width};
use moe8::reference::fp8_linear::{self, Layer, Recipe};
use moe8::reference::gemm::{self, Scales};
use moe8::reference::quantize::{rowwise, tensorwise};
use moe8::reference::router::{self, ScoreFunc};
use moe8::reference::{clip, cross_entropy, elementwise, embedding, expert_bias, rmsnorm, rope, swiglu};

/// Standard normal values, rounded to bf16.
fn normal(name: &str, len: usize) -> Vec<f32> {
    let stream = Stream::new(0, name);
    (0..len as u64).map(|i| bf16::round(stream.normal(i))).collect()
}

/// The op's three products against torchao's on an H200, whose tensor cores keep fewer bits of the sums (55.6
/// dB).
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

/// The literal procedure: quotient in f64, to f32, product in f32, clamp, cast; the power of two only where asked.
#[test]
fn tensorwise_has_one_scale_and_rounds_it_on_request_only() {
    let x = [3.0, -0.7, 0.0, 1e-3, 2.999];
    for format in [Fp8::E4m3, Fp8::E5m2] {
        let plain = tensorwise(&x, format, false);
        let s = (format.max() as f64 / 3.0) as f32;
        assert_eq!(plain.scale, [s]);
        let codes: Vec<u8> = x.iter().map(|v| format.encode((v * s).min(format.max()))).collect();
        assert_eq!(plain.codes, codes);
        let rounded = tensorwise(&x, format, true);
        assert_eq!(rounded.scale, [s.log2().floor().exp2()]);
        assert!(rounded.codes[0] < format.encode(format.max()), "3 * 2^n is not the largest value");
    }
    let bad = tensorwise(&[1.0, f32::NAN], Fp8::E4m3, false);
    assert!(bad.scale[0].is_nan() && bad.codes == [Fp8::NAN_CODE; 2]);
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

#[test]
fn attention_sees_what_its_mask_says() {
    let mask = Mask { block: Some(4), documents: Some(&[0, 0, 1, 1, 1, 1, 1, 2]) };
    let seen: Vec<Vec<usize>> = (0..8).map(|q| (0..8).filter(|&k| mask.sees(0, 8, q, k)).collect()).collect();
    assert_eq!(seen, [vec![0], vec![0, 1], vec![2], vec![2, 3], vec![4], vec![4, 5], vec![4, 5, 6], vec![7]]);
    assert_eq!(attention::document_ids(&[5, 9, 9, 1, 2, 9, 3, 4], 4, 9), [0, 0, 1, 2, 0, 0, 1, 1]);
}

/// One key: its value. Equal keys: the mean of the values so far. A key head serves H/G query heads in a row.
#[test]
fn attention_of_known_cases() {
    let shape = attention::Shape { batch: 1, seq: 3, heads: 4, kv_heads: 2, head_dim: 1 };
    let (q, k, v) = (normal("q", 12), [1.0; 6], [1.0, 10.0, 2.0, 20.0, 6.0, 60.0]);
    let got = attention::forward(shape, Mask::CAUSAL, &q, &k, &v);
    let want = [1.0, 1.0, 10.0, 10.0, 1.5, 1.5, 15.0, 15.0, 3.0, 3.0, 30.0, 30.0];
    close(&got.out, &want, &[3, 4], 1e-6, 0.0).unwrap();
    let lse: Vec<f32> = (0..12).map(|i| q[i % 3 * 4 + i / 3] + ((i % 3 + 1) as f32).ln()).collect();
    close(&got.lse, &lse, &[4, 3], 1e-6, 0.0).unwrap();
}

#[test]
fn rope_turns_adjacent_pairs() {
    let table = rope::table(3, 4, 10_000.0);
    let x = [1.0, 0.0, 0.0, 2.0].repeat(3);
    let y: Vec<f64> = rope::forward(&x, &table, 1, 4);
    let want = |t: f64| [t.cos(), t.sin(), -2.0 * (t / 100.0).sin(), 2.0 * (t / 100.0).cos()];
    close(&y, &[want(0.0), want(1.0), want(2.0)].concat(), &[3, 4], 1e-7, 0.0).unwrap();
    close(&rope::backward(&y, &table, 1, 4), &x, &[3, 4], 1e-6, 0.0).unwrap();
}

#[test]
fn router_breaks_ties_by_index_and_keeps_the_bias_out_of_the_weights() {
    let options = router::Options {
        experts: 4,
        top_k: 2,
        score_func: ScoreFunc::Softmax,
        route_norm: false,
        route_scale: 1.0,
    };
    let even = router::forward(options, &[1.0f32; 8], &[0.0; 4]);
    assert_eq!(even.chosen, [0, 1, 0, 1]);
    assert_eq!(even.weights, [0.25; 4]);
    let pushed = router::forward(options, &[1.0f32; 4], &[0.0, 0.0, 0.5, 0.25]);
    assert_eq!((pushed.chosen, pushed.weights), (vec![2, 3], vec![0.25; 2]));
    let far = router::forward(options, &[0.0f32, 1000.0, -1000.0, 0.0], &[0.0; 4]);
    assert_eq!((far.chosen, far.weights), (vec![1, 0], vec![1.0, 0.0]));
    let normed =
        router::Options { score_func: ScoreFunc::Sigmoid, route_norm: true, route_scale: 2.0, ..options };
    let got = router::forward(normed, &[0.0f64, -40.0, 3f64.ln(), -40.0], &[0.0; 4]);
    assert_eq!(got.chosen, [2, 0]);
    close(&got.weights, &[1.2, 0.8], &[1, 2], 1e-12, 0.0).unwrap(); // 2 * (3/4, 1/2) / (5/4)
}

#[test]
fn dispatch_plan_is_a_stable_sort() {
    let plan = dispatch::plan(&[3, 0, 2, 3, 0, 2, 3, 2], 4);
    assert_eq!(plan.counts, [2, 0, 3, 3]);
    assert_eq!(plan.starts, [0, 2, 2, 5]);
    assert_eq!(plan.ends, [2, 2, 5, 8]);
    assert_eq!(plan.slot_of_row, [1, 4, 2, 5, 7, 0, 3, 6]);
    assert_eq!(plan.row_of_slot, [5, 0, 2, 6, 1, 3, 7, 4]);
    let width = Width { top_k: 2, dim: 1 };
    let x = [10.0f32, 20.0, 30.0, 40.0];
    let routed = dispatch::gather(&plan, width, &x, None);
    assert_eq!(routed, [10.0, 30.0, 20.0, 30.0, 40.0, 10.0, 20.0, 40.0]);
    assert_eq!(dispatch::combine(&plan, width, &routed, None), [20.0, 40.0, 60.0, 80.0]);
    let none = dispatch::plan(&[], 2);
    assert_eq!((none.ends, none.slot_of_row), (vec![0, 0], vec![]));
}

#[test]
fn small_ops_of_known_answer() {
    let y = rmsnorm::forward(&[3.0f64, 4.0], &[1.0, 2.0], 0.0);
    close(&y, &[3.0 / 12.5f64.sqrt(), 8.0 / 12.5f64.sqrt()], &[1, 2], 1e-15, 0.0).unwrap();
    let gate = swiglu::forward(&[0.0f64, 3f64.ln(), -1e4], &[5.0, 2.0, 1.0]);
    close(&gate, &[0.0, 1.5 * 3f64.ln(), 0.0], &[3], 1e-15, 0.0).unwrap();
    let losses = cross_entropy::forward(&[0.0f64, 0.0, 1e4, 0.0], &[1, 1], 2);
    close(&losses, &[2f64.ln(), 1e4], &[2], 1e-12, 0.0).unwrap();
    assert_eq!(clip::sum_squares(&[3.0f32, -4.0]), 25.0);
    assert_eq!(clip::coefficient(0.5, 1.0), 1.0);
    assert!((clip::coefficient(4.0, 1.0) - 0.25).abs() < 1e-7 && clip::coefficient(f64::NAN, 1.0).is_nan());
    let mut bias = [0.0f64; 4];
    expert_bias::update(&mut bias, &[0, 4, 4, 8], 1e-3);
    assert_eq!(bias, [1e-3, 0.0, 0.0, -1e-3]);
    expert_bias::update(&mut bias, &[0, 0, 0, 8], 1e-3); // +1 +1 +1 -1, less their mean 1/2
    close(&bias, &[1.5e-3, 0.5e-3, 0.5e-3, -2.5e-3], &[4], 1e-15, 0.0).unwrap();
    assert_eq!(elementwise::add(&[1.0f32, 2.0], &[0.5, -2.0]), [1.5, 0.0]);
    assert_eq!(elementwise::scale(&[1.0f32, 2.0], 0.5), [0.5, 1.0]);
    assert_eq!(elementwise::round_bf16(&[1.0f64 + 1.0 / 256.0, 1.01]), [1.0, 1.007_812_5]);
    assert_eq!(embedding::forward(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 0], 2), [3.0, 4.0, 3.0, 4.0, 1.0, 2.0]);
}

/// Two steps of PyTorch's rule, worked by hand: the first moves by lr whatever the gradient.
#[test]
fn adamw_steps() {
    let options = adamw::Options { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 0.0, weight_decay: 0.5 };
    let (mut p, mut m, mut v) = ([2.0f64], [0.0], [0.0]);
    adamw::step(options, 1, 0.5, State { p: &mut p, m: &mut m, v: &mut v }, &[6.0]);
    close(&[p[0], m[0], v[0]], &[1.9 - 0.1, 0.3, 0.45], &[3], 1e-12, 0.0).unwrap();
    adamw::step(options, 2, 1.0, State { p: &mut p, m: &mut m, v: &mut v }, &[-1.0]);
    let (m2, v2) = (0.9 * 0.3 - 0.1, 0.95 * 0.45 + 0.05);
    let want = 1.8 * 0.95 - 0.1 * (m2 / 0.19) / (v2 / 0.0975f64).sqrt();
    close(&[p[0], m[0], v[0]], &[want, m2, v2], &[3], 1e-12, 0.0).unwrap();
}

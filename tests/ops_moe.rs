//! The mixture-of-experts ops, the loss and the optimizer on the running adapter, each against its reference.
//!
//! Every case runs twice, the second time in memory filled with NaN and with all run-time checks in the shaders, and
//! must give the same bits.

use half::bf16;
use moe8::gpu::{DeviceChoice, Gpu, Options};
use moe8::num::DType;
use moe8::ops::dispatch::Plan;
use moe8::ops::router::{self, ScoreFunc, Spec};
use moe8::ops::{adamw, clip, cross_entropy, dispatch, elementwise, embedding, expert_bias};
use moe8::reference;
use moe8::tensor::Tensor;
use std::cell::Cell;
use std::sync::OnceLock;

use DType::{BF16, F32};

thread_local! {
    /// Whether [`gpus`] run the code meant for GPUs.
    static HARDWARE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `case` on the adapter's own code path, then on that of GPUs.
fn each_path(case: impl Fn()) {
    for hardware in [false, true] {
        HARDWARE.set(hardware);
        case();
    }
}

fn gpus() -> &'static [Gpu; 2] {
    static GPUS: OnceLock<[[Gpu; 2]; 2]> = OnceLock::new();
    let open = |careful, treat_as_hardware| {
        let options =
            Options { poison: careful, safe_shaders: careful, treat_as_hardware, ..Options::default() };
        Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
    };
    let all = GPUS.get_or_init(|| [false, true].map(|hardware| [false, true].map(|c| open(c, hardware))));
    &all[usize::from(HARDWARE.get())]
}

/// What `f` gives on plain and on poisoned, checked memory, which must be the same bits (any NaN is
/// the same).
fn both(what: &str, f: impl Fn(&Gpu) -> Vec<f32>) -> Vec<f32> {
    let [plain, poisoned] = gpus();
    let (got, again) = (f(plain), f(poisoned));
    let bit = |x: &f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    assert_eq!(got.len(), again.len(), "{what}");
    let apart = (0..got.len()).find(|&i| bit(&got[i]) != bit(&again[i]));
    if let Some(i) = apart {
        let [a, b] = [got[i], again[i]];
        panic!(
            "{what}: poisoned memory or shader checks change number {i} of {} from {a:e} to {b:e}",
            got.len()
        );
    }
    got
}

/// A fixed sequence of numbers in -1..1 (splitmix64).
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let at = |i: usize| {
        let mut z = (seed << 32 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(at).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}

/// Rounded to what `dtype` holds.
fn round(dtype: DType, x: f32) -> f32 {
    if dtype == BF16 { bf16::from_f32(x).to_f32() } else { x }
}

fn rounded(dtype: DType, x: &[f32]) -> Vec<f32> {
    x.iter().map(|v| round(dtype, *v)).collect()
}

/// Fails unless every value is within `atol + rtol |want|`.
#[track_caller]
fn close(what: &str, got: &[f32], want: &[f64], atol: f64, rtol: f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = (f64::from(*g) - w).abs() <= atol + rtol * w.abs();
        assert!(same, "{what}: element {i} is {g}, should be {w}");
    }
}

#[track_caller]
fn equal(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.to_bits() == w.to_bits(), "{what}: element {i} is {g}, should be {w}");
    }
}

const SHAPES: [[usize; 2]; 6] = [[1, 1], [7, 5], [65, 4], [3, 257], [1031, 3], [1, 1024]];

#[test]
fn elementwise_is_exact() {
    each_path(|| {
        for ([rows, cols], (a_type, b_type)) in SHAPES
            .into_iter()
            .flat_map(|s| [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16)].map(|d| (s, d)))
        {
            let n = rows * cols;
            let (av, bv) = (rounded(a_type, &noise(1, n)), rounded(b_type, &noise(2, n)));
            let what = format!("{rows} x {cols} {a_type} {b_type}");
            let upload = |g: &Gpu| {
                let a = Tensor::from_f32(g, "a", &[rows, cols], a_type, &av).unwrap();
                (a, Tensor::from_f32(g, "b", &[rows, cols], b_type, &bv).unwrap())
            };
            let sum: Vec<f32> = av.iter().zip(&bv).map(|(a, b)| round(a_type, a + b)).collect();
            let got = both(&what, |g| {
                let (a, b) = upload(g);
                elementwise::add(g, &a, &b).unwrap().to_f32(g).unwrap()
            });
            equal(&format!("add {what}"), &got, &sum);
            let got = both(&what, |g| {
                let (a, b) = upload(g);
                elementwise::add_into(g, &a, &b).unwrap();
                a.to_f32(g).unwrap()
            });
            equal(&format!("add_into {what}"), &got, &sum);
            let got = both(&what, |g| {
                let (a, _) = upload(g);
                elementwise::scale_into(g, &a, 1.0 / 3.0).unwrap();
                elementwise::cast(g, &a, b_type).unwrap().to_f32(g).unwrap()
            });
            let want: Vec<f32> =
                av.iter().map(|a| round(b_type, round(a_type, a * f32::from_bits(0x3eaa_aaab)))).collect();
            equal(&format!("scale and cast {what}"), &got, &want);
        }
    });
}

#[test]
fn elementwise_leaves_padding_zero_and_neighbours_alone() {
    let all = both("views", |g| {
        let base = Tensor::from_f32(g, "base", &[96, 4], F32, &vec![1.5; 384]).unwrap();
        // Rows 32..64 as 32 rows of width 3: 256-byte aligned, so that any adapter can bind it.
        let view = Tensor::view(base.memory().0, 512, &[32, 3], F32);
        elementwise::zero(g, &view).unwrap();
        let x = Tensor::from_f32(g, "x", &[32, 3], BF16, &[0.5; 96]).unwrap();
        elementwise::add_into(g, &view, &x).unwrap();
        elementwise::cast_into(g, &x, &view).unwrap();
        elementwise::scale_into(g, &view, 3.0).unwrap();
        base.to_f32(g).unwrap()
    });
    for (i, v) in all.iter().enumerate() {
        let inside = (128..256).contains(&i);
        let want = if !inside {
            1.5
        } else if i % 4 == 3 {
            0.0
        } else {
            1.5
        };
        assert!(*v == want, "element {i} is {v}, should be {want}");
    }
    let flat = both("flat zero", |g| {
        let counts = Tensor::from_u32(g, "counts", &[7; 130]).unwrap();
        elementwise::zero(g, &counts.slice_flat(0, 5)).unwrap();
        counts.to_u32(g).unwrap().iter().map(|v| *v as f32).collect()
    });
    assert_eq!(flat[..7], [0.0, 0.0, 0.0, 0.0, 0.0, 7.0, 7.0]);
}

#[test]
fn cast_rounds_to_nearest_even_and_keeps_signs() {
    let values =
        [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -0.0, f32::INFINITY, 3.4e38, 1e-30, -2.5e-7, f32::NAN];
    let got = both("cast", |g| {
        let x = Tensor::from_f32(g, "x", &[1, values.len()], F32, &values).unwrap();
        elementwise::cast(g, &x, BF16).unwrap().to_f32(g).unwrap()
    });
    equal("cast", &got[..8], &rounded(BF16, &values[..8]));
    assert!(got[8].is_nan());
}

#[test]
fn embedding_forward_copies_rows() {
    each_path(|| {
        for (tokens, vocab, dim, dtype) in
            [(1, 2, 4, F32), (7, 7, 5, BF16), (65, 258, 64, F32), (1031, 2256, 257, BF16)]
        {
            let table = rounded(dtype, &noise(3, vocab * dim));
            let ids: Vec<u32> = (0..tokens).map(|t| (t * t * 31 % vocab) as u32).collect();
            let want = reference::embedding::forward(&table, &ids, dim);
            let got = both("embedding", |g| {
                let ids = Tensor::from_u32(g, "ids", &ids).unwrap();
                let table = Tensor::from_f32(g, "table", &[vocab, dim], dtype, &table).unwrap();
                embedding::forward(g, &ids, &table).unwrap().to_f32(g).unwrap()
            });
            equal(&format!("embedding {tokens} {vocab} {dim}"), &got, &want);
        }
    });
}

#[test]
fn embedding_backward_sums_rows_of_each_token() {
    each_path(|| {
        for (tokens, vocab, dim, dtype, spread) in [
            (1, 2, 4, F32, 31),
            (7, 7, 5, BF16, 3),
            (65, 258, 64, F32, 31),
            (1031, 2256, 257, BF16, 7),
            (1031, 7, 5, F32, 0), // every token the same
            (129, 3, 1030, BF16, 0),
            (300, 70_001, 3, F32, 233), // three digits
        ] {
            let d = rounded(dtype, &noise(4, tokens * dim));
            let ids: Vec<u32> = (0..tokens).map(|t| ((t * spread + 1) % vocab) as u32).collect();
            let want = reference::embedding::backward(&ids, &wide(&d), vocab, dim);
            for out in [F32, BF16] {
                let got = both("embedding", |g| {
                    let ids = Tensor::from_u32(g, "ids", &ids).unwrap();
                    let d = Tensor::from_f32(g, "d", &[tokens, dim], dtype, &d).unwrap();
                    embedding::backward(g, &ids, &d, vocab, out).unwrap().to_f32(g).unwrap()
                });
                let store = if out == BF16 { 2f64.powi(-8) } else { 1e-6 };
                close(&format!("embedding {tokens} {vocab} {dim} {out}"), &got, &want, 1e-5, store);
            }
        }
    });
}

#[test]
fn sum_of_squares_is_accurate_and_independent_of_place() {
    let mut all = Vec::new();
    for n in [1, 5, 64, 257, 1024, 16_383, 16_384, 70_001, 300_000] {
        let values = noise(5, n);
        let want = reference::clip::sum_squares(&values);
        let got = both("sum", |g| {
            let x = Tensor::from_flat_f32(g, "x", &values).unwrap();
            // The same values elsewhere: a view into a larger buffer.
            let base = Tensor::flat(g, "base", n + 64, F32).unwrap();
            let moved = base.slice_flat(64, n + 64);
            g.upload(base.memory().0, 256, bytemuck::cast_slice(&values)).unwrap();
            let sums = [&x, &moved].map(|t| clip::sum_squares(g, &[t]).unwrap().to_f32(g).unwrap()[0]);
            assert!(sums[0].to_bits() == sums[1].to_bits(), "{n}: {sums:?} by place");
            vec![sums[0]]
        });
        close(&format!("sum of {n} squares"), &got, &[want], 0.0, 5e-7);
        all.push((values, want));
    }
    let want = all.iter().map(|(_, w)| w).sum::<f64>() + 15.0;
    let got = both("sums", |g| {
        let mut parts: Vec<Tensor> =
            all.iter().map(|(v, _)| Tensor::from_flat_f32(g, "x", v).unwrap()).collect();
        parts.push(Tensor::from_f32(g, "padded", &[3, 5], F32, &[1.0; 15]).unwrap());
        clip::sum_squares(g, &parts.iter().collect::<Vec<_>>()).unwrap().to_f32(g).unwrap()
    });
    close("sum over parts", &got, &[want], 0.0, 5e-7);
}

/// The sum over bf16 is that over the same values in f32, bit for bit: of one quad, of rows that end inside one, of a whole run of
/// loads and one more, and with strides.
#[test]
fn squares_of_bf16_sum_as_those_of_f32() {
    let short = [[1, 1], [1, 4], [3, 5], [7, 13], [16, 4], [17, 4], [1021, 4], [4095, 4]];
    let strided = [[4096, 4], [5003, 7], [8191, 4], [9001, 5], [20_011, 3], [16_385, 4]];
    for shape in short.into_iter().chain(strided) {
        let values: Vec<f32> = rounded(BF16, &noise(6, shape[0] * shape[1]));
        let got = both("bf16 sum", |g| {
            let sums = [BF16, F32].map(|dtype| {
                let x = Tensor::from_f32(g, "x", &shape, dtype, &values).unwrap();
                clip::sum_squares(g, &[&x, &x]).unwrap().to_f32(g).unwrap()[0]
            });
            assert!(sums[0].to_bits() == sums[1].to_bits(), "{shape:?}: {sums:?}");
            vec![sums[0]]
        });
        close(&format!("squares {shape:?}"), &got, &[2.0 * reference::clip::sum_squares(&values)], 0.0, 5e-7);
    }
}

#[test]
fn clip_factor_is_at_most_one() {
    for (square, max_norm) in [(16f32, 1f32), (0.25, 1.0), (1.0, 1.0), (0.0, 1.0), (f32::NAN, 1.0)] {
        let got = both("clip", |g| {
            let s = Tensor::from_flat_f32(g, "s", &[square]).unwrap();
            let (norm, c) = clip::norm_and_coefficient(g, &s, max_norm).unwrap();
            vec![norm.to_f32(g).unwrap()[0], c.to_f32(g).unwrap()[0]]
        });
        if square.is_nan() {
            assert!(got.iter().all(|v| v.is_nan()), "{got:?}");
            continue;
        }
        let norm = f64::from(square).sqrt();
        close("clip", &got, &[norm, reference::clip::coefficient(norm, f64::from(max_norm))], 0.0, 4e-7);
    }
}

/// The formula, and where a copy in bf16 is asked for, the bits of a cast of the parameter.
#[test]
fn adamw_follows_the_formula() {
    each_path(|| {
        for (n, dtype, copies, steps, factor) in [
            (4usize, F32, false, 3u32, 1f32),
            (1028, F32, true, 5, 0.37),
            (65_540, F32, false, 2, 1.0),
            (4, BF16, true, 3, 1.0),
            (1024, BF16, true, 2, 0.5),
            (1028, BF16, false, 5, 0.37),
            (4 * 1031, F32, true, 1, 1.0),
            (65_540, BF16, true, 2, 1.0),
        ] {
            let cfg =
                |step| adamw::Step { lr: 4e-3, beta1: 0.9, beta2: 0.95, eps: 1e-15, weight_decay: 0.1, step };
            // A quarter of the gradients are zero, some are tiny.
            let grad = |step: u32| -> Vec<f32> {
                let g = noise(10 + u64::from(step), n);
                let values = g.iter().enumerate().map(|(i, v)| [0.0, *v, v * 1e-4, v * 1e-9][i % 4]);
                values.map(|v| round(dtype, v)).collect()
            };
            let start = noise(9, n);
            let [mut p, mut m, mut v] = [wide(&start), vec![0.0; n], vec![0.0; n]];
            for step in 1..=steps {
                let c = cfg(step);
                let [lr, beta1, beta2] = [c.lr, c.beta1, c.beta2].map(f64::from);
                let [eps, weight_decay] = [c.eps, c.weight_decay].map(f64::from);
                let options = reference::adamw::Options { lr, beta1, beta2, eps, weight_decay };
                let state = reference::adamw::State { p: &mut p[..], m: &mut m[..], v: &mut v[..] };
                reference::adamw::step(options, step as i32, f64::from(factor), state, &wide(&grad(step)));
            }
            let got = both("adamw", |g| {
                let zeros = vec![0f32; n];
                let [p, m, v] =
                    [&start, &zeros, &zeros].map(|x| Tensor::from_flat_f32(g, "state", x).unwrap());
                let factor = Tensor::from_flat_f32(g, "factor", &[factor]).unwrap();
                let shape = [n / 4, 4];
                let low = copies.then(|| Tensor::empty(g, "copy", &shape, BF16).unwrap());
                for step in 1..=steps {
                    let grad = Tensor::from_f32(g, "grad", &shape, dtype, &grad(step)).unwrap();
                    let state = adamw::State { param: &p, low: low.as_ref(), m: &m, v: &v };
                    adamw::step(g, &state, &grad, &factor, &cfg(step)).unwrap();
                }
                let all = [p, m, v].map(|t| t.to_f32(g).unwrap());
                if let Some(low) = low {
                    let param = Tensor::from_f32(g, "param", &shape, F32, &all[0]).unwrap();
                    let cast = elementwise::cast(g, &param, BF16).unwrap();
                    let [low, cast] = [&low, &cast].map(|t| t.to_f32(g).unwrap());
                    let by_host = all[0].iter().map(|x| round(BF16, *x).to_bits());
                    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert!(bits(&low) == bits(&cast), "copy of {n} by gradients in {dtype}");
                    assert!(by_host.eq(bits(&low)), "copy of {n} by gradients in {dtype}, by the host");
                }
                all.concat()
            });
            let lr = 4e-3;
            close("parameter", &got[..n], &p, 2e-6 * lr * f64::from(steps), 3e-7 * f64::from(steps));
            close("first moment", &got[n..2 * n], &m, 1e-7, 1e-6);
            close("second moment", &got[2 * n..], &v, 1e-37, 2e-6);
        }
    });
}

/// T, E, K of the routing tests.
const ROUTES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (7, 3, 1),
    (7, 3, 2),
    (65, 8, 1),
    (65, 8, 8),
    (1031, 8, 2),
    (65, 130, 1),
    (7, 130, 130),
    (1031, 130, 3),
];

fn spec(experts: usize, top_k: usize, func: ScoreFunc, norm: bool) -> Spec {
    Spec { experts, top_k, func, norm, scale: if norm { 2.5 } else { 1.0 } }
}

fn options(spec: Spec) -> reference::router::Options {
    reference::router::Options {
        experts: spec.experts,
        top_k: spec.top_k,
        score_func: match spec.func {
            ScoreFunc::Softmax => reference::router::ScoreFunc::Softmax,
            ScoreFunc::Sigmoid => reference::router::ScoreFunc::Sigmoid,
        },
        route_norm: spec.norm,
        route_scale: f64::from(spec.scale),
    }
}

/// Scores, chosen experts (as numbers), weights and d_logits on the adapter.
fn route(
    spec: Spec,
    dtype: DType,
    logits: &[f32],
    bias: &[f32],
    d_weights: &[f32],
) -> (Vec<f32>, Vec<u32>, Vec<f32>, Vec<f32>) {
    let tokens = logits.len() / spec.experts;
    let got = both(&format!("router {spec:?}"), |g| {
        let logits = Tensor::from_f32(g, "logits", &[tokens, spec.experts], dtype, logits).unwrap();
        let bias = Tensor::from_flat_f32(g, "bias", bias).unwrap();
        let routing = router::forward(g, &logits, &bias, spec).unwrap();
        let d = Tensor::from_flat_f32(g, "d", d_weights).unwrap();
        let d_logits = router::backward(g, &d, &routing, spec, dtype).unwrap();
        let ids: Vec<f32> = routing.ids.to_u32(g).unwrap().iter().map(|i| *i as f32).collect();
        let [s, w, d] = [&routing.scores, &routing.weights, &d_logits].map(|t| t.to_f32(g).unwrap());
        [s, ids, w, d].concat()
    });
    let (n, r) = (logits.len(), d_weights.len());
    let ids = got[n..n + r].iter().map(|i| *i as u32).collect();
    (got[..n].to_vec(), ids, got[n + r..n + 2 * r].to_vec(), got[n + 2 * r..].to_vec())
}

#[test]
fn router_follows_its_reference() {
    for (case, (tokens, experts, top_k)) in ROUTES.into_iter().enumerate() {
        // All eight combinations over the cases; each twice or so.
        let (norm, dtype) = (case % 2 == 1, if case % 3 == 1 { BF16 } else { F32 });
        let func = if case % 4 < 2 { ScoreFunc::Softmax } else { ScoreFunc::Sigmoid };
        let spec = spec(experts, top_k, func, norm);
        // Logits that no f32 score confuses: distinct multiples of 1/16, shuffled by token; the last ones tie.
        let logits: Vec<f32> = (0..tokens * experts)
            .map(|i| {
                let (t, e) = (i / experts, i % experts);
                let place = (e * 7 + t * 5) % experts;
                (place.saturating_sub(2) as f32 - experts as f32 / 2.0)
                    / if experts > 20 { 16.0 } else { 2.0 }
            })
            .collect();
        let bias: Vec<f32> = (0..experts).map(|e| if e % 3 == 0 { 0.25 } else { 0.0 }).collect();
        let d_weights = noise(21, tokens * top_k);
        let want = reference::router::forward(options(spec), &wide(&logits), &wide(&bias));
        let (scores, ids, weights, d_logits) = route(spec, dtype, &logits, &bias, &d_weights);
        let what = format!("{tokens} tokens, {spec:?}, {dtype}");
        close(&format!("scores, {what}"), &scores, &want.scores, 1e-9, 2e-6);
        assert_eq!(ids, want.chosen, "experts, {what}");
        close(&format!("weights, {what}"), &weights, &want.weights, 1e-9, 4e-6);
        let want = reference::router::backward(options(spec), &want, &wide(&d_weights));
        let store = if dtype == BF16 { 2f64.powi(-8) } else { 0.0 };
        close(&format!("d_logits, {what}"), &d_logits, &want, 4e-6, 4e-6 + store);
        // The weight of one chosen expert, normed, is a constant.
        if norm && top_k == 1 {
            assert!(d_logits.iter().all(|d| d.abs() < 1e-15), "d_logits, {what}: {d_logits:?}");
        }
    }
}

#[test]
fn router_ties_go_to_the_lowest_index_and_nan_stays_in_its_token() {
    let spec = spec(8, 3, ScoreFunc::Softmax, false);
    let mut logits = vec![0.5f32; 24];
    logits[8..16].copy_from_slice(&[0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]);
    logits[18] = f32::NAN;
    let (scores, ids, weights, _) = route(spec, F32, &logits, &[0.0; 8], &[1.0; 9]);
    assert_eq!(ids, [0, 1, 2, 1, 3, 4, 0, 1, 2]);
    assert!(scores[16..].iter().chain(&weights[6..]).all(|s| s.is_nan()));
    assert!(scores[..16].iter().all(|s| s.is_finite()));
    // Sigmoid: only the expert with the NaN has no score, and it is chosen, as PyTorch's topk does.
    let spec = Spec { func: ScoreFunc::Sigmoid, ..spec };
    let (scores, ids, ..) = route(spec, F32, &logits, &[0.0; 8], &[1.0; 9]);
    assert_eq!(ids[6..], [2, 0, 1]);
    assert_eq!(scores.iter().filter(|s| s.is_nan()).count(), 1);
    // Far from zero nothing overflows.
    let far: Vec<f32> = (0..24).map(|i| (i as f32 - 12.0) * 20.0).collect();
    let (scores, ..) = route(spec, F32, &far, &[0.0; 8], &[1.0; 9]);
    assert!(scores.iter().all(|s| (0.0..=1.0).contains(s)), "{scores:?}");
}

/// Chosen experts of the dispatch tests: `[T * K]`, distinct within a token.
fn choices(tokens: usize, experts: usize, top_k: usize) -> Vec<u32> {
    let first = |t: usize| (t * t * 7 + t / 3) % experts;
    (0..tokens * top_k).map(|i| ((first(i / top_k) + i % top_k) % experts) as u32).collect()
}

fn check_plan(what: &str, ids: &[u32], experts: usize, top_k: usize) {
    let want = reference::dispatch::plan(ids, experts);
    let want = [want.counts, want.ends, want.slot_of_row, want.row_of_slot].concat();
    let got = both(what, |g| {
        let ids = Tensor::from_u32(g, "ids", ids).unwrap();
        let plan = dispatch::plan(g, &ids, experts, top_k).unwrap();
        let all = [&plan.counts, &plan.offs, &plan.order, &plan.slot].map(|t| t.to_u32(g).unwrap());
        all.concat().iter().map(|i| *i as f32).collect()
    });
    let got: Vec<u32> = got.iter().map(|i| *i as u32).collect();
    assert_eq!(got, want, "{what}");
}

#[test]
fn plan_is_a_stable_counting_sort() {
    each_path(|| {
        for (tokens, experts, top_k) in ROUTES {
            let what = format!("{tokens} tokens, {experts} experts, {top_k} each");
            check_plan(&what, &choices(tokens, experts, top_k), experts, top_k);
        }
        check_plan("all to one", &[5; 1031], 8, 1);
        check_plan("all to the last", &[129; 65], 130, 1);
        check_plan("two of many", &(0..70_001).map(|i| 3 + i % 2 * 4).collect::<Vec<u32>>(), 8, 1);
    });
}

#[test]
fn gather_and_combine_follow_their_reference() {
    each_path(|| {
        for (case, (tokens, experts, top_k)) in ROUTES.into_iter().enumerate() {
            // One is more than the threads of a row hold at once.
            let dim = if case == 3 { 9001 } else { [4, 5, 64, 257][case % 4] };
            let dtype = if case % 2 == 0 { F32 } else { BF16 };
            let (slots, ids) = (tokens * top_k, choices(tokens, experts, top_k));
            let (x, rows) =
                (rounded(dtype, &noise(31, tokens * dim)), rounded(dtype, &noise(32, slots * dim)));
            let (weights, base) = (noise(33, slots), rounded(dtype, &noise(34, tokens * dim)));
            let plan = reference::dispatch::plan(&ids, experts);
            let width = reference::dispatch::Width { top_k, dim };
            for weighted in [true, false] {
                let what =
                    format!("{tokens} tokens, {experts} experts, {top_k} each, D {dim} {dtype} {weighted}");
                let w = weighted.then_some(&weights[..]);
                let wide_w = w.map(wide);
                let (wx, wr) = (wide(&x), wide(&rows));
                let routed = reference::dispatch::gather(&plan, width, &wx, wide_w.as_deref());
                let mut sum = reference::dispatch::combine(&plan, width, &wr, wide_w.as_deref());
                let d_w = reference::dispatch::gather_backward(&plan, width, (&wx, None), &wr).1;
                let run = |g: &Gpu| {
                    let up = |v: &[f32], n: usize| Tensor::from_f32(g, "t", &[n, dim], dtype, v).unwrap();
                    let (x, rows, base) = (up(&x, tokens), up(&rows, slots), up(&base, tokens));
                    let w = w.map(|w| Tensor::from_flat_f32(g, "w", w).unwrap());
                    let ids = Tensor::from_u32(g, "ids", &ids).unwrap();
                    let plan = dispatch::plan(g, &ids, experts, top_k).unwrap();
                    all_four(g, &plan, &x, &rows, w.as_ref(), &base)
                };
                let got = both(&what, run);
                let store = if dtype == BF16 { 2f64.powi(-8) } else { 2f64.powi(-23) };
                let (n, r) = (tokens * dim, slots * dim);
                let near = |name: &str, got: &[f32], want: &[f64]| {
                    close(&format!("{name}, {what}"), got, want, 1e-6 * top_k as f64, store);
                };
                near("gather", &got[..r], &routed);
                near("gather's d_x", &got[r..r + n], &sum);
                sum.iter_mut().zip(&base).for_each(|(s, b)| *s += f64::from(*b));
                near("combine", &got[r + n..r + 2 * n], &sum);
                let d_rows = reference::dispatch::gather(&plan, width, &wx, wide_w.as_deref());
                near("combine's d_rows", &got[r + 2 * n..2 * r + 2 * n], &d_rows);
                for d in got[2 * r + 2 * n..].chunks(slots) {
                    close(&format!("d_weights, {what}"), d, &d_w, 2e-6 * (dim as f64).sqrt(), 0.0);
                }
                assert_eq!(got.len(), 2 * r + 2 * n + if weighted { 2 * slots } else { 0 });
            }
        }
    });
}

/// gather, its d_x, combine on `base`, its d_rows for d_out = x, and both weight gradients, one after another.
fn all_four(g: &Gpu, plan: &Plan, x: &Tensor, rows: &Tensor, w: Option<&Tensor>, base: &Tensor) -> Vec<f32> {
    let routed = dispatch::gather(g, x, plan, w).unwrap();
    let (d_x, d_w) = dispatch::gather_backward(g, rows, x, plan, w, None).unwrap();
    let (d_x2, d_w3) = dispatch::gather_backward(g, rows, x, plan, w, Some(base)).unwrap();
    let sum = dispatch::combine(g, rows, plan, w, Some(base)).unwrap();
    let (d_rows, d_w2) = dispatch::combine_backward(g, x, rows, plan, w).unwrap();
    // On top of a gradient so far, d_x is what combine gives on a base.
    assert!(d_x2.to_f32(g).unwrap() == sum.to_f32(g).unwrap(), "gather's d_x onto another");
    let values = |d: &Option<Tensor>| d.as_ref().map(|d| d.to_f32(g).unwrap());
    assert!(values(&d_w3) == values(&d_w), "gather's d_weights beside it");
    let all = [Some(routed), Some(d_x), Some(sum), Some(d_rows), d_w, d_w2];
    all.iter().flatten().flat_map(|t| t.to_f32(g).unwrap()).collect()
}

#[test]
fn cross_entropy_follows_its_reference() {
    each_path(|| {
        for (tokens, vocab, dtype, spread) in [
            (1, 2, F32, 1.0),
            (7, 7, BF16, 4.0),
            (65, 258, F32, 10.0),
            (7, 258, F32, 80.0),
            (33, 2256, BF16, 4.0),
            (9, 2256, F32, 1.0),
            (3, 70_001, F32, 3.0),
        ] {
            let x: Vec<f32> = noise(41, tokens * vocab).iter().map(|v| round(dtype, v * spread)).collect();
            let labels: Vec<u32> = (0..tokens).map(|t| ((t * 37 + 1) % vocab) as u32).collect();
            let scale = 1.0 / tokens as f32;
            let want = reference::cross_entropy::forward(&wide(&x), &labels, vocab);
            let grad = reference::cross_entropy::backward(&wide(&x), &labels, vocab, f64::from(scale));
            let what = format!("{tokens} x {vocab} {dtype} spread {spread}");
            let got = both(&what, |g| {
                let logits = Tensor::from_f32(g, "logits", &[tokens, vocab], dtype, &x).unwrap();
                let labels = Tensor::from_u32(g, "labels", &labels).unwrap();
                let losses = Tensor::flat(g, "losses", tokens, F32).unwrap();
                cross_entropy::forward(g, &logits, &labels, &losses).unwrap();
                let only = losses.to_f32(g).unwrap();
                assert!(logits.to_f32(g).unwrap() == x, "{what}: forward changed the logits");
                cross_entropy::forward_backward(g, &logits, &labels, &losses, scale).unwrap();
                let losses = losses.to_f32(g).unwrap();
                assert!(only == losses, "{what}: losses with and without gradient");
                [losses, logits.to_f32(g).unwrap()].concat()
            });
            close(&format!("loss, {what}"), &got[..tokens], &want, 2e-6, 1e-6);
            let store = if dtype == BF16 { 2f64.powi(-8) } else { 0.0 };
            close(&format!("gradient, {what}"), &got[tokens..], &grad, 3e-6 * f64::from(scale), store + 4e-6);
        }
    });
}

#[test]
fn a_nan_logit_poisons_its_own_row_only() {
    each_path(|| {
        let mut x = noise(42, 3 * 7);
        x[9] = f32::NAN;
        let got = both("nan", |g| {
            let logits = Tensor::from_f32(g, "logits", &[3, 7], F32, &x).unwrap();
            let labels = Tensor::from_u32(g, "labels", &[1, 2, 3]).unwrap();
            let losses = Tensor::flat(g, "losses", 3, F32).unwrap();
            cross_entropy::forward_backward(g, &logits, &labels, &losses, 1.0).unwrap();
            [losses, logits]
                .iter()
                .flat_map(|t| t.to_f32(g).unwrap())
                .map(|v| f32::from(v.is_nan()))
                .collect()
        });
        assert_eq!(got[..3], [0.0, 1.0, 0.0]);
        for (row, d) in got[3..].chunks(7).enumerate() {
            assert!(d.iter().all(|v| *v == f32::from(row == 1)), "row {row}: {d:?}");
        }
    });
}

#[test]
fn mean_is_accurate() {
    for (n, offset) in [(1, 0.0), (7, 0.0), (65, 7.7), (1031, 7.7), (16_384, 7.7), (100_003, 7.7)] {
        let losses: Vec<f32> = noise(43, n).iter().map(|v| v + offset + 1.0).collect();
        let got = both("mean", |g| {
            let losses = Tensor::from_flat_f32(g, "losses", &losses).unwrap();
            cross_entropy::mean(g, &losses).unwrap().to_f32(g).unwrap()
        });
        close(&format!("mean of {n}"), &got, &[reference::cross_entropy::mean(&losses)], 0.0, 1.5e-7);
    }
}

#[test]
fn expert_bias_follows_its_reference() {
    for counts in [
        vec![5],
        vec![1, 2, 4],
        vec![4, 4, 4, 4, 4, 4, 4, 4],
        vec![0, 0, 0, 1031, 0, 0, 0, 0],
        (0..130).map(|e| (e * e * 31) % 97).collect::<Vec<u32>>(),
        vec![1 << 28, (1 << 28) + 1, 1 << 28],
    ] {
        let start: Vec<f32> = noise(51, counts.len()).iter().map(|v| v * 0.01).collect();
        let mut want = wide(&start);
        reference::expert_bias::update(&mut want, &counts, 1e-3);
        let got = both("bias", |g| {
            let bias = Tensor::from_flat_f32(g, "bias", &start).unwrap();
            let total = Tensor::from_u32(g, "total", &vec![0; counts.len()]).unwrap();
            let counts = Tensor::from_u32(g, "counts", &counts).unwrap();
            expert_bias::accumulate(g, &total, &counts).unwrap();
            expert_bias::update(g, &bias, &total, 1e-3).unwrap();
            expert_bias::accumulate(g, &total, &counts).unwrap();
            let doubled = total.to_u32(g).unwrap();
            assert!(doubled.iter().zip(counts.to_u32(g).unwrap()).all(|(t, c)| *t == 2 * c));
            bias.to_f32(g).unwrap()
        });
        close(&format!("bias of {} experts", counts.len()), &got, &want, 2e-9, 0.0);
    }
}

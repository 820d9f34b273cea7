//! The mixture-of-experts ops, the loss and the optimizer on the running adapter, each against a slow loop.
//!
//! Every case runs twice, the second time in memory filled with NaN, and must give the same bits.

use half::bf16;
use moe8::gpu::{DeviceChoice, Gpu, Options};
use moe8::num::DType;
use moe8::ops::{adamw, clip, elementwise, embedding};
use moe8::tensor::Tensor;
use std::sync::OnceLock;

use DType::{BF16, F32};

fn gpus() -> &'static [Gpu; 2] {
    static GPUS: OnceLock<[Gpu; 2]> = OnceLock::new();
    let open = |poison| {
        let options = Options { poison, ..Options::default() };
        Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
    };
    GPUS.get_or_init(|| [open(false), open(true)])
}

/// What `f` gives on plain and on poisoned memory, which must be the same bits.
fn both(what: &str, f: impl Fn(&Gpu) -> Vec<f32>) -> Vec<f32> {
    let [plain, poisoned] = gpus();
    let (got, again) = (f(plain), f(poisoned));
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&got) == bits(&again), "{what}: poisoned memory changes the result");
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
    for ([rows, cols], (a_type, b_type)) in
        SHAPES.into_iter().flat_map(|s| [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16)].map(|d| (s, d)))
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
    for (tokens, vocab, dim, dtype) in
        [(1, 2, 4, F32), (7, 7, 5, BF16), (65, 258, 64, F32), (1031, 2256, 257, BF16)]
    {
        let table = rounded(dtype, &noise(3, vocab * dim));
        let ids: Vec<u32> = (0..tokens).map(|t| (t * t * 31 % vocab) as u32).collect();
        let want: Vec<f32> =
            ids.iter().flat_map(|i| table[*i as usize * dim..][..dim].iter().copied()).collect();
        let got = both("embedding", |g| {
            let ids = Tensor::from_u32(g, "ids", &ids).unwrap();
            let table = Tensor::from_f32(g, "table", &[vocab, dim], dtype, &table).unwrap();
            embedding::forward(g, &ids, &table).unwrap().to_f32(g).unwrap()
        });
        equal(&format!("embedding {tokens} {vocab} {dim}"), &got, &want);
    }
}

#[test]
fn embedding_backward_sums_in_token_order() {
    for (tokens, vocab, dim, dtype, spread) in [
        (1, 2, 4, F32, 31),
        (7, 7, 5, BF16, 3),
        (65, 258, 64, F32, 31),
        (1031, 2256, 257, BF16, 7),
        (1031, 7, 5, F32, 0), // every token the same
    ] {
        let d = rounded(dtype, &noise(4, tokens * dim));
        let ids: Vec<u32> = (0..tokens).map(|t| ((t * spread + 1) % vocab) as u32).collect();
        let mut want = vec![0f32; vocab * dim];
        for (t, id) in ids.iter().enumerate() {
            for c in 0..dim {
                want[*id as usize * dim + c] += d[t * dim + c];
            }
        }
        for out in [F32, BF16] {
            let got = both("embedding", |g| {
                let ids = Tensor::from_u32(g, "ids", &ids).unwrap();
                let d = Tensor::from_f32(g, "d", &[tokens, dim], dtype, &d).unwrap();
                embedding::backward(g, &ids, &d, vocab, out).unwrap().to_f32(g).unwrap()
            });
            equal(&format!("embedding {tokens} {vocab} {dim} {out}"), &got, &rounded(out, &want));
        }
    }
}

#[test]
fn sum_of_squares_is_accurate_and_independent_of_place() {
    let mut all = Vec::new();
    for n in [1, 5, 64, 257, 1024, 16_383, 16_384, 70_001, 300_000] {
        let values = noise(5, n);
        let want: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
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
        close("clip", &got, &[norm, (f64::from(max_norm) / (norm + 1e-6)).min(1.0)], 0.0, 4e-7);
    }
}

#[test]
fn adamw_follows_the_formula() {
    for (n, steps, factor) in [(4usize, 3u32, 1f32), (1028, 5, 0.37), (65_540, 2, 1.0)] {
        let cfg =
            |step| adamw::Step { lr: 4e-3, beta1: 0.9, beta2: 0.95, eps: 1e-15, weight_decay: 0.1, step };
        // A quarter of the gradients are zero, some are tiny.
        let grad = |step: u32| -> Vec<f32> {
            let g = noise(10 + u64::from(step), n);
            g.iter().enumerate().map(|(i, v)| [0.0, *v, v * 1e-4, v * 1e-9][i % 4]).collect()
        };
        let start = noise(9, n);
        let mut want: Vec<[f64; 3]> = start.iter().map(|p| [f64::from(*p), 0.0, 0.0]).collect();
        for step in 1..=steps {
            let c = cfg(step);
            let [lr, b1, b2, decay] = [c.lr, c.beta1, c.beta2, c.weight_decay].map(f64::from);
            let t = f64::from(step);
            for ([p, m, v], g) in want.iter_mut().zip(grad(step)) {
                let g = f64::from(g) * f64::from(factor);
                *p *= 1.0 - lr * decay;
                *m = b1 * *m + (1.0 - b1) * g;
                *v = b2 * *v + (1.0 - b2) * g * g;
                let root = (*v / (1.0 - b2.powf(t))).sqrt();
                *p -= lr * (*m / (1.0 - b1.powf(t))) / (root + f64::from(c.eps));
            }
        }
        let got = both("adamw", |g| {
            let zeros = vec![0f32; n];
            let [p, m, v] = [&start, &zeros, &zeros].map(|x| Tensor::from_flat_f32(g, "state", x).unwrap());
            let factor = Tensor::from_flat_f32(g, "factor", &[factor]).unwrap();
            for step in 1..=steps {
                let grad = Tensor::from_flat_f32(g, "grad", &grad(step)).unwrap();
                adamw::step(g, &p, &grad, &m, &v, &factor, &cfg(step)).unwrap();
            }
            [p, m, v].iter().flat_map(|t| t.to_f32(g).unwrap()).collect()
        });
        let column = |i: usize| want.iter().map(|w| w[i]).collect::<Vec<_>>();
        let lr = 4e-3;
        close("parameter", &got[..n], &column(0), 2e-6 * lr * f64::from(steps), 3e-7 * f64::from(steps));
        close("first moment", &got[n..2 * n], &column(1), 1e-7, 1e-6);
        close("second moment", &got[2 * n..], &column(2), 1e-37, 2e-6);
    }
}

//! Norm, rotary embedding and gate.

use crate::{DTYPES, close, close_to, flat, gpus, largest, same_bits_everywhere, tensor, values};
use moe8::gpu::Gpu;
use moe8::num::{DType, bf16};
use moe8::ops::{elementwise, rmsnorm, rope, swiglu};
use moe8::reference;
use moe8::tensor::Tensor;

const EPS: f32 = 1e-5;

/// Rows and columns: one element, primes, whole and broken quads, one past a workgroup, past a chunk of rows.
/// The last is longer than what the threads of a row hold.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (2, 3), (7, 4), (65, 30), (130, 17), (33, 256), (9, 1031), (3, 8195)];

/// What lies past the width of each row.
fn padding(gpu: &Gpu, t: &Tensor) -> Vec<u8> {
    let (buffer, offset) = t.memory();
    let bytes = gpu.download(buffer, offset, t.bytes()).unwrap();
    let used = t.cols() * t.dtype().size();
    bytes.chunks(t.quads() * t.dtype().quad_bytes()).flat_map(|row| row[used..].to_vec()).collect()
}

#[track_caller]
fn no_padding(gpu: &Gpu, tensors: &[&Tensor]) {
    for t in tensors {
        assert!(padding(gpu, t).iter().all(|b| *b == 0), "padding of {:?} is not zero", t.shape());
    }
}

#[test]
fn rmsnorm_and_its_gradient() {
    for (rows, cols) in SHAPES {
        for (dtype, weight) in
            [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::BF16, DType::F32)]
        {
            let x = values("x", rows * cols, dtype);
            let w = values("w", cols, weight);
            let d = values("d", rows * cols, dtype);
            let y = reference::rmsnorm::forward(&x, &w, f64::from(EPS));
            let (d_x, d_w) = reference::rmsnorm::backward(&x, &w, &d, f64::from(EPS));
            // Sums over long rows are off by more.
            let off = f64::max(1e-6, cols as f64 * 5e-10);
            for gpu in gpus() {
                let [tx, td] = [&x, &d].map(|v| tensor(gpu, &[rows, cols], dtype, v));
                let tw = tensor(gpu, &[cols], weight, &w);
                let (ty, rstd) = rmsnorm::forward(gpu, &tx, &tw, EPS).unwrap();
                let (tdx, tdw) = rmsnorm::backward(gpu, &td, &tx, &tw, &rstd, None).unwrap();
                close(&format!("y {rows}x{cols}"), &flat(gpu, &ty), &y, dtype, off);
                // d_x is what two terms of this size leave of each other.
                let term = largest(&d) * largest(&w) * largest(&flat(gpu, &rstd));
                close_to(&format!("d_x {rows}x{cols}"), &flat(gpu, &tdx), &d_x, dtype, off * term);
                close(&format!("d_w {rows}x{cols}"), &flat(gpu, &tdw), &d_w, weight, off);
                assert_eq!((tdw.shape(), tdw.dtype(), rstd.numel()), (tw.shape(), weight, rows));
                // The same of a sum, and on top of a gradient.
                let (sum, of_sum, _) = rmsnorm::forward_of_sum(gpu, &tx, &td, &tw, EPS).unwrap();
                let added = elementwise::add(gpu, &tx, &td).unwrap();
                let (alone, _) = rmsnorm::forward(gpu, &added, &tw, EPS).unwrap();
                assert_eq!(flat(gpu, &sum), flat(gpu, &added), "a sum {rows}x{cols}");
                assert_eq!(flat(gpu, &of_sum), flat(gpu, &alone), "the norm of a sum {rows}x{cols}");
                let (onto, beside) = rmsnorm::backward(gpu, &td, &tx, &tw, &rstd, Some(&tx)).unwrap();
                let both: Vec<f32> = d_x.iter().zip(&x).map(|(d, x)| d + x).collect();
                let name = format!("d_x on top {rows}x{cols}");
                close_to(&name, &flat(gpu, &onto), &both, dtype, off * term);
                assert_eq!(flat(gpu, &beside), flat(gpu, &tdw), "d_w beside it {rows}x{cols}");
                no_padding(gpu, &[&ty, &tdx, &tdw, &sum, &of_sum, &onto]);
            }
        }
    }
}

#[test]
fn a_nan_in_rmsnorm_stays_in_its_row() {
    let mut x = values("x", 3 * 5, DType::F32);
    x[7] = f32::NAN;
    for gpu in gpus() {
        let tx = tensor(gpu, &[3, 5], DType::F32, &x);
        let w = tensor(gpu, &[5], DType::F32, &[1.0; 5]);
        let (y, rstd) = rmsnorm::forward(gpu, &tx, &w, EPS).unwrap();
        let (d_x, _) = rmsnorm::backward(gpu, &tx, &tx, &w, &rstd, None).unwrap();
        for t in [&y, &d_x] {
            let nan: Vec<bool> = flat(gpu, t).iter().map(|v| v.is_nan()).collect();
            let want: Vec<bool> = (0..15).map(|i| i / 5 == 1).collect();
            assert_eq!(nan, want);
        }
        no_padding(gpu, &[&y, &d_x]);
    }
}

#[test]
fn rope_turns_and_turns_back() {
    for (batch, seq, heads, head_dim) in [(1, 1, 1, 4), (2, 7, 3, 20), (3, 17, 2, 16), (1, 65, 1, 128)] {
        let table = reference::rope::table(seq, head_dim, 500_000.0);
        for dtype in DTYPES {
            let n = batch * seq * heads * head_dim;
            let x = values("x", n, dtype);
            let y = reference::rope::forward(&x, &table, heads, head_dim);
            let back = reference::rope::backward(&x, &table, heads, head_dim);
            for gpu in gpus() {
                let t = rope::table(gpu, seq, head_dim, 500_000.0).unwrap();
                let tx = tensor(gpu, &[batch * seq, heads * head_dim], dtype, &x);
                let got = rope::forward(gpu, &tx, &t, seq, head_dim).unwrap();
                close("rope forward", &flat(gpu, &got), &y, dtype, 2e-7);
                let got = rope::backward(gpu, &tx, &t, seq, head_dim).unwrap();
                close("rope backward", &flat(gpu, &got), &back, dtype, 2e-7);
            }
        }
    }
}

#[test]
fn rope_is_accurate_far_out() {
    let (seq, head_dim, theta) = (8192, 16, 10_000.0);
    let gpu = &gpus()[0];
    let table = rope::table(gpu, seq, head_dim, theta).unwrap();
    let x = tensor(gpu, &[seq, head_dim], DType::F32, &[1.0, 0.0].repeat(seq * head_dim / 2));
    let y = flat(gpu, &rope::forward(gpu, &x, &table, seq, head_dim).unwrap());
    for t in [0, 1, 4095, 8191] {
        for pair in 0..head_dim / 2 {
            let power = f64::from(theta).powf((2 * pair) as f64 / head_dim as f64) as f32;
            let angle = f64::from(t as f32 * (1.0 / power));
            let at = t * head_dim + 2 * pair;
            for (got, want) in [(y[at], angle.cos()), (y[at + 1], angle.sin())] {
                assert!((f64::from(got) - want).abs() < 1e-7, "position {t}, pair {pair}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn a_head_that_rope_cannot_turn_is_an_error() {
    let error = rope::table(&gpus()[0], 4, 6, 10_000.0).unwrap_err().to_string();
    assert!(error.contains("heads of 6") && error.contains("n_heads"), "{error}");
}

/// SwiGLU with the roundings that two bf16 ops make: h, d_gate, d_up.
fn swiglu_in_steps(g: f32, u: f32, d: f32) -> [f32; 3] {
    let s = 1.0 / (1.0 + (-f64::from(g)).exp());
    let silu = bf16::round((f64::from(g) * s) as f32);
    let d_silu = f64::from(bf16::round(d * u));
    let d_gate = (d_silu * s * (1.0 + f64::from(g) * (1.0 - s))) as f32;
    [bf16::round(silu * u), bf16::round(d_gate), bf16::round(d * silu)]
}

#[test]
fn swiglu_and_its_gradient() {
    for (rows, cols) in SHAPES {
        let n = rows * cols;
        let [g, u, d] = ["gate", "up", "d"].map(|s| values(s, n, DType::F32));
        let g: Vec<f32> = g.iter().enumerate().map(|(i, v)| if i % 7 == 0 { 60.0 * v } else { *v }).collect();
        let h = reference::swiglu::forward(&g, &u);
        let (d_g, d_u) = reference::swiglu::backward(&g, &u, &d);
        for gpu in gpus() {
            let [tg, tu, td] = [&g, &u, &d].map(|v| tensor(gpu, &[rows, cols], DType::F32, v));
            let got = swiglu::forward(gpu, &tg, &tu).unwrap();
            let (got_g, got_u) = swiglu::backward(gpu, &td, &tg, &tu).unwrap();
            close("swiglu h", &flat(gpu, &got), &h, DType::F32, 1e-5);
            close("swiglu d_gate", &flat(gpu, &got_g), &d_g, DType::F32, 1e-5);
            close("swiglu d_up", &flat(gpu, &got_u), &d_u, DType::F32, 1e-5);
            no_padding(gpu, &[&got, &got_g, &got_u]);
        }
    }
}

#[test]
fn swiglu_rounds_where_two_bf16_ops_round() {
    let (rows, cols) = (67, 130);
    let [g, u, d] = ["gate", "up", "d"].map(|s| values(s, rows * cols, DType::BF16));
    let want: Vec<[f32; 3]> = (0..g.len()).map(|i| swiglu_in_steps(g[i], u[i], d[i])).collect();
    for gpu in gpus() {
        let [tg, tu, td] = [&g, &u, &d].map(|v| tensor(gpu, &[rows, cols], DType::BF16, v));
        let h = swiglu::forward(gpu, &tg, &tu).unwrap();
        let (d_gate, d_up) = swiglu::backward(gpu, &td, &tg, &tu).unwrap();
        for (which, t) in [&h, &d_gate, &d_up].into_iter().enumerate() {
            let got = flat(gpu, t);
            // Where exp's last bits decide a tie, the two differ by a unit in the last place.
            let equal = got.iter().zip(&want).filter(|(a, b)| **a == b[which]).count();
            assert!(equal * 200 > got.len() * 199, "result {which}: {equal} of {} equal", got.len());
            let want: Vec<f32> = want.iter().map(|w| w[which]).collect();
            moe8::reference::compare::close(&got, &want, &[rows, cols], 1e-30, 0.016).unwrap();
        }
        no_padding(gpu, &[&h, &d_gate, &d_up]);
    }
}

#[test]
fn bits_do_not_depend_on_memory_or_checks() {
    same_bits_everywhere(|gpu| {
        let (rows, cols) = (67, 36);
        let [a, b, c] = ["a", "b", "c"]
            .map(|s| tensor(gpu, &[rows, cols], DType::F32, &values(s, rows * cols, DType::F32)));
        let w = tensor(gpu, &[cols], DType::F32, &values("w", cols, DType::F32));
        let (y, rstd) = rmsnorm::forward(gpu, &a, &w, EPS).unwrap();
        let (d_x, d_w) = rmsnorm::backward(gpu, &b, &a, &w, &rstd, Some(&c)).unwrap();
        let h = swiglu::forward(gpu, &a, &b).unwrap();
        let (d_gate, d_up) = swiglu::backward(gpu, &c, &a, &b).unwrap();
        let table = rope::table(gpu, 70, 12, 10_000.0).unwrap();
        let turned = rope::forward(gpu, &a, &table, 67, 12).unwrap();
        [y, rstd, d_x, d_w, h, d_gate, d_up, turned].iter().map(|t| flat(gpu, t)).collect()
    });
}

//! Every backward oracle against central finite differences in f64, on small ragged shapes.
//!
//! The loss is `sum(out * d_out)` with a fixed random `d_out`: its gradient is the backward pass of `d_out`.

use moe8::num::rng::Stream;
use moe8::reference::attention::{self, Mask};
use moe8::reference::dispatch::{self, Width};
use moe8::reference::gemm::{self, Scales};
use moe8::reference::router::{self, Options, ScoreFunc};
use moe8::reference::{cross_entropy, embedding, rmsnorm, rope, swiglu};

/// Standard normal values in f64.
fn normal(name: &str, len: usize) -> Vec<f64> {
    let stream = Stream::new(7, name);
    (0..len as u64).map(|i| stream.normal(i) as f64).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Compares `gradient` (one vector per input) with central differences of `loss`, element by element.
fn differences<const N: usize>(
    inputs: [Vec<f64>; N],
    gradient: [Vec<f64>; N],
    loss: impl Fn(&[Vec<f64>; N]) -> f64,
) -> Result<(), String> {
    const STEP: f64 = 1e-5;
    let mut at = inputs;
    for input in 0..N {
        if at[input].len() != gradient[input].len() {
            return Err(format!(
                "input {input}: {} elements, gradient {}",
                at[input].len(),
                gradient[input].len()
            ));
        }
        for i in 0..at[input].len() {
            let x = at[input][i];
            at[input][i] = x + STEP;
            let up = loss(&at);
            at[input][i] = x - STEP;
            let down = loss(&at);
            at[input][i] = x;
            let (want, got) = ((up - down) / (2.0 * STEP), gradient[input][i]);
            // Truncation is about STEP^2, rounding 1e-16 * |loss| / STEP: both below 1e-9 here.
            let bound = 1e-8 + 1e-7 * want.abs();
            let close = (got - want).abs() <= bound; // false for NaN
            if !close {
                return Err(format!("input {input}, element {i}: backward {got:e}, differences {want:e}"));
            }
        }
    }
    Ok(())
}

#[test]
fn a_wrong_gradient_is_caught() {
    let x = normal("x", 5);
    let right: Vec<f64> = x.iter().map(|x| 3.0 * x * x).collect();
    let loss = |[x]: &[Vec<f64>; 1]| x.iter().map(|x| x * x * x).sum();
    differences([x.clone()], [right.clone()], loss).unwrap();
    for wrong in [right[2] * (1.0 + 1e-6), f64::NAN, -right[2]] {
        let mut planted = right.clone();
        planted[2] = wrong;
        let message = differences([x.clone()], [planted], loss).expect_err("a wrong gradient passes");
        assert!(message.contains("element 2"), "{message}");
    }
    differences([x], [right[..4].to_vec()], loss).expect_err("a short gradient passes");
}

#[test]
fn grouped_gemm() {
    for (offs, m, n, k) in [(vec![3, 3, 7], 8, 5, 2), (vec![4], 4, 1, 3), (vec![0, 5], 5, 3, 1)] {
        let (a, w, d) = (normal("a", m * k), normal("w", offs.len() * n * k), normal("d", m * n));
        let row: Vec<f32> = (0..m).map(|i| 0.5 + i as f32).collect();
        let col: Vec<f32> = (0..offs.len() * n).map(|i| 1.5 - i as f32 * 0.25).collect();
        for scaled in [false, true] {
            let scales =
                |on: bool| if on { Scales { row: Some(&row), col: Some(&col) } } else { Scales::NONE };
            // The factors of the output belong to d_out in the backward products.
            let group = |r: usize| offs.iter().position(|&end| r < end as usize);
            let factor = |r: usize, c: usize| group(r).map_or(0.0, |g| (row[r] * col[g * n + c]) as f64);
            let folded: Vec<f64> =
                (0..m * n).map(|i| if scaled { d[i] * factor(i / n, i % n) } else { d[i] }).collect();
            let d_a = gemm::nn(&folded, &w, &offs, n, k, Scales::NONE);
            let d_w = gemm::tn(&folded, &a, &offs, n, k, Scales::NONE);
            let loss = |[a, w]: &[Vec<f64>; 2]| dot(&gemm::nt(a, w, &offs, n, k, scales(scaled)), &d);
            differences([a.clone(), w.clone()], [d_a, d_w], loss).unwrap_or_else(|e| panic!("{offs:?}: {e}"));
        }
    }
}

#[test]
fn rmsnorm_rows() {
    for (rows, width, eps) in [(3, 7, 1e-5), (1, 1, 1e-3), (5, 2, 0.1)] {
        let (x, w, d) = (normal("x", rows * width), normal("w", width), normal("d", rows * width));
        let (d_x, d_w) = rmsnorm::backward(&x, &w, &d, eps);
        let loss = |[x, w]: &[Vec<f64>; 2]| dot(&rmsnorm::forward(x, w, eps), &d);
        differences([x, w], [d_x, d_w], loss).unwrap();
    }
}

#[test]
fn rope_turns() {
    for (batch, seq, heads, head_dim) in [(2, 5, 3, 6), (1, 1, 1, 2)] {
        let table = rope::table(seq, head_dim, 100.0);
        let len = batch * seq * heads * head_dim;
        let (x, d) = (normal("x", len), normal("d", len));
        let d_x = rope::backward(&d, &table, heads, head_dim);
        differences([x], [d_x], |[x]| dot(&rope::forward(x, &table, heads, head_dim), &d)).unwrap();
    }
}

#[test]
fn attention_with_every_mask() {
    let shape = attention::Shape { batch: 2, seq: 5, heads: 4, kv_heads: 2, head_dim: 3 };
    let one = attention::Shape { batch: 1, seq: 1, heads: 1, kv_heads: 1, head_dim: 1 };
    let documents = [0, 0, 1, 1, 1, 0, 1, 2, 2, 3];
    let masks = [
        (shape, Mask::CAUSAL),
        (shape, Mask { block: Some(2), documents: None }),
        (shape, Mask { block: None, documents: Some(&documents) }),
        (shape, Mask { block: Some(3), documents: Some(&documents) }),
        (attention::Shape { kv_heads: 4, ..shape }, Mask::CAUSAL),
        (attention::Shape { kv_heads: 1, ..shape }, Mask::CAUSAL),
        (one, Mask::CAUSAL),
    ];
    for (shape, mask) in masks {
        let positions = shape.batch * shape.seq * shape.head_dim;
        let (len, kv_len) = (positions * shape.heads, positions * shape.kv_heads);
        let (q, k, v, d) = (normal("q", len), normal("k", kv_len), normal("v", kv_len), normal("d", len));
        let (d_q, d_k, d_v) = attention::backward(shape, mask, (&q, &k, &v), &d);
        let loss = |[q, k, v]: &[Vec<f64>; 3]| dot(&attention::forward(shape, mask, q, k, v).out, &d);
        differences([q, k, v], [d_q, d_k, d_v], loss).unwrap_or_else(|e| panic!("{shape:?} {mask:?}: {e}"));
    }
}

#[test]
fn swiglu_gate() {
    let (a, b, d) = (normal("a", 11), normal("b", 11), normal("d", 11));
    let (d_a, d_b) = swiglu::backward(&a, &b, &d);
    differences([a, b], [d_a, d_b], |[a, b]| dot(&swiglu::forward(a, b), &d)).unwrap();
}

#[test]
fn embedding_rows() {
    let (vocabulary, width, tokens) = (5, 3, [4, 0, 4, 4, 2]);
    let (table, d) = (normal("table", vocabulary * width), normal("d", tokens.len() * width));
    let d_table = embedding::backward(&tokens, &d, vocabulary, width);
    differences([table], [d_table], |[t]| dot(&embedding::forward(t, &tokens, width), &d)).unwrap();
}

#[test]
fn router_scores_and_norms() {
    for (tokens, experts, top_k) in [(3, 5, 2), (2, 1, 1), (4, 3, 3), (1, 7, 1)] {
        let logits = normal("logits", tokens * experts);
        let bias = normal("bias", experts);
        let d = normal("d", tokens * top_k);
        for score_func in [ScoreFunc::Softmax, ScoreFunc::Sigmoid] {
            for (route_norm, route_scale) in [(false, 1.0), (true, 2.5), (true, 1.0)] {
                let options = Options { experts, top_k, score_func, route_norm, route_scale };
                let routing = router::forward(options, &logits, &bias);
                let d_logits = router::backward(options, &routing, &d);
                let loss = |[l]: &[Vec<f64>; 1]| {
                    let moved = router::forward(options, l, &bias);
                    assert_eq!(moved.chosen, routing.chosen, "the step crossed a choice");
                    dot(&moved.weights, &d)
                };
                differences([logits.clone()], [d_logits], loss)
                    .unwrap_or_else(|e| panic!("{options:?}: {e}"));
            }
        }
    }
}

#[test]
fn dispatch_and_combine() {
    // Expert 1 of 4 gets nothing; then all rows go to one expert; then one token.
    for (chosen, top_k) in [(vec![3, 0, 2, 3, 0, 2], 2), (vec![2, 2, 2], 1), (vec![1, 0, 3], 3)] {
        let width = Width { top_k, dim: 3 };
        let plan = dispatch::plan(&chosen, 4);
        let (rows, tokens) = (chosen.len(), chosen.len() / top_k);
        let (x, y, w) = (normal("x", tokens * 3), normal("y", rows * 3), normal("w", rows));
        let (d_routed, d_out) = (normal("dr", rows * 3), normal("do", tokens * 3));

        let (d_x, d_w) = dispatch::gather_backward(&plan, width, (&x, Some(&w)), &d_routed);
        let loss = |[x, w]: &[Vec<f64>; 2]| dot(&dispatch::gather(&plan, width, x, Some(w)), &d_routed);
        differences([x.clone(), w.clone()], [d_x, d_w], loss).unwrap();
        let (d_x, _) = dispatch::gather_backward(&plan, width, (&x, None), &d_routed);
        differences([x], [d_x], |[x]| dot(&dispatch::gather(&plan, width, x, None), &d_routed)).unwrap();

        let (d_y, d_w) = dispatch::combine_backward(&plan, width, (&y, Some(&w)), &d_out);
        let loss = |[y, w]: &[Vec<f64>; 2]| dot(&dispatch::combine(&plan, width, y, Some(w)), &d_out);
        differences([y.clone(), w], [d_y, d_w], loss).unwrap();
        let (d_y, _) = dispatch::combine_backward(&plan, width, (&y, None), &d_out);
        differences([y], [d_y], |[y]| dot(&dispatch::combine(&plan, width, y, None), &d_out)).unwrap();
    }
}

#[test]
fn cross_entropy_of_the_mean() {
    for (tokens, vocabulary) in [(3, 7), (1, 1), (5, 2)] {
        let logits = normal("logits", tokens * vocabulary);
        let labels: Vec<u32> = (0..tokens).map(|t| (t * 5 % vocabulary) as u32).collect();
        let d = cross_entropy::backward(&logits, &labels, vocabulary, 1.0 / tokens as f64);
        let loss = |[l]: &[Vec<f64>; 1]| cross_entropy::mean(&cross_entropy::forward(l, &labels, vocabulary));
        differences([logits], [d], loss).unwrap();
    }
}

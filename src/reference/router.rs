//! The router of an MoE layer: logits to scores, scores to the top-k experts and their weights.
//!
//! Definition: torchtitan's `TokenChoiceTopKRouter` (July 2025; route_norm and route_scale from August). The
//! bias is that of "Auxiliary-Loss-Free Load Balancing" (Wang et al., 2024): it moves the choice and nothing
//! else.

use super::swiglu::sigmoid;
use super::{Real, narrow, widen};

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreFunc {
    /// Softmax over the experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// What the router is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// E.
    pub experts: usize,
    /// K, at most E.
    pub top_k: usize,
    /// Logits to scores.
    pub score_func: ScoreFunc,
    /// Divide a token's K scores by (their sum + 1e-20).
    pub route_norm: bool,
    /// Factor on the weights, applied last.
    pub route_scale: f64,
}

/// Where every token goes.
#[derive(Clone, Debug)]
pub struct Routing<T> {
    /// Scores of all experts, (T, E).
    pub scores: Vec<T>,
    /// The chosen experts, (T, K), the best first; of equal ones the lowest index first.
    pub chosen: Vec<u32>,
    /// Their weights, (T, K).
    pub weights: Vec<T>,
}

/// logits (T, E), bias (E) -> scores, choice and weights.
///
/// The choice compares `score + bias` in the precision of `T`, so that ties are the ties of that precision.
pub fn forward<T: Real>(options: Options, logits: &[T], bias: &[T]) -> Routing<T> {
    let Options { experts, top_k, .. } = options;
    assert!(top_k <= experts && bias.len() == experts, "{options:?} with a bias for {} experts", bias.len());
    assert!(logits.len().is_multiple_of(experts), "{} logits for {experts} experts", logits.len());
    let scores: Vec<T> =
        logits.chunks(experts).flat_map(|row| narrow(&score(options, &widen(row)))).collect();
    let (mut chosen, mut weights) = (Vec::new(), Vec::new());
    for row in scores.chunks(experts) {
        let biased: Vec<T> = row.iter().zip(bias).map(|(s, b)| T::narrow(s.wide() + b.wide())).collect();
        let best = top(&biased, top_k);
        let picked: Vec<f64> = best.iter().map(|&e| row[e as usize].wide()).collect();
        let divisor = divisor(options, &picked);
        weights.extend(picked.iter().map(|s| T::narrow(s / divisor * options.route_scale)));
        chosen.extend(best);
    }
    Routing { scores, chosen, weights }
}

/// d_weights (T, K) -> d_logits (T, E). The choice is a constant.
pub fn backward<T: Real>(options: Options, routing: &Routing<T>, d_weights: &[T]) -> Vec<T> {
    let Options { experts, top_k, route_scale, .. } = options;
    assert_eq!(routing.chosen.len(), d_weights.len(), "chosen experts and their gradients");
    let mut d_logits = Vec::with_capacity(routing.scores.len());
    for (token, row) in routing.scores.chunks(experts).enumerate() {
        let chosen = &routing.chosen[token * top_k..][..top_k];
        let (s, d_w) = (widen(row), widen(&d_weights[token * top_k..][..top_k]));
        let picked: Vec<f64> = chosen.iter().map(|&e| s[e as usize]).collect();
        let divisor = divisor(options, &picked);
        // Through the quotient: d(c_i / D) = d_i / D - c_i dD / D^2, and D moves with every c.
        let through: f64 = picked.iter().zip(&d_w).map(|(c, d)| c * d).sum::<f64>() / (divisor * divisor);
        let through = if options.route_norm { through } else { 0.0 };
        let mut d_s = vec![0.0; experts];
        for (&e, d) in chosen.iter().zip(&d_w) {
            d_s[e as usize] = route_scale * (d / divisor - through);
        }
        d_logits.extend(score_backward(options.score_func, &s, &d_s));
    }
    narrow(&d_logits)
}

/// The scores of one token.
fn score(options: Options, logits: &[f64]) -> Vec<f64> {
    match options.score_func {
        ScoreFunc::Sigmoid => logits.iter().map(|&l| sigmoid(l)).collect(),
        ScoreFunc::Softmax => {
            let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let e: Vec<f64> = logits.iter().map(|l| (l - top).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.into_iter().map(|e| e / sum).collect()
        }
    }
}

fn score_backward(func: ScoreFunc, s: &[f64], d_s: &[f64]) -> Vec<f64> {
    let mean: f64 = s.iter().zip(d_s).map(|(s, d)| s * d).sum();
    let each = |(s, d): (&f64, &f64)| match func {
        ScoreFunc::Softmax => s * (d - mean),
        ScoreFunc::Sigmoid => d * s * (1.0 - s),
    };
    s.iter().zip(d_s).map(each).collect()
}

fn divisor(options: Options, picked: &[f64]) -> f64 {
    if options.route_norm { picked.iter().sum::<f64>() + 1e-20 } else { 1.0 }
}

/// The indices of the `k` largest values, the largest first; of equal ones the lowest index.
fn top<T: Real>(values: &[T], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    let value = |i: &u32| values[*i as usize].wide();
    order.sort_by(|a, b| value(b).total_cmp(&value(a)).then(a.cmp(b)));
    order.truncate(k);
    order
}

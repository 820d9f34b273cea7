//! Linear layers whose GEMMs run on fp8 codes: the grouped op of the routed experts and the recipes for dense
//! layers.
//!
//! Each GEMM quantizes both operands along the dimension that *it* contracts, so activations, gradients and
//! weights are quantized twice per step, and no codes serve two GEMMs of the row-wise recipes. Sums are f64
//! here; the factors `1/s` come after the sum. `fprop`, `dgrad` and `wgrad` give the f64 products;
//! [`forward`] and [`backward`] round them to bf16 as torchao does.
//!
//! Definition: torchao `prototype/moe_training` (`_to_fp8_rowwise_then_scaled_grouped_mm`) and
//! `float8/config.py`, commit `36027d82d`.

use super::elementwise::round_bf16;
use super::gemm::{self, Scales};
use super::quantize::{Quantized, colwise, rowwise, tensorwise, weight_along_k, weight_along_n};
use crate::num::Fp8;

/// How a linear layer's operands become fp8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// e4m3 everywhere, one power-of-two scale per contracted row. The only recipe of the grouped op.
    Rowwise,
    /// One scale per tensor, not rounded; e4m3 for input and weight, e5m2 for the output's gradient.
    Tensorwise,
    /// Row-wise forward; input gradient from row-wise d_out and a weight with one power-of-two scale; weight
    /// gradient without fp8.
    RowwiseWithGwHp,
}

/// The shape of a (grouped) linear layer: x (M, K), w (G, N, K), out (M, N).
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// The recipe; groups other than one over all rows are only defined for [`Recipe::Rowwise`].
    pub recipe: Recipe,
    /// Exclusive end rows of the groups (G); `[M]` for a dense layer.
    pub offs: &'a [u32],
    /// Output width.
    pub n: usize,
    /// Input width.
    pub k: usize,
}

/// `out = x w[g]^T`, (M, N), both quantized along K.
pub fn fprop(layer: Layer, x: &[f32], w: &[f32]) -> Vec<f64> {
    let Layer { recipe, offs, n, k } = layer;
    let (x, w) = match recipe {
        Recipe::Tensorwise => (tensorwise(x, Fp8::E4m3, false), tensorwise(w, Fp8::E4m3, false)),
        _ => (rowwise(x, x.len() / k, k, Fp8::E4m3), weight_along_k(w, offs.len(), n, k, Fp8::E4m3)),
    };
    let m = x.codes.len() / k;
    let (row, col) = (spread(&x, m), spread(&w, offs.len() * n));
    gemm::nt(&x.values(), &w.values(), offs, n, k, Scales { row: Some(&row), col: Some(&col) })
}

/// `d_x = d_out w[g]`, (M, K), both quantized along N.
pub fn dgrad(layer: Layer, d_out: &[f32], w: &[f32]) -> Vec<f64> {
    let Layer { recipe, offs, n, k } = layer;
    let m = d_out.len() / n;
    let (d_out, w) = match recipe {
        Recipe::Rowwise => (rowwise(d_out, m, n, Fp8::E4m3), weight_along_n(w, offs.len(), n, k, Fp8::E4m3)),
        Recipe::Tensorwise => (tensorwise(d_out, Fp8::E5m2, false), tensorwise(w, Fp8::E4m3, false)),
        Recipe::RowwiseWithGwHp => (rowwise(d_out, m, n, Fp8::E4m3), tensorwise(w, Fp8::E4m3, true)),
    };
    let (row, col) = (spread(&d_out, m), spread(&w, offs.len() * k));
    gemm::nn(&d_out.values(), &w.values(), offs, n, k, Scales { row: Some(&row), col: Some(&col) })
}

/// `d_w[g] = d_out_g^T x_g`, (G, N, K), both quantized along the rows of each group.
pub fn wgrad(layer: Layer, d_out: &[f32], x: &[f32]) -> Vec<f64> {
    let Layer { recipe, offs, n, k } = layer;
    let m = x.len() / k;
    let (d_out, x) = match recipe {
        Recipe::Rowwise => (colwise(d_out, m, n, offs, Fp8::E4m3), colwise(x, m, k, offs, Fp8::E4m3)),
        Recipe::Tensorwise => (tensorwise(d_out, Fp8::E5m2, false), tensorwise(x, Fp8::E4m3, false)),
        Recipe::RowwiseWithGwHp => {
            return gemm::tn(&super::widen(d_out), &super::widen(x), offs, n, k, Scales::NONE);
        }
    };
    let (row, col) = (spread(&d_out, offs.len() * n), spread(&x, offs.len() * k));
    gemm::tn(&d_out.values(), &x.values(), offs, n, k, Scales { row: Some(&row), col: Some(&col) })
}

/// [`fprop`] rounded to bf16: out (M, N).
pub fn forward(layer: Layer, x: &[f32], w: &[f32]) -> Vec<f32> {
    round(&fprop(layer, x, w))
}

/// [`dgrad`] and [`wgrad`] rounded to bf16: d_x (M, K), d_w (G, N, K).
pub fn backward(layer: Layer, x: &[f32], w: &[f32], d_out: &[f32]) -> (Vec<f32>, Vec<f32>) {
    (round(&dgrad(layer, d_out, w)), round(&wgrad(layer, d_out, x)))
}

/// Every element rounded to bf16, as f32.
fn round(x: &[f64]) -> Vec<f32> {
    super::narrow(&round_bf16(x))
}

/// The factors `1/s`, a tensor's single one repeated `len` times.
fn spread(q: &Quantized, len: usize) -> Vec<f32> {
    let factors = q.inverse();
    if factors.len() == 1 { vec![factors[0]; len] } else { factors }
}

//! Root-mean-square normalization: `y = x / sqrt(mean(x^2) + eps) * w` for each row.
//!
//! Definition: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); PyTorch's `nn.RMSNorm`.

use super::{Real, narrow, widen};

/// x (rows, D), w (D) -> y (rows, D).
pub fn forward<T: Real>(x: &[T], w: &[T], eps: f64) -> Vec<T> {
    let (x, w) = (widen(x), widen(w));
    let mut y = Vec::with_capacity(x.len());
    for row in rows(&x, w.len()) {
        let r = inverse_rms(row, eps);
        y.extend(row.iter().zip(&w).map(|(x, w)| x * r * w));
    }
    narrow(&y)
}

/// d_y (rows, D) -> d_x (rows, D), d_w (D).
///
/// With `r = 1/rms` and `h = d_y * w`: `d_x = r h - x r^3 mean(h x)`; `d_w = sum over rows of d_y x r`.
pub fn backward<T: Real>(x: &[T], w: &[T], d_y: &[T], eps: f64) -> (Vec<T>, Vec<T>) {
    assert_eq!(x.len(), d_y.len(), "rmsnorm: x has {} elements, d_y {}", x.len(), d_y.len());
    let (x, w, d_y) = (widen(x), widen(w), widen(d_y));
    let width = w.len();
    let (mut d_x, mut d_w) = (Vec::with_capacity(x.len()), vec![0.0; width]);
    for (row, d_row) in rows(&x, width).zip(rows(&d_y, width)) {
        let r = inverse_rms(row, eps);
        let dot: f64 = (0..width).map(|i| d_row[i] * w[i] * row[i]).sum();
        let mean = dot / width as f64;
        for i in 0..width {
            d_x.push(r * d_row[i] * w[i] - row[i] * r * r * r * mean);
            d_w[i] += d_row[i] * row[i] * r;
        }
    }
    (narrow(&d_x), narrow(&d_w))
}

fn inverse_rms(row: &[f64], eps: f64) -> f64 {
    let mean = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
    1.0 / (mean + eps).sqrt()
}

#[track_caller]
fn rows(x: &[f64], width: usize) -> std::slice::Chunks<'_, f64> {
    assert!(width > 0 && x.len().is_multiple_of(width), "{} elements are no rows of {width}", x.len());
    x.chunks(width)
}

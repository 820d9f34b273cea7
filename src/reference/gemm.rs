//! Grouped matrix products: each group of rows has its own weight. The three forms of a linear layer's three
//! GEMMs.
//!
//! M rows of tokens, K input width, N output width, G groups; `offs` (G) are the exclusive end rows of the
//! groups. Rows past the last end belong to no group: they come out zero whatever they hold, and touch
//! nothing. An empty group's weight gradient is zero. Letters nt, nn, tn as in BLAS: which operand stands
//! transposed. One group whose end is M is the plain product.

use super::quantize::groups;
use super::{Real, narrow, widen};

/// Factors applied after the sum, in the order row, column; absent means 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scales<'a> {
    /// One per output row: M for nt and nn; G*N for tn.
    pub row: Option<&'a [f32]>,
    /// One per group and output column: G*N for nt, G*K for nn and tn.
    pub col: Option<&'a [f32]>,
}

impl Scales<'_> {
    /// No factors.
    pub const NONE: Scales<'static> = Scales { row: None, col: None };

    fn apply(&self, sum: f64, row: usize, col: usize) -> f64 {
        let factor = |s: Option<&[f32]>, i: usize| s.map_or(1.0, |s| s[i] as f64);
        sum * factor(self.row, row) * factor(self.col, col)
    }

    fn check(&self, rows: usize, cols: usize) {
        let wrong = |s: Option<&[f32]>, len: usize| s.is_some_and(|s| s.len() != len);
        let (row, col) = (self.row.map(<[_]>::len), self.col.map(<[_]>::len));
        assert!(!wrong(self.row, rows), "row factors: {row:?}, want {rows}");
        assert!(!wrong(self.col, cols), "column factors: {col:?}, want {cols}");
    }
}

/// Forward, `out = a w[g]^T`: a (M, K), w (G, N, K) -> out (M, N).
pub fn nt<T: Real>(a: &[T], w: &[T], offs: &[u32], n: usize, k: usize, scales: Scales) -> Vec<T> {
    let m = rows_of("a", a.len(), k);
    assert_eq!(w.len(), offs.len() * n * k, "w: {} elements for {} x {n} x {k}", w.len(), offs.len());
    scales.check(m, offs.len() * n);
    let (a, w) = (widen(a), widen(w));
    let mut out = vec![0.0; m * n];
    for (g, rows) in groups(offs, m).enumerate() {
        for row in rows {
            for col in 0..n {
                let w_row = &w[(g * n + col) * k..][..k];
                let sum = a[row * k..][..k].iter().zip(w_row).map(|(a, w)| a * w).sum();
                out[row * n + col] = scales.apply(sum, row, g * n + col);
            }
        }
    }
    narrow(&out)
}

/// Gradient of the input, `d_a = d_out w[g]`: d_out (M, N), w (G, N, K) -> d_a (M, K).
pub fn nn<T: Real>(d_out: &[T], w: &[T], offs: &[u32], n: usize, k: usize, scales: Scales) -> Vec<T> {
    let m = rows_of("d_out", d_out.len(), n);
    assert_eq!(w.len(), offs.len() * n * k, "w: {} elements for {} x {n} x {k}", w.len(), offs.len());
    scales.check(m, offs.len() * k);
    let (d_out, w) = (widen(d_out), widen(w));
    let mut d_a = vec![0.0; m * k];
    for (g, rows) in groups(offs, m).enumerate() {
        for row in rows {
            let d_row = &mut d_a[row * k..][..k];
            for (col, &d) in d_out[row * n..][..n].iter().enumerate() {
                add_scaled(d_row, d, &w[(g * n + col) * k..][..k]);
            }
            for (i, v) in d_row.iter_mut().enumerate() {
                *v = scales.apply(*v, row, g * k + i);
            }
        }
    }
    narrow(&d_a)
}

/// Gradient of the weight, `d_w[g] = d_out_g^T a_g`: d_out (M, N), a (M, K) -> d_w (G, N, K).
pub fn tn<T: Real>(d_out: &[T], a: &[T], offs: &[u32], n: usize, k: usize, scales: Scales) -> Vec<T> {
    let m = rows_of("a", a.len(), k);
    assert_eq!(d_out.len(), m * n, "d_out: {} elements for {m} x {n}", d_out.len());
    scales.check(offs.len() * n, offs.len() * k);
    let (d_out, a) = (widen(d_out), widen(a));
    let mut d_w = vec![0.0; offs.len() * n * k];
    for (g, rows) in groups(offs, m).enumerate() {
        if rows.is_empty() {
            continue; // exact zeros, without a factor's sign or NaN
        }
        for col in 0..n {
            let d_row = &mut d_w[(g * n + col) * k..][..k];
            for row in rows.clone() {
                add_scaled(d_row, d_out[row * n + col], &a[row * k..][..k]);
            }
            for (i, v) in d_row.iter_mut().enumerate() {
                *v = scales.apply(*v, g * n + col, g * k + i);
            }
        }
    }
    narrow(&d_w)
}

/// `sum += factor * x`, element by element.
fn add_scaled(sum: &mut [f64], factor: f64, x: &[f64]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += factor * x;
    }
}

#[track_caller]
fn rows_of(name: &str, len: usize, width: usize) -> usize {
    assert!(width > 0 && len.is_multiple_of(width), "{name}: {len} elements are no rows of {width}");
    len / width
}

//! fp8 quantization of matrices: along rows, along the columns of each group of rows, or with one scale per
//! tensor.
//!
//! Which one an operand needs follows from the dimension its GEMM contracts (torchao
//! `prototype/moe_training`, commit `36027d82d`); the rules for scale and code are in [`crate::num`]. Codes
//! come out in the shape and order of the input.

use crate::num::{Fp8, scale};

/// Codes and the multipliers that made them.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// One byte per element, in the input's order.
    pub codes: Vec<u8>,
    /// Multipliers from high precision to fp8: one per row, per (group, column), or one in all.
    pub scale: Vec<f32>,
    /// What the codes mean.
    pub format: Fp8,
}

impl Quantized {
    /// The values of the codes, exact, not divided by the scale.
    pub fn values(&self) -> Vec<f64> {
        self.codes.iter().map(|&c| self.format.decode(c) as f64).collect()
    }

    /// `1/s` of every scale in f32: what a GEMM multiplies its sums with.
    pub fn inverse(&self) -> Vec<f32> {
        self.scale.iter().map(|&s| scale::inverse(s)).collect()
    }
}

/// One power-of-two scale per row: x (rows, cols) -> codes (rows, cols), scale (rows).
pub fn rowwise(x: &[f32], rows: usize, cols: usize, format: Fp8) -> Quantized {
    assert_eq!(x.len(), rows * cols, "rowwise: {} elements for {rows} x {cols}", x.len());
    let row = |r: usize| &x[r * cols..(r + 1) * cols];
    let scale: Vec<f32> =
        (0..rows).map(|r| scale::row_scale(scale::amax_bits(row(r).iter().copied()), format)).collect();
    let codes = (0..rows).flat_map(|r| row(r).iter().map(move |&v| (v, r)));
    let codes = codes.map(|(v, r)| format.quantize(v, scale[r])).collect();
    Quantized { codes, scale, format }
}

/// One power-of-two scale per group and column: x (rows, cols), offs end rows (G) -> codes (rows, cols),
/// scale (G*cols) at `g * cols + column`.
///
/// A group without rows has the scale of zeros (2^48 for e4m3). Rows past the last offset belong to no group:
/// whatever they hold, their codes are 0.
pub fn colwise(x: &[f32], rows: usize, cols: usize, offs: &[u32], format: Fp8) -> Quantized {
    assert_eq!(x.len(), rows * cols, "colwise: {} elements for {rows} x {cols}", x.len());
    let mut codes = vec![0; rows * cols];
    let mut scale = Vec::with_capacity(offs.len() * cols);
    for rows in groups(offs, rows) {
        for column in 0..cols {
            let s = scale::row_scale(scale::amax_bits(rows.clone().map(|r| x[r * cols + column])), format);
            for r in rows.clone() {
                codes[r * cols + column] = format.quantize(x[r * cols + column], s);
            }
            scale.push(s);
        }
    }
    Quantized { codes, scale, format }
}

/// A weight w (E, N, K) for a GEMM that contracts K: codes (E, N, K), scale (E*N) at `e * N + n`.
pub fn weight_along_k(w: &[f32], e: usize, n: usize, k: usize, format: Fp8) -> Quantized {
    rowwise(w, e * n, k, format)
}

/// A weight w (E, N, K) for a GEMM that contracts N: codes (E, N, K), scale (E*K) at `e * K + k`.
pub fn weight_along_n(w: &[f32], e: usize, n: usize, k: usize, format: Fp8) -> Quantized {
    let ends: Vec<u32> = (1..=e).map(|g| (g * n) as u32).collect();
    colwise(w, e * n, k, &ends, format)
}

/// One scale for the whole tensor, rounded down to a power of two if `power_of_two`: codes like x, scale (1).
///
/// The power of two is for the `rowwise_with_gw_hp` recipe; `tensorwise` keeps the quotient.
pub fn tensorwise(x: &[f32], format: Fp8, power_of_two: bool) -> Quantized {
    let amax = scale::amax_bits(x.iter().copied());
    let s = if power_of_two { scale::row_scale(amax, format) } else { scale::tensor_scale(amax, format) };
    Quantized { codes: x.iter().map(|&v| format.quantize(v, s)).collect(), scale: vec![s], format }
}

/// The rows of each group: `offs[g]` is where group g ends (exclusive) and group g+1 begins. Ends must not
/// fall and not pass `rows`.
pub fn groups(offs: &[u32], rows: usize) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
    assert!(offs.is_sorted(), "group ends must not fall: {offs:?}");
    let end = offs.last().map_or(0, |&o| o as usize);
    assert!(end <= rows, "groups end at row {end}, the matrix has {rows} rows");
    offs.iter().scan(0, |start, &end| {
        let rows = *start..end as usize;
        *start = end as usize;
        Some(rows)
    })
}

//! Token embedding: row `token` of a table, and the sum of gradients per token.

use super::{Real, narrow};

/// table (V, D), tokens (T) -> out (T, D). Every token must be below V.
pub fn forward<T: Real>(table: &[T], tokens: &[u32], width: usize) -> Vec<T> {
    tokens.iter().flat_map(|&t| &table[t as usize * width..][..width]).copied().collect()
}

/// tokens (T), d_out (T, D) -> d_table (V, D): each row the sum of its token's gradients in order of
/// position.
pub fn backward<T: Real>(tokens: &[u32], d_out: &[T], vocabulary: usize, width: usize) -> Vec<T> {
    assert_eq!(d_out.len(), tokens.len() * width, "d_out for {} tokens of width {width}", tokens.len());
    let mut d_table = vec![0.0; vocabulary * width];
    for (&t, row) in tokens.iter().zip(d_out.chunks(width)) {
        let sum = &mut d_table[t as usize * width..][..width];
        sum.iter_mut().zip(row).for_each(|(s, d)| *s += d.wide());
    }
    narrow(&d_table)
}

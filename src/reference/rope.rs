//! Rotary position embedding on adjacent pairs: elements (2i, 2i+1) of a head turn by `position *
//! theta^(-2i/d)`.
//!
//! Definition: Su et al., "RoFormer" (2021), in the complex form of torchtitan's Llama4 (July 2025), where
//! the angles are f32.

use super::{Real, narrow, widen};

/// Cosines and sines of every position and pair, each (S, d/2).
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// `cos(angle)`, (S, d/2).
    pub cos: Vec<f32>,
    /// `sin(angle)`, (S, d/2).
    pub sin: Vec<f32>,
}

/// The table for S positions and heads of `head_dim` (even) elements.
///
/// Frequencies and angles are rounded to f32 as upstream's are: at position 2000 the rounding of the angle
/// alone is 1e-4.
pub fn table(seq: usize, head_dim: usize, theta: f64) -> Table {
    assert!(head_dim.is_multiple_of(2), "a head of {head_dim} elements has no pairs");
    let frequency = |pair: usize| {
        let exponent = (2 * pair) as f32 / head_dim as f32;
        1.0 / theta.powf(exponent as f64) as f32
    };
    let angles =
        (0..seq).flat_map(|t| (0..head_dim / 2).map(move |pair| (t as f32 * frequency(pair)) as f64));
    let (cos, sin) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
    Table { cos, sin }
}

/// x (B, S, H, d) turned by the table's angles: y (B, S, H, d). S is the table's.
pub fn forward<T: Real>(x: &[T], table: &Table, heads: usize, head_dim: usize) -> Vec<T> {
    turn(x, table, heads, head_dim, 1.0)
}

/// The gradient turns back: d_y (B, S, H, d) -> d_x (B, S, H, d).
pub fn backward<T: Real>(d_y: &[T], table: &Table, heads: usize, head_dim: usize) -> Vec<T> {
    turn(d_y, table, heads, head_dim, -1.0)
}

fn turn<T: Real>(x: &[T], table: &Table, heads: usize, head_dim: usize, direction: f64) -> Vec<T> {
    let (half, seq) = (head_dim / 2, table.cos.len() * 2 / head_dim);
    assert_eq!(x.len() % (seq * heads * head_dim), 0, "{} elements, {seq} x {heads} x {head_dim}", x.len());
    let mut y = widen(x);
    for (vector, head) in y.chunks_mut(head_dim).enumerate() {
        let position = vector / heads % seq;
        for (pair, v) in head.chunks_mut(2).enumerate() {
            let (c, s) = (table.cos[position * half + pair] as f64, table.sin[position * half + pair] as f64);
            let s = direction * s;
            (v[0], v[1]) = (v[0] * c - v[1] * s, v[0] * s + v[1] * c);
        }
    }
    narrow(&y)
}

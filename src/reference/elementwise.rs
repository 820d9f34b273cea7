//! Element by element: sums, factors, and the rounding to bf16 that a store in that type is.

use super::Real;
use crate::num::bf16;

/// `a + b`, of one shape.
pub fn add<T: Real>(a: &[T], b: &[T]) -> Vec<T> {
    assert_eq!(a.len(), b.len(), "add: a has {} elements, b {}", a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| T::narrow(a.wide() + b.wide())).collect()
}

/// `factor * a`.
pub fn scale<T: Real>(a: &[T], factor: f64) -> Vec<T> {
    a.iter().map(|a| T::narrow(a.wide() * factor)).collect()
}

/// Every element rounded to the nearest bf16 (by way of f32), ties to even.
pub fn round_bf16<T: Real>(a: &[T]) -> Vec<T> {
    a.iter().map(|a| T::narrow(bf16::round(a.wide() as f32) as f64)).collect()
}

//! The gate of a feed-forward layer: `silu(a) * b` with `silu(a) = a / (1 + exp(-a))`.
//!
//! Definition: Shazeer, "GLU Variants Improve Transformer" (2020). a is the product with w1, b the one with
//! w3.

use super::Real;

/// a, b -> silu(a) * b, all of one shape.
pub fn forward<T: Real>(a: &[T], b: &[T]) -> Vec<T> {
    assert_eq!(a.len(), b.len(), "swiglu: a has {} elements, b {}", a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| T::narrow(a.wide() * sigmoid(a.wide()) * b.wide())).collect()
}

/// d_out -> d_a, d_b.
pub fn backward<T: Real>(a: &[T], b: &[T], d_out: &[T]) -> (Vec<T>, Vec<T>) {
    assert_eq!([a.len(), b.len()], [d_out.len(); 2], "swiglu: elements of a and b, and of d_out");
    let each = |((a, b), d): ((&T, &T), &T)| {
        let (a, b, d) = (a.wide(), b.wide(), d.wide());
        let s = sigmoid(a);
        (T::narrow(d * b * s * (1.0 + a * (1.0 - s))), T::narrow(d * a * s))
    };
    a.iter().zip(b).zip(d_out).map(each).unzip()
}

/// `1 / (1 + exp(-x))`; at large `-x` the exponential overflows to infinity and the quotient is 0, as it
/// should.
pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

//! Gradient clipping by the global norm.
//!
//! Definition: PyTorch's `clip_grad_norm_`: with the 2-norm over all gradients, a factor `min(1, max_norm /
//! (norm + 1e-6))` on each.

use super::Real;

/// The sum of squares of `g`; the squared norm is the sum of these over all parameters (and ranks).
pub fn sum_squares<T: Real>(g: &[T]) -> f64 {
    g.iter().map(|g| g.wide() * g.wide()).sum()
}

/// The factor on every gradient for a global norm of `norm`; at most 1, NaN for NaN.
pub fn coefficient(norm: f64, max_norm: f64) -> f64 {
    let factor = max_norm / (norm + 1e-6);
    if factor > 1.0 { 1.0 } else { factor }
}

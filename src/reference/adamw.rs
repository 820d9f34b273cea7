//! AdamW: Adam with decoupled weight decay.
//!
//! Definition: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), in the order of
//! PyTorch's `AdamW`.

use super::Real;

/// The optimizer's constants; PyTorch's names.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root.
    pub eps: f64,
    /// Decay of the parameter per unit of learning rate.
    pub weight_decay: f64,
}

/// Parameter, first and second moment, all of one length, updated in place.
#[derive(Debug)]
pub struct State<'a, T> {
    /// The parameter.
    pub p: &'a mut [T],
    /// Running mean of gradients.
    pub m: &'a mut [T],
    /// Running mean of squared gradients.
    pub v: &'a mut [T],
}

/// Step `t` (from 1) with gradient `g` times `clip` (1 for none): `p *= 1 - lr wd; m = b1 m + (1-b1) g; v =
/// b2 v + (1-b2) g^2; p -= lr m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps)`.
pub fn step<T: Real>(options: Options, t: i32, clip: f64, state: State<T>, g: &[T]) {
    let Options { lr, beta1, beta2, eps, weight_decay } = options;
    let State { p, m, v } = state;
    assert_eq!([p.len(), m.len(), v.len()], [g.len(); 3], "elements of p, m, v, and of g");
    let (correct1, correct2) = (1.0 - beta1.powi(t), 1.0 - beta2.powi(t));
    for (i, g) in g.iter().enumerate() {
        let g = g.wide() * clip;
        m[i] = T::narrow(beta1 * m[i].wide() + (1.0 - beta1) * g);
        v[i] = T::narrow(beta2 * v[i].wide() + (1.0 - beta2) * g * g);
        let update = m[i].wide() / correct1 / ((v[i].wide() / correct2).sqrt() + eps);
        p[i] = T::narrow(p[i].wide() * (1.0 - lr * weight_decay) - lr * update);
    }
}

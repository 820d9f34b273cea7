//! Load balancing without an auxiliary loss: the selection bias of an expert that got fewer rows than the
//! mean rises.
//!
//! Definition: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024), in
//! torchtitan's form, which takes out the mean of the change.

use super::Real;

/// bias (E) moves by `coeff * sign(mean(counts) - counts)`, less the mean of that. counts (E): routed rows
/// since the last update, over all data-parallel ranks.
pub fn update<T: Real>(bias: &mut [T], counts: &[u32], coeff: f64) {
    assert_eq!(bias.len(), counts.len(), "biases and counts of experts");
    let counts: Vec<f64> = counts.iter().map(|&c| c as f64).collect();
    let mean = counts.iter().sum::<f64>() / counts.len() as f64;
    let sign = |c: &f64| if *c == mean { 0.0 } else { (mean - c).signum() };
    let delta: Vec<f64> = counts.iter().map(|c| coeff * sign(c)).collect();
    let drift = delta.iter().sum::<f64>() / delta.len() as f64;
    bias.iter_mut().zip(delta).for_each(|(b, d)| *b = T::narrow(b.wide() + d - drift));
}

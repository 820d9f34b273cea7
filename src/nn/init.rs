//! Initial values: element i of a parameter is a pure function of the seed, its name and i, so that the number of
//! ranks changes nothing.

use crate::num::rng;
use crate::params::{Init, Spec};

/// The seed of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(pub u64);

/// A function from element number to initial value, for one parameter.
pub fn initial_value(spec: &Spec, seed: Seed) -> Box<dyn Fn(usize) -> f32 + Sync> {
    match spec.init {
        Init::Ones => Box::new(|_| 1.0),
        Init::Normal { std, cut } => {
            let stream = rng::Stream::new(seed.0, &spec.name);
            let (std, cut) = (f64::from(std), f64::from(cut));
            if cut.is_finite() {
                Box::new(move |i| stream.trunc_normal(i as u64, std, -cut, cut))
            } else {
                Box::new(move |i| stream.normal(i as u64) * std as f32)
            }
        }
    }
}

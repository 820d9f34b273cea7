//! Warm-up, stable phase, decay.
//!
//! Definition: torchtitan `components/lr_scheduler.py`, July 2025.

use crate::config::DecayType;

/// Factors on the peak learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    warmup: usize,
    stable: usize,
    decay: usize,
    curve: DecayType,
    min: f64,
}

impl Schedule {
    /// A schedule for `steps` steps. The decay takes `decay_ratio` of them, or all after the warm-up; where
    /// warm-up and decay overlap, the decay is shortened. `min` is the last factor.
    pub fn new(
        steps: usize,
        warmup: usize,
        decay_ratio: Option<f64>,
        curve: DecayType,
        min: f64,
    ) -> Schedule {
        let warmup = warmup.min(steps);
        let wanted = decay_ratio.map_or(steps - warmup, |r| (r * steps as f64).round() as usize);
        let decay = wanted.min(steps - warmup);
        Schedule { warmup, stable: steps + 1 - warmup - decay, decay, curve, min }
    }

    /// The factor of step `step`, counted from 0.
    pub fn factor(&self, step: usize) -> f64 {
        if step < self.warmup {
            return (step + 1) as f64 / self.warmup as f64;
        }
        if step < self.warmup + self.stable {
            return 1.0;
        }
        let progress = (step + 1 - self.warmup - self.stable) as f64 / self.decay as f64;
        let curve = match self.curve {
            DecayType::Linear => 1.0 - progress,
            DecayType::Sqrt => 1.0 - progress.sqrt(),
            DecayType::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.min + (1.0 - self.min) * curve
    }
}

#[cfg(test)]
mod tests {
    use super::{DecayType, Schedule};

    #[test]
    fn ten_steps_are_upstreams() {
        let s = Schedule::new(10, 2, Some(0.8), DecayType::Linear, 0.1);
        let want = [0.5, 1.0, 1.0, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125];
        for (step, w) in want.iter().enumerate() {
            assert!((s.factor(step) - w).abs() < 1e-12, "step {step}: {} is not {w}", s.factor(step));
        }
    }

    #[test]
    fn a_hundred_steps_have_the_stable_phase() {
        let s = Schedule::new(100, 2, Some(0.8), DecayType::Linear, 0.1);
        assert_eq!((s.warmup, s.stable, s.decay), (2, 19, 80));
    }

    #[test]
    fn short_runs_do_not_break() {
        for steps in 1..5 {
            for curve in [DecayType::Linear, DecayType::Sqrt, DecayType::Cosine] {
                let s = Schedule::new(steps, 200, Some(0.8), curve, 0.0);
                assert!((0..steps).all(|i| s.factor(i) > 0.0 && s.factor(i) <= 1.0), "{steps} {curve:?}");
            }
        }
    }
}

//! AdamW over the segments of a rank's shards.

use crate::Result;
use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::adamw;
use crate::params::{Layout, Shards, Store};
use crate::tensor::Tensor;

/// The numbers that do not change from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay, on all parameters (torchtitan, July 2025).
    pub weight_decay: f32,
}

/// Both moments in f32, sharded like the parameters.
pub struct AdamW {
    hyper: Hyper,
    m: Store,
    v: Store,
    steps: u32,
}

impl AdamW {
    /// Zero moments.
    ///
    /// # Errors
    /// Out of device memory.
    pub fn new(gpu: &Gpu, layout: &Layout, hyper: Hyper) -> Result<AdamW> {
        let m = Store::zeros(gpu, layout, DType::F32, "first moment")?;
        Ok(AdamW { hyper, m, v: Store::zeros(gpu, layout, DType::F32, "second moment")?, steps: 0 })
    }

    /// One update of `shards` from their gradients times `coefficient` (flat f32 (1): the clipping factor).
    ///
    /// # Errors
    /// What the device reported.
    pub fn step(&mut self, gpu: &Gpu, shards: &Shards<'_>, coefficient: &Tensor, lr: f32) -> Result<()> {
        self.steps += 1;
        let Hyper { beta1, beta2, eps, weight_decay } = self.hyper;
        let step = adamw::Step { lr, beta1, beta2, eps, weight_decay, step: self.steps };
        let moments = self.m.segments().into_iter().zip(self.v.segments());
        let low = shards.take_low().map(Store::segments).unwrap_or_default();
        let values = shards.master.segments().into_iter().zip(shards.grads.segments());
        for (i, ((param, grad), (m, v))) in values.zip(moments).enumerate() {
            let state = adamw::State { param: &param, low: low.get(i), m: &m, v: &v };
            adamw::step(gpu, &state, &grad, coefficient, &step)?;
        }
        Ok(())
    }
}

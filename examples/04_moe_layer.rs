//! You learn: what a Mixture-of-Experts layer does to its tokens, step by step, and how the tape differentiates it.

use moe8::autograd::{Readers, Tape};
use moe8::gpu::{DeviceChoice, Gpu};
use moe8::num::DType;
use moe8::num::rng::Stream;
use moe8::ops::fp8_linear::Recipe;
use moe8::ops::router::{ScoreFunc, Spec};
use moe8::params::{ParamId, Weights};
use moe8::reference::compare::sqnr_db;
use moe8::tensor::Tensor;
use std::cell::RefCell;

const T: usize = 12; // tokens
const D: usize = 20; // width
const F: usize = 28; // hidden width
const E: usize = 4; // experts
const K: usize = 2; // experts per token

/// The tape asks for parameters and hands out their gradients; `Fsdp` is the one that shards them over ranks.
struct Bank(Vec<Tensor>, RefCell<Vec<Option<Tensor>>>);

impl Weights for Bank {
    fn weight(&self, id: ParamId) -> moe8::Result<Tensor> {
        Ok(self.0[id.0].clone())
    }
    fn gradient(&self, id: ParamId, gradient: Tensor) -> moe8::Result<()> {
        self.1.borrow_mut()[id.0] = Some(gradient);
        Ok(())
    }
    fn leave(&self, _block: usize) -> moe8::Result<()> {
        Ok(())
    }
}

fn normal(name: &str, len: usize, std: f32) -> Vec<f32> {
    let stream = Stream::new(4, name);
    (0..len as u64).map(|i| std * stream.normal(i)).collect()
}

/// The layer's output, the rows of each expert, and the gradients of `sum(seed * output)`: of x, then of the weights.
type Results = (Vec<f32>, Vec<u32>, Vec<Vec<f32>>);

fn layer(gpu: &Gpu, w2: &[f32], recipe: Recipe) -> moe8::Result<Results> {
    let make = |n: &str, shape: &[usize], v: &[f32]| Tensor::from_f32(gpu, n, shape, DType::F32, v);
    let drawn = |n: &str, shape: &[usize], std| make(n, shape, &normal(n, shape.iter().product(), std));
    let weights = vec![
        drawn("gate", &[E, D], 0.3)?,
        drawn("w1", &[E, F, D], 0.2)?,
        make("w2", &[E, D, F], w2)?,
        drawn("w3", &[E, F, D], 0.2)?,
    ];
    let bank = Bank(weights, RefCell::new(vec![None; 4]));
    let mut tape = Tape::new(gpu, &bank);
    let x = tape.leaf(drawn("x", &[T, D], 1.0)?);

    // 1. Route: a score per expert, the best K of each token. The bias moves the choice, not the score.
    let bias = Tensor::from_flat_f32(gpu, "bias", &[0.0; E])?;
    let logits = tape.linear(&x, ParamId(0), None, Recipe::HighPrecision)?;
    let spec = Spec { experts: E, top_k: K, func: ScoreFunc::Sigmoid, norm: false, scale: 1.0 };
    let (scores, ids) = tape.router(&logits, &bias, spec)?;
    // 2. Gather: T * K rows, sorted by expert. Counts and offsets stay on the device.
    let plan = tape.plan(&ids, E, K)?;
    let rows = tape.gather(&x, &plan, None, Readers::default())?;
    // 3. Experts: SwiGLU out of three grouped GEMMs.
    let gate = tape.linear(&rows, ParamId(1), Some(&plan.offs), recipe)?;
    let up = tape.linear(&rows, ParamId(3), Some(&plan.offs), recipe)?;
    let hidden = tape.swiglu(&gate, &up, Readers::default())?;
    let routed = tape.linear(&hidden, ParamId(2), Some(&plan.offs), recipe)?;
    // 4. Combine: each token's K rows, times their scores, summed.
    let y = tape.combine(&routed, &plan, Some(&scores), None)?;

    let d_x = tape.backward(&y, Some(drawn("seed", &[T, D], 1.0)?), &[&x])?.remove(0);
    let grads = std::iter::once(d_x).chain(bank.1.into_inner());
    let grads = grads.map(|g| g.expect("every weight was used").to_f32(gpu)).collect::<moe8::Result<_>>()?;
    Ok((y.value().to_f32(gpu)?, plan.counts.to_u32(gpu)?, grads))
}

fn main() -> moe8::Result<()> {
    let gpu = Gpu::open(&DeviceChoice::from_env())?;
    let (mut w2, seed) = (normal("w2", E * D * F, 0.2), normal("seed", T * D, 1.0));
    let (y, counts, grads) = layer(&gpu, &w2, Recipe::HighPrecision)?;
    println!("rows per expert: {counts:?}");
    assert_eq!(counts.iter().sum::<u32>() as usize, T * K);

    let cost = sqnr_db(&y, &layer(&gpu, &w2, Recipe::Rowwise)?.0);
    println!("with fp8 experts: {cost:.1} dB to the output in f32");
    assert!(cost > 20.0);

    // The layer is linear in w2, so the difference quotient is exact up to rounding.
    let busiest = (0..E).max_by_key(|e| counts[*e]).expect("there are experts");
    let at = busiest * D * F;
    w2[at] += 1.0;
    let moved = layer(&gpu, &w2, Recipe::HighPrecision)?.0;
    let slope: f32 = moved.iter().zip(&y).zip(&seed).map(|((a, b), s)| (a - b) * s).sum();
    println!("d loss / d w2[{busiest}, 0, 0]: {:.5} by the tape, {slope:.5} by difference", grads[3][at]);
    assert!((grads[3][at] - slope).abs() < 1e-4 * slope.abs().max(1.0));
    Ok(())
}

//! An MoE layer, forward and backward: router, dispatch, grouped experts, combine.

use super::check::{Check, read};
use super::data::{Random, places};
use super::runner::{Case, Work};
use super::step::Precision;
use crate::Result;
use crate::autograd::Tape;
use crate::config::{Config, ModelArgs};
use crate::gpu::Gpu;
use crate::nn::{Converters, Moe};
use crate::num::DType;
use crate::params::{ParamId, Table, Weights};
use crate::tensor::Tensor;
use std::rc::Rc;

/// Tokens that are checked.
const SAMPLES: usize = 8;
/// Standard deviation of all weights but the gate's.
const STD: f32 = 0.05;
/// A token is checked only if its best two experts' logits differ by more: a bf16 gate may choose either of closer ones.
const MARGIN: f64 = 0.1;
/// Largest error of all checked outputs together, as a part of their size (root mean squares): an f32 GEMM's, what some
/// roundings to 8 bits leave, and 16 dB of signal to noise, where two fp8 GEMMs in a row have about 20.
const LIMITS: [(Precision, f64); 3] =
    [(Precision::F32, 1e-4), (Precision::Bf16, 0.03), (Precision::Fp8, 0.16)];
/// One output may be off by this many times as much: more than the largest of many thousand normal errors.
const OUTLIER: f64 = 8.0;

/// Parameters that forget their gradients.
struct Held(Vec<Tensor>);

impl Weights for Held {
    fn weight(&self, id: ParamId) -> Result<Tensor> {
        Ok(self.0[id.0].clone())
    }

    fn gradient(&self, _: ParamId, _: Tensor) -> Result<()> {
        Ok(())
    }

    fn leave(&self, _: usize) -> Result<()> {
        Ok(())
    }
}

/// The layer with its weights and input.
struct Layer {
    moe: Moe,
    weights: Held,
    x: Tensor,
    d_out: Tensor,
    reference: Reference,
}

/// What the host needs to compute a token's output.
struct Reference {
    dim: usize,
    hidden: usize,
    experts: usize,
    x: Random,
    gate: Random,
    w1: Random,
    w2: Random,
    w3: Random,
}

/// `[T, D, F, E]`: tokens, width, hidden width and number of the experts; each token visits one. FLOPs are those of the routed
/// experts' nine products; checked are forward results.
///
/// # Errors
/// Limits or memory of the device.
pub fn case(gpu: &Gpu, [tokens, dim, hidden, experts]: [usize; 4], precision: Precision) -> Result<Case> {
    let args = ModelArgs {
        dim,
        num_experts: experts,
        top_k: 1,
        use_shared_expert: false,
        auto_scale_hidden_dim: false,
        // Just below `hidden`, but at least 1 after each rounding down, then rounded up to a multiple of `hidden`.
        ffn_dim_multiplier: Some((0.9 * hidden as f64).max(1.95) / (dim as f64 * 8.0 / 3.0)),
        multiple_of: hidden,
        ..ModelArgs::default()
    };
    // The layer has no output to filter.
    let mut keys = precision.overrides();
    keys.push("float8.filter_fqns=router.gate".into());
    let converters = Converters::new(&Config::load(None, &keys)?.config);
    let (moe, table) = Moe::build(gpu, &args, &converters, "moe", STD)?;
    let dtype = if precision == Precision::F32 { DType::F32 } else { DType::BF16 };
    let weights =
        table.iter().map(|(_, spec)| random(&spec.name, dtype).tensor(gpu, &spec.name, &spec.shape));
    let weights = Held(weights.collect::<Result<_>>()?);
    let x = Random::new("moe x", 1.0, dtype);
    let layer = Rc::new(Layer {
        moe,
        weights,
        x: x.tensor(gpu, "x", &[tokens, dim])?,
        d_out: Random::new("moe d_out", 1.0, dtype).tensor(gpu, "d_out", &[tokens, dim])?,
        reference: Reference::new(&table, x, (dim, hidden, experts), dtype),
    });
    let (run, limit) = (layer.clone(), LIMITS.iter().find(|(p, _)| *p == precision).map_or(0.0, |l| l.1));
    Ok(Case {
        op: "moe".into(),
        shape: format!("{tokens}x{dim}x{hidden}x{experts}"),
        groups: "routed".into(),
        dtype: precision.name().into(),
        work: Work::Flops(18.0 * tokens as f64 * dim as f64 * hidden as f64),
        run: Box::new(move |gpu| run.run(gpu)),
        check: Box::new(move |gpu, results| layer.reference.check(gpu, tokens, &results[0], limit)),
    })
}

fn random(name: &str, dtype: DType) -> Random {
    Random::new(name, if name.contains("gate") { 0.5 } else { STD }, dtype)
}

impl Layer {
    fn run(&self, gpu: &Gpu) -> Result<Vec<Tensor>> {
        let mut tape = Tape::new(gpu, &self.weights);
        let x = tape.leaf(self.x.clone());
        let done = self.moe.forward(&mut tape, &x)?;
        let out = done.out.value().clone();
        let d_x = tape.backward(&done.out, Some(self.d_out.clone()), &[&x])?;
        Ok(std::iter::once(out).chain(d_x.into_iter().flatten()).collect())
    }
}

impl Reference {
    fn new(table: &Table, x: Random, (dim, hidden, experts): (usize, usize, usize), dtype: DType) -> Self {
        let of = |part: &str| {
            let name = format!("moe.{part}");
            assert!(table.find(&name).is_some(), "the layer has {name}");
            random(&name, dtype)
        };
        Reference {
            dim,
            hidden,
            experts,
            x,
            gate: of("router.gate.weight"),
            w1: of("experts.w1"),
            w2: of("experts.w2"),
            w3: of("experts.w3"),
        }
    }

    /// The output of a token in f64 (softmax scores, applied before the experts), or none where the choice of the expert is close.
    fn token(&self, t: usize) -> Option<Vec<f64>> {
        let (dim, hidden) = (self.dim, self.hidden);
        let x = self.x.vector(t * dim, 1, dim);
        let x: Vec<f64> = x.into_iter().map(f64::from).collect();
        let dot = |w: &Random, row: usize, x: &[f64]| {
            let start = row * x.len();
            x.iter().enumerate().map(|(i, x)| x * f64::from(w.value(start + i))).sum::<f64>()
        };
        let logits: Vec<f64> = (0..self.experts).map(|e| dot(&self.gate, e, &x)).collect();
        let best = (0..self.experts).max_by(|a, b| logits[*a].total_cmp(&logits[*b]))?;
        let close = logits.iter().enumerate().any(|(e, l)| e != best && logits[best] - l < MARGIN);
        if close {
            return None;
        }
        let score = 1.0 / logits.iter().map(|l| (l - logits[best]).exp()).sum::<f64>();
        let x: Vec<f64> = x.iter().map(|x| x * score).collect();
        let h: Vec<f64> = (best * hidden..(best + 1) * hidden)
            .map(|row| {
                let gate = dot(&self.w1, row, &x);
                gate / (1.0 + (-gate).exp()) * dot(&self.w3, row, &x)
            })
            .collect();
        Some((best * dim..(best + 1) * dim).map(|row| dot(&self.w2, row, &h)).collect())
    }

    fn check(&self, gpu: &Gpu, tokens: usize, out: &Tensor, limit: f64) -> Result<Check> {
        let candidates = places(tokens, 1, 16 * SAMPLES).into_iter().map(|(t, _)| t);
        let wanted = candidates.filter_map(|t| Some((t, self.token(t)?))).take(SAMPLES);
        let wanted: Vec<(usize, usize, f64)> =
            wanted.flat_map(|(t, v)| v.into_iter().enumerate().map(move |(d, x)| (t, d, x))).collect();
        let rms = (wanted.iter().map(|w| w.2 * w.2).sum::<f64>() / wanted.len().max(1) as f64).sqrt();
        let samples: Vec<_> = wanted
            .into_iter()
            .map(|(row, col, want)| super::check::Sample { row, col, want, tolerance: OUTLIER * limit * rms })
            .collect();
        let got = read(gpu, out, &samples.iter().map(|s| (s.row, s.col)).collect::<Vec<_>>())?;
        let off = samples.iter().zip(&got).map(|(s, got)| (got - s.want).powi(2)).sum::<f64>();
        let error = (off / samples.len().max(1) as f64).sqrt() / rms.max(f64::MIN_POSITIVE);
        let check = Check::of("out", &samples, &got);
        let all =
            (error > limit).then(|| format!("all outputs together are off by {error:.3}, over {limit}"));
        Ok(Check { error, wrong: check.wrong.or(all) })
    }
}

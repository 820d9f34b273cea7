//! Cases bound by memory whose rows or values are looked up or kept: dispatch to experts, embedding, AdamW.

use super::activations::{InPlace, Rows, case, sample};
use super::check::{Check, Sample, read_flat};
use super::data::{Random, places};
use super::fused::{Make, quantized};
use super::runner::Case;
use crate::Result;
use crate::gpu::Gpu;
use crate::num::DType;
use crate::num::formula::{fnv1a, splitmix64};
use crate::ops::{adamw, dispatch, embedding};
use crate::reference;
use crate::tensor::Tensor;
use std::rc::Rc;

/// Places of each result that are checked.
const SAMPLES: usize = 24;

/// `n` numbers from `a` on, each a function of its place: below `below`, small ones more often (the cube of a uniform
/// number), as words and experts are.
fn skewed(name: &str, n: usize, below: usize) -> Vec<u32> {
    let seed = fnv1a(name.as_bytes());
    let one = |i| {
        let u = (splitmix64(seed, i) >> 11) as f64 / (1u64 << 53) as f64;
        ((u * u * u * below as f64) as usize).min(below - 1) as u32
    };
    (0..n as u64).map(one).collect()
}

/// Tokens, their experts, and where the rows go.
struct Routes {
    shape: [usize; 4],
    dtype: DType,
    x: Rows,
    rows: Rows,
    base: Rows,
    scores: Random,
    weights: Tensor,
    plan: dispatch::Plan,
    order: reference::dispatch::Plan,
}

impl Routes {
    /// `[T, D, E, K]`.
    fn new(gpu: &Gpu, shape: [usize; 4], dtype: DType) -> Result<Rc<Routes>> {
        let [t, d, e, k] = shape;
        let ids = skewed("experts", t * k, e);
        let scores = Random::new("scores", 1.0, DType::F32);
        Ok(Rc::new(Routes {
            shape,
            dtype,
            x: Rows::new(gpu, "tokens", [t, d], dtype)?,
            rows: Rows::new(gpu, "rows", [t * k, d], dtype)?,
            base: Rows::new(gpu, "base", [t, d], dtype)?,
            scores,
            weights: Tensor::from_flat_f32(gpu, "scores", &scores.vector(0, 1, t * k))?,
            plan: dispatch::plan(gpu, &Tensor::from_u32(gpu, "ids", &ids)?, e, k)?,
            order: reference::dispatch::plan(&ids, e),
        }))
    }

    /// A case that reads and writes `tokens` arrays of T rows, `routed` of T * K, and `flat` of T * K numbers.
    fn case(
        self: &Rc<Self>,
        op: &str,
        [tokens, routed, flat]: [usize; 3],
        run: impl Fn(&Gpu, &Routes) -> Result<Vec<Tensor>> + 'static,
        check: impl Fn(&Gpu, &Routes, &[Tensor]) -> Result<Check> + 'static,
    ) -> Case {
        let [t, d, _, k] = self.shape;
        let bytes = (tokens + routed * k) * t * d * self.dtype.size() + flat * 4 * t * k;
        let (one, two) = (self.clone(), self.clone());
        let check = move |gpu: &Gpu, results: &[Tensor]| check(gpu, &two, results);
        case(&format!("dispatch_{op}"), &self.shape, self.dtype, bytes, move |gpu| run(gpu, &one), check)
    }

    /// What `gather` makes of the tokens.
    fn gathered(&self, (r, c): (usize, usize), weighted: bool) -> Sample {
        let slot = self.order.slot_of_row[r] as usize;
        let v = self.x.at((slot / self.shape[3], c));
        let weight = if weighted { f64::from(self.scores.value(slot)) } else { 1.0 };
        sample((r, c), v * weight, (self.dtype, 1.0), 1e-6)
    }

    /// What `combine` makes of the routed rows.
    fn combined(&self, (t, c): (usize, usize), weighted: bool, based: bool) -> Sample {
        let base = if based { self.base.at((t, c)) } else { 0.0 };
        let slots = t * self.shape[3]..(t + 1) * self.shape[3];
        let terms = slots.map(|slot| {
            let v = self.rows.at((self.order.row_of_slot[slot] as usize, c));
            if weighted { v * f64::from(self.scores.value(slot)) } else { v }
        });
        sample((t, c), base + terms.sum::<f64>(), (self.dtype, 1.0), 1e-5)
    }

    /// The dot product of slot `s`'s token and row.
    fn product(&self, s: usize) -> Sample {
        let (x, row) = (self.x.row(s / self.shape[3]), self.rows.row(self.order.row_of_slot[s] as usize));
        let (want, tolerance) = super::check::dot(&x, &row, DType::F32);
        Sample { row: 0, col: s, want, tolerance }
    }

    /// Rows to experts, times their weights.
    fn gather(self: &Rc<Self>) -> Case {
        let run = |gpu: &Gpu, r: &Routes| {
            dispatch::gather(gpu, &r.x.tensor, &r.plan, Some(&r.weights)).map(|rows| vec![rows])
        };
        self.case("gather", [1, 1, 2], run, |gpu, r, results| {
            let at = places(r.rows.tensor.rows(), r.shape[1], SAMPLES);
            let samples: Vec<Sample> = at.into_iter().map(|p| r.gathered(p, true)).collect();
            Check::tensor(gpu, "rows", &results[0], &samples)
        })
    }

    /// [`Routes::gather`] with the quantization of the rows.
    fn gather_quantize(self: &Rc<Self>) -> Case {
        let [t, d, _, k] = self.shape;
        let (one, two) = (self.clone(), self.clone());
        let make: Make = Box::new(move |gpu, wish| {
            dispatch::gather_for(gpu, &one.x.tensor, &one.plan, Some(&one.weights), wish)
        });
        let (read, offs) = (t * d * 2 + 8 * t * k, Some(&self.plan.offs));
        quantized(
            "dispatch_gather_quantize",
            (&self.shape, [t * k, d]),
            offs,
            read,
            make,
            move |gpu, rows| {
                let at = places(t * k, d, SAMPLES);
                let samples: Vec<Sample> = at.into_iter().map(|p| two.gathered(p, true)).collect();
                Check::tensor(gpu, "rows", rows, &samples)
            },
        )
    }

    fn gather_backward(self: &Rc<Self>) -> Case {
        let run = |gpu: &Gpu, r: &Routes| {
            let (rows, x) = (&r.rows.tensor, &r.x.tensor);
            let (d_x, d_weights) = dispatch::gather_backward(gpu, rows, x, &r.plan, Some(&r.weights), None)?;
            Ok(std::iter::once(d_x).chain(d_weights).collect())
        };
        self.case("gather_backward", [2, 1, 3], run, |gpu, r, results| {
            let at = places(r.shape[0], r.shape[1], SAMPLES);
            let samples: Vec<Sample> = at.iter().map(|p| r.combined(*p, true, false)).collect();
            let d_x = Check::tensor(gpu, "d_x", &results[0], &samples)?;
            let slots: Vec<usize> = at.into_iter().map(|(t, _)| t * r.shape[3]).collect();
            let samples: Vec<Sample> = slots.iter().map(|s| r.product(*s)).collect();
            Ok(d_x.and(Check::of("d_weights", &samples, &read_flat(gpu, &results[1], &slots)?)))
        })
    }

    /// Rows back to their tokens, on top of a base.
    fn combine(self: &Rc<Self>) -> Case {
        let run = |gpu: &Gpu, r: &Routes| {
            let base = Some(&r.base.tensor);
            dispatch::combine(gpu, &r.rows.tensor, &r.plan, None, base).map(|out| vec![out])
        };
        self.case("combine", [2, 1, 1], run, |gpu, r, results| {
            let at = places(r.shape[0], r.shape[1], SAMPLES);
            let samples: Vec<Sample> = at.into_iter().map(|p| r.combined(p, false, true)).collect();
            Check::tensor(gpu, "out", &results[0], &samples)
        })
    }

    fn combine_backward(self: &Rc<Self>) -> Case {
        let run = |gpu: &Gpu, r: &Routes| {
            let (d_out, rows) = (&r.x.tensor, &r.rows.tensor);
            dispatch::combine_backward(gpu, d_out, rows, &r.plan, None).map(|(d_rows, _)| vec![d_rows])
        };
        self.case("combine_backward", [1, 1, 1], run, |gpu, r, results| {
            let at = places(r.rows.tensor.rows(), r.shape[1], SAMPLES);
            let samples: Vec<Sample> = at.into_iter().map(|p| r.gathered(p, false)).collect();
            Check::tensor(gpu, "d_rows", &results[0], &samples)
        })
    }
}

/// Rows to experts and back, with gradients, as the model has them: weights before the experts, a base under the sums.
/// `[T, D, E, K]`.
///
/// # Errors
/// Limits or memory of the device.
pub fn routes(gpu: &Gpu, shape: [usize; 4], dtype: DType) -> Result<Vec<Case>> {
    let routes = Routes::new(gpu, shape, dtype)?;
    let fused = (dtype == DType::BF16).then(|| routes.gather_quantize());
    let all = [routes.gather(), routes.gather_backward(), routes.combine(), routes.combine_backward()];
    Ok(all.into_iter().chain(fused).collect())
}

/// Rows of a table by token, and the table's gradient. `[T, D, V]`.
///
/// # Errors
/// Limits or memory of the device.
pub fn embeddings(gpu: &Gpu, [t, d, v]: [usize; 3], dtype: DType) -> Result<Vec<Case>> {
    let tokens = Rc::new(skewed("words", t, v));
    let ids = Tensor::from_u32(gpu, "tokens", &tokens)?;
    let table = Rows::new(gpu, "table", [v, d], dtype)?;
    let d_out = Rows::new(gpu, "d_out", [t, d], dtype)?;
    let row = d * dtype.size();
    let (words, known, i, w) = (tokens.clone(), table.clone(), ids.clone(), table.tensor.clone());
    let forward = case(
        "embedding_forward",
        &[t, d, v],
        dtype,
        2 * t * row + 4 * t,
        move |gpu| embedding::forward(gpu, &i, &w).map(|y| vec![y]),
        move |gpu, results| {
            let want = |(r, c)| sample((r, c), known.at((words[r] as usize, c)), (dtype, 0.0), 0.0);
            let samples: Vec<Sample> = places(t, d, SAMPLES).into_iter().map(want).collect();
            Check::tensor(gpu, "rows", &results[0], &samples)
        },
    );
    let g = d_out.tensor.clone();
    let backward = case(
        "embedding_backward",
        &[t, d, v],
        dtype,
        (t + v) * row + 4 * t,
        move |gpu| embedding::backward(gpu, &ids, &g, v, dtype).map(|d_table| vec![d_table]),
        move |gpu, results| {
            // The most frequent word, and some others.
            let at = std::iter::once((0, 0)).chain(places(v, d, SAMPLES));
            let want = |(r, c): (usize, usize)| {
                let hits = tokens.iter().enumerate().filter(|(_, word)| **word as usize == r);
                let terms = hits.map(|(t, _)| d_out.at((t, c)));
                let (sum, size) = terms.fold((0.0, 0.0), |(s, m): (f64, f64), x| (s + x, m + x.abs()));
                sample((r, c), sum, (dtype, 1.0), 1e-5 * size)
            };
            Check::tensor(gpu, "d_table", &results[0], &at.map(want).collect::<Vec<_>>())
        },
    );
    Ok(vec![forward, backward])
}

/// Names of the state that an update changes.
const STATE: [&str; 3] = ["param", "first moment", "second moment"];

/// Value `i` of the state called `name`; second moments are positive.
fn value(name: &str, i: usize) -> f32 {
    let x = Random::new(name, 1.0, DType::F32).value(i);
    if name == STATE[2] { x.abs() } else { x }
}

/// One update of `n` parameters by gradients in `dtype`; in bf16 it also writes the parameters in bf16, as where one rank computes in
/// it.
///
/// # Errors
/// Limits or memory of the device.
pub fn update(gpu: &Gpu, n: usize, dtype: DType) -> Result<Case> {
    let shape = [n.div_ceil(4), 4];
    let n = 4 * shape[0];
    let grad = Random::new("gradient", 1.0, dtype).tensor(gpu, "gradient", &shape)?;
    let low = (dtype == DType::BF16).then(|| Tensor::empty(gpu, "copy", &shape, dtype)).transpose()?;
    let state = STATE.map(|name| {
        let values: Vec<f32> = (0..n).map(|i| value(name, i)).collect();
        InPlace::new(gpu, Tensor::from_f32(gpu, name, &shape, DType::F32, &values)?)
    });
    let [param, first, second] = state;
    let state = [param?, first?, second?];
    let coefficient = Tensor::from_flat_f32(gpu, "coefficient", &[0.5])?;
    let cfg = adamw::Step { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 };
    let run = move |gpu: &Gpu| {
        let [param, m, v] = [state[0].get(gpu)?, state[1].get(gpu)?, state[2].get(gpu)?];
        let state = adamw::State { param, low: low.as_ref(), m, v };
        adamw::step(gpu, &state, &grad, &coefficient, &cfg)?;
        Ok([param, m, v].into_iter().chain(&low).cloned().collect())
    };
    // Three f32 read and written, the gradient read, its like written as the copy: 28 bytes either way.
    let copy = if dtype == DType::BF16 { dtype.size() } else { 0 };
    let bytes = (6 * DType::F32.size() + dtype.size() + copy) * n;
    Ok(case("adamw", &[n], dtype, bytes, run, move |gpu, results| updated(gpu, dtype, &cfg, results)))
}

/// The state is what the reference makes of its first values, and so is the copy.
fn updated(gpu: &Gpu, dtype: DType, cfg: &adamw::Step, results: &[Tensor]) -> Result<Check> {
    let wide = reference::adamw::Options {
        lr: f64::from(cfg.lr),
        beta1: f64::from(cfg.beta1),
        beta2: f64::from(cfg.beta2),
        eps: f64::from(cfg.eps),
        weight_decay: f64::from(cfg.weight_decay),
    };
    let at = places(results[0].rows(), 4, SAMPLES);
    let grad = Random::new("gradient", 1.0, dtype);
    let step = |(r, c): (usize, usize)| {
        let [mut p, mut m, mut v] = STATE.map(|name| [f64::from(value(name, 4 * r + c))]);
        let state = reference::adamw::State { p: &mut p, m: &mut m, v: &mut v };
        reference::adamw::step(wide, cfg.step as i32, 0.5, state, &[f64::from(grad.value(4 * r + c))]);
        [p[0], m[0], v[0], p[0]]
    };
    let want: Vec<[f64; 4]> = at.iter().copied().map(step).collect();
    let mut all = Check::default();
    for (i, (name, result)) in STATE.into_iter().chain(["copy"]).zip(results).enumerate() {
        let one = |(p, w): (&(usize, usize), &[f64; 4])| sample(*p, w[i], (result.dtype(), 2.0), 1e-6);
        let samples: Vec<Sample> = at.iter().zip(&want).map(one).collect();
        all = all.and(Check::tensor(gpu, name, result, &samples)?);
    }
    Ok(all)
}

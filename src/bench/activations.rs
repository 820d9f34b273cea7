//! Cases bound by memory whose kernels go row by row or element by element: norm, rotation, gate, loss, sums and casts.

use super::check::{Check, Sample, read, read_flat};
use super::data::{Random, places};
use super::runner::{Case, Work};
use crate::Result;
use crate::gpu::Gpu;
use crate::num::DType;
use crate::num::formula::{fnv1a, splitmix64};
use crate::ops::{cross_entropy, elementwise, rmsnorm, rope, swiglu};
use crate::reference;
use crate::tensor::Tensor;
use std::cell::Cell;
use std::rc::Rc;

/// Places of each result that are checked.
const SAMPLES: usize = 24;
/// Added to the mean square.
pub(super) const EPS: f32 = 1e-5;
/// Base of the rotation's frequencies.
const THETA: f32 = 500_000.0;

/// Random rows on the device, which the host can make again.
#[derive(Clone)]
pub(super) struct Rows {
    pub values: Random,
    pub tensor: Tensor,
}

impl Rows {
    /// (rows, cols) of standard deviation 1.
    pub fn new(gpu: &Gpu, name: &str, shape: [usize; 2], dtype: DType) -> Result<Rows> {
        let values = Random::new(name, 1.0, dtype);
        Ok(Rows { values, tensor: values.tensor(gpu, name, &shape)? })
    }

    /// Row `r`.
    pub fn row(&self, r: usize) -> Vec<f64> {
        let cols = self.tensor.cols();
        self.values.vector(r * cols, 1, cols).into_iter().map(f64::from).collect()
    }

    /// The value at (row, column).
    pub fn at(&self, (r, c): (usize, usize)) -> f64 {
        f64::from(self.values.value(r * self.tensor.cols() + c))
    }
}

/// What `want` may be off by: `roundings` to `dtype`, and `exact` of the arithmetic before it.
pub(super) fn sample(
    (row, col): (usize, usize),
    want: f64,
    (dtype, roundings): (DType, f64),
    exact: f64,
) -> Sample {
    let unit = if dtype == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-23) };
    Sample { row, col, want, tolerance: roundings * unit * want.abs() + exact }
}

/// A case without groups; `bytes` of all inputs and outputs.
pub(super) fn case(
    op: &str,
    shape: &[usize],
    dtype: DType,
    bytes: usize,
    run: impl Fn(&Gpu) -> Result<Vec<Tensor>> + 'static,
    check: impl Fn(&Gpu, &[Tensor]) -> Result<Check> + 'static,
) -> Case {
    let sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
    Case {
        op: op.into(),
        shape: sizes.join("x"),
        groups: "-".into(),
        dtype: dtype.to_string(),
        work: Work::Bytes(bytes as f64),
        run: Box::new(run),
        check: Box::new(check),
    }
}

/// A tensor that a kernel overwrites, with its first values: they are put back when a measurement begins, which it does
/// with a run on a planner.
pub(super) struct InPlace {
    first: Tensor,
    tensor: Tensor,
    stale: Cell<bool>,
}

impl InPlace {
    /// Keeps `first`, and a copy to overwrite.
    pub fn new(gpu: &Gpu, first: Tensor) -> Result<InPlace> {
        let tensor = elementwise::cast(gpu, &first, first.dtype())?;
        Ok(InPlace { first, tensor, stale: Cell::new(false) })
    }

    /// The tensor for a run on `gpu`.
    pub fn get(&self, gpu: &Gpu) -> Result<&Tensor> {
        if gpu.is_planner() {
            self.stale.set(true);
        } else if self.stale.replace(false) {
            elementwise::cast_into(gpu, &self.first, &self.tensor)?;
        }
        Ok(&self.tensor)
    }
}

/// RMSNorm of x (T, D), forward and backward.
///
/// # Errors
/// Limits or memory of the device.
pub fn norms(gpu: &Gpu, [t, d]: [usize; 2], dtype: DType) -> Result<Vec<Case>> {
    let x = Rows::new(gpu, "norm x", [t, d], dtype)?;
    let d_y = Rows::new(gpu, "norm d_y", [t, d], dtype)?;
    let weight = Rows::new(gpu, "norm weight", [1, d], dtype)?;
    let rstd = rmsnorm::forward(gpu, &x.tensor, &weight.tensor, EPS)?.1;
    let (row, once) = (d * dtype.size(), 4 * t + d * dtype.size());
    let (x1, w1) = (x.clone(), weight.clone());
    let (x2, w2) = (x.clone(), weight.clone());
    let forward = case(
        "rmsnorm_forward",
        &[t, d],
        dtype,
        2 * t * row + once,
        move |gpu| rmsnorm::forward(gpu, &x1.tensor, &w1.tensor, EPS).map(|(y, rstd)| vec![y, rstd]),
        move |gpu, results| {
            let want = |(r, c)| {
                let y = reference::rmsnorm::forward(&x2.row(r), &w2.row(0), f64::from(EPS));
                sample((r, c), y[c], (dtype, 1.0), 1e-5)
            };
            let samples: Vec<Sample> = places(t, d, SAMPLES).into_iter().map(want).collect();
            Check::tensor(gpu, "y", &results[0], &samples)
        },
    );
    let (x3, d_y3, w3, rstd3) = (x.clone(), d_y.clone(), weight.clone(), rstd.clone());
    let backward = case(
        "rmsnorm_backward",
        &[t, d],
        dtype,
        3 * t * row + once + d * dtype.size(),
        move |gpu| {
            let (d_x, d_w) = rmsnorm::backward(gpu, &d_y3.tensor, &x3.tensor, &w3.tensor, &rstd3, None)?;
            Ok(vec![d_x, d_w])
        },
        move |gpu, results| norm_gradients(gpu, (&x, &d_y, &weight, &rstd), results),
    );
    Ok(vec![forward, backward])
}

fn norm_gradients(
    gpu: &Gpu,
    (x, d_y, weight, rstd): (&Rows, &Rows, &Rows, &Tensor),
    results: &[Tensor],
) -> Result<Check> {
    let (t, d, dtype) = (x.tensor.rows(), x.tensor.cols(), x.tensor.dtype());
    let w = weight.row(0);
    let d_x = |(r, c)| {
        let (d_x, _) = reference::rmsnorm::backward(&x.row(r), &w, &d_y.row(r), f64::from(EPS));
        sample((r, c), d_x[c], (dtype, 1.0), 1e-5)
    };
    let rstd = read_flat(gpu, rstd, &(0..t).collect::<Vec<_>>())?;
    let d_w = |(_, c): (usize, usize)| {
        let (xs, ds) = (x.values.vector(c, d, t), d_y.values.vector(c, d, t));
        let terms = xs.iter().zip(&ds).zip(&rstd).map(|((x, d), r)| f64::from(*x) * f64::from(*d) * r);
        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size): (f64, f64), v| (sum + v, size + v.abs()));
        sample((0, c), sum, (dtype, 1.0), 1e-6 * size)
    };
    let at = places(t, d, SAMPLES);
    let rows = Check::tensor(gpu, "d_x", &results[0], &at.iter().copied().map(d_x).collect::<Vec<_>>())?;
    let columns: Vec<Sample> = at.into_iter().map(d_w).collect();
    Ok(rows.and(Check::tensor(gpu, "d_weight", &results[1], &columns)?))
}

/// The rotation of x (B * S, H * D).
///
/// # Errors
/// Heads that are no multiple of 4; limits or memory of the device.
pub fn rotation(gpu: &Gpu, [b, s, h, d]: [usize; 4], dtype: DType) -> Result<Case> {
    let table = rope::table(gpu, s, d, THETA)?;
    let x = Rows::new(gpu, "rope x", [b * s, h * d], dtype)?;
    let run = x.tensor.clone();
    let check = move |gpu: &Gpu, results: &[Tensor]| {
        let table = reference::rope::table(s, d, f64::from(THETA));
        let want = |(r, c): (usize, usize)| {
            let half = (r % s) * (d / 2)..(r % s + 1) * (d / 2);
            let one = reference::rope::Table {
                cos: table.cos[half.clone()].to_vec(),
                sin: table.sin[half].to_vec(),
            };
            let y = reference::rope::forward(&x.row(r), &one, h, d);
            sample((r, c), y[c], (dtype, 1.0), 1e-5)
        };
        let samples: Vec<Sample> = places(b * s, h * d, SAMPLES).into_iter().map(want).collect();
        Check::tensor(gpu, "y", &results[0], &samples)
    };
    let bytes = 2 * b * s * h * d * dtype.size() + 4 * s * d;
    let run = move |gpu: &Gpu| rope::forward(gpu, &run, &table, s, d).map(|y| vec![y]);
    Ok(case("rope", &[b, s, h, d], dtype, bytes, run, check))
}

/// SwiGLU on (T, F), forward and backward.
///
/// # Errors
/// Limits or memory of the device.
pub fn gates(gpu: &Gpu, [t, f]: [usize; 2], dtype: DType) -> Result<Vec<Case>> {
    let [gate, up, d_h] = ["gate", "up", "d_h"].map(|name| Rows::new(gpu, name, [t, f], dtype));
    let (gate, up, d_h) = (gate?, up?, d_h?);
    let bytes = t * f * dtype.size();
    // In bf16 the op rounds in between too.
    let off = move |place, want: f64| sample(place, want, (dtype, 2.0), 1e-5);
    let (g1, u1) = (gate.clone(), up.clone());
    let (g2, u2) = (gate.clone(), up.clone());
    let forward = case(
        "swiglu_forward",
        &[t, f],
        dtype,
        3 * bytes,
        move |gpu| swiglu::forward(gpu, &g1.tensor, &u1.tensor).map(|h| vec![h]),
        move |gpu, results| {
            let want = |p| off(p, reference::swiglu::forward(&[g2.at(p)], &[u2.at(p)])[0]);
            let samples: Vec<Sample> = places(t, f, SAMPLES).into_iter().map(want).collect();
            Check::tensor(gpu, "h", &results[0], &samples)
        },
    );
    let (g3, u3, d3) = (gate.clone(), up.clone(), d_h.clone());
    let backward = case(
        "swiglu_backward",
        &[t, f],
        dtype,
        5 * bytes,
        move |gpu| {
            let (d_gate, d_up) = swiglu::backward(gpu, &d3.tensor, &g3.tensor, &u3.tensor)?;
            Ok(vec![d_gate, d_up])
        },
        move |gpu, results| {
            let want = |p| {
                let (a, b) = reference::swiglu::backward(&[gate.at(p)], &[up.at(p)], &[d_h.at(p)]);
                (off(p, a[0]), off(p, b[0]))
            };
            let (a, b): (Vec<Sample>, Vec<Sample>) = places(t, f, SAMPLES).into_iter().map(want).unzip();
            let d_gate = Check::tensor(gpu, "d_gate", &results[0], &a)?;
            Ok(d_gate.and(Check::tensor(gpu, "d_up", &results[1], &b)?))
        },
    );
    Ok(vec![forward, backward])
}

/// The loss of logits (T, V), whose gradient takes their place.
///
/// # Errors
/// Limits or memory of the device.
pub fn loss(gpu: &Gpu, [t, v]: [usize; 2], dtype: DType) -> Result<Case> {
    let logits = Rows::new(gpu, "logits", [t, v], dtype)?;
    let seed = fnv1a(b"labels");
    let labels: Vec<u32> = (0..t as u64).map(|i| (splitmix64(seed, i) % v as u64) as u32).collect();
    let of = Tensor::from_u32(gpu, "labels", &labels)?;
    let place = InPlace::new(gpu, logits.tensor.clone())?;
    let run = move |gpu: &Gpu| {
        let losses = Tensor::flat(gpu, "losses", t, DType::F32)?;
        let logits = place.get(gpu)?;
        cross_entropy::forward_backward(gpu, logits, &of, &losses, 1.0)?;
        Ok(vec![logits.clone(), losses])
    };
    let check = move |gpu: &Gpu, results: &[Tensor]| {
        let mut at = places(t, v, SAMPLES);
        // The label's own gradient is the only large one.
        at.extend(at.clone().into_iter().map(|(r, _)| (r, labels[r] as usize)));
        let (mut gradients, mut losses) = (Vec::new(), Vec::new());
        for &(r, c) in &at {
            let row = logits.row(r);
            let want = reference::cross_entropy::backward(&row, &labels[r..=r], v, 1.0);
            gradients.push(sample((r, c), want[c], (dtype, 1.0), 3e-6));
            let loss = reference::cross_entropy::forward(&row, &labels[r..=r], v)[0];
            losses.push(sample((0, r), loss, (DType::F32, 1.0), 2e-6 + 1e-6 * loss.abs()));
        }
        let rows: Vec<usize> = at.iter().map(|(r, _)| *r).collect();
        let check = Check::tensor(gpu, "d_logits", &results[0], &gradients)?;
        Ok(check.and(Check::of("losses", &losses, &read_flat(gpu, &results[1], &rows)?)))
    };
    Ok(case("cross_entropy", &[t, v], dtype, 2 * t * v * dtype.size() + 8 * t, run, check))
}

/// `a + b` in bf16 and f32, f32 to bf16, and bf16 added to f32, on (T, D).
///
/// # Errors
/// Limits or memory of the device.
pub fn elements(gpu: &Gpu, [t, d]: [usize; 2], dtype: DType) -> Result<Vec<Case>> {
    let [a, b] = ["a", "b"].map(|name| Rows::new(gpu, name, [t, d], dtype));
    let (a, b) = (a?, b?);
    let wide = Rows::new(gpu, "wide", [t, d], DType::F32)?;
    let n = t * d;
    let (a1, b1) = (a.clone(), b.clone());
    let (a2, b2) = (a.clone(), b.clone());
    let add = case(
        "elementwise_add",
        &[t, d],
        dtype,
        3 * n * dtype.size(),
        move |gpu| elementwise::add(gpu, &a1.tensor, &b1.tensor).map(|y| vec![y]),
        move |gpu, results| {
            let want = |p| sample(p, a2.at(p) + b2.at(p), (dtype, 1.0), 1e-6);
            let samples: Vec<Sample> = places(t, d, SAMPLES).into_iter().map(want).collect();
            Check::tensor(gpu, "sum", &results[0], &samples)
        },
    );
    let (from, to) = (wide.clone(), wide.clone());
    let cast = case(
        "elementwise_cast",
        &[t, d],
        DType::F32,
        n * 6,
        move |gpu| elementwise::cast(gpu, &from.tensor, DType::BF16).map(|y| vec![y]),
        move |gpu, results| {
            let want = |p| sample(p, to.at(p), (DType::BF16, 1.0), 0.0);
            let samples: Vec<Sample> = places(t, d, SAMPLES).into_iter().map(want).collect();
            Check::tensor(gpu, "cast", &results[0], &samples)
        },
    );
    let place = Rc::new(InPlace::new(gpu, wide.tensor.clone())?);
    let x = a.tensor.clone();
    let accumulate = case(
        "elementwise_add_into",
        &[t, d],
        dtype,
        n * (8 + dtype.size()),
        move |gpu| {
            let sum = place.get(gpu)?;
            elementwise::add_into(gpu, sum, &x).map(|()| vec![sum.clone()])
        },
        move |gpu, results| {
            let at = places(t, d, SAMPLES);
            let want = |p| sample(p, wide.at(p) + a.at(p), (DType::F32, 1.0), 1e-6);
            let samples: Vec<Sample> = at.iter().copied().map(want).collect();
            Ok(Check::of("sum", &samples, &read(gpu, &results[0], &at)?))
        },
    );
    Ok(vec![add, cast, accumulate])
}

//! Causal attention, forward and backward.

use super::check::{Check, Sample};
use super::data::{Random, places};
use super::runner::{Case, Work};
use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::attention::{self, Shape};
use crate::tensor::Tensor;
use crate::{Error, Result};
use std::rc::Rc;

/// Places of each result that are checked.
const SAMPLES: usize = 6;
/// Gradients of keys and values are checked for this many positions before the end of a sequence: a key's gradient takes the
/// softmax of every query after it.
const LAST_KEYS: usize = 24;

/// Random q, k, v and gradient of a shape; rows are positions, columns heads times elements.
pub struct Attention {
    shape: Shape,
    dtype: DType,
    values: [Random; 4],
    tensors: [Tensor; 4],
}

impl Attention {
    /// `[B, S, H, KV, D]`: sequences, positions, query heads, key heads, elements of a head.
    ///
    /// # Errors
    /// Heads that do not divide; limits or memory of the device.
    pub fn new(
        gpu: &Gpu,
        [batch, seq, heads, kv_heads, head_dim]: [usize; 5],
        dtype: DType,
    ) -> Result<Rc<Self>> {
        if !heads.is_multiple_of(kv_heads) {
            return Err(Error::user(
                format!("{heads} query heads cannot share {kv_heads} key heads"),
                "the third number of --shape is a multiple of the fourth",
            ));
        }
        let shape = Shape { batch, seq, heads, kv_heads, head_dim, block: None };
        let named = [("q", heads), ("k", kv_heads), ("v", kv_heads), ("d_out", heads)];
        let values = named.map(|(name, _)| Random::new(name, 1.0, dtype));
        let tensor = |i: usize| values[i].tensor(gpu, named[i].0, &[batch * seq, named[i].1 * head_dim]);
        let tensors = [tensor(0)?, tensor(1)?, tensor(2)?, tensor(3)?];
        Ok(Rc::new(Attention { shape, dtype, values, tensors }))
    }

    /// The vector of `head` at position `t` of sequence `b`; `which` is 0 to 3 for q, k, v, d_out.
    fn vector(&self, which: usize, b: usize, t: usize, head: usize) -> Vec<f64> {
        let s = self.shape;
        let heads = if which == 1 || which == 2 { s.kv_heads } else { s.heads };
        let start = ((b * s.seq + t) * heads + head) * s.head_dim;
        self.values[which].vector(start, 1, s.head_dim).into_iter().map(f64::from).collect()
    }

    /// Everything about one query: its probabilities, output, and the gradients of its scores.
    fn query(&self, b: usize, t: usize, head: usize) -> Query {
        let s = self.shape;
        let kv = head / (s.heads / s.kv_heads);
        let scale = 1.0 / (s.head_dim as f64).sqrt();
        let (q, d_out) = (self.vector(0, b, t, head), self.vector(3, b, t, head));
        let mut p: Vec<f64> = (0..=t).map(|j| scale * product(&q, &self.vector(1, b, j, kv))).collect();
        let top = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        p.iter_mut().for_each(|x| *x = (*x - top).exp());
        let sum: f64 = p.iter().sum();
        p.iter_mut().for_each(|x| *x /= sum);
        let (mut out, mut d_p) = (vec![0.0; s.head_dim], Vec::new());
        for (j, p) in p.iter().enumerate() {
            let v = self.vector(2, b, j, kv);
            add(&mut out, *p, &v);
            d_p.push(product(&d_out, &v));
        }
        let delta = product(&d_out, &out);
        let d_s: Vec<f64> = p.iter().zip(&d_p).map(|(p, d)| p * (d - delta) * scale).collect();
        let mut d_q = vec![0.0; s.head_dim];
        for (j, d) in d_s.iter().enumerate() {
            add(&mut d_q, *d, &self.vector(1, b, j, kv));
        }
        Query { p, out, d_s, d_q, q, d_out }
    }

    /// `(d_k, d_v)` of a key.
    fn key(&self, b: usize, j: usize, kv: usize) -> [Vec<f64>; 2] {
        let (s, group) = (self.shape, self.shape.heads / self.shape.kv_heads);
        let (mut d_k, mut d_v) = (vec![0.0; s.head_dim], vec![0.0; s.head_dim]);
        for head in kv * group..(kv + 1) * group {
            for t in j..s.seq {
                let query = self.query(b, t, head);
                add(&mut d_k, query.d_s[j], &query.q);
                add(&mut d_v, query.p[j], &query.d_out);
            }
        }
        [d_k, d_v]
    }

    /// Positions (sequence, position, head) to check.
    fn positions(&self, heads: usize, last: usize, n: usize) -> Vec<(usize, usize, usize)> {
        let s = self.shape;
        let first = s.seq - last.min(s.seq);
        let places = places(s.batch * (s.seq - first), heads, n);
        places.into_iter().map(|(row, h)| (row / (s.seq - first), first + row % (s.seq - first), h)).collect()
    }

    /// Compares whole head vectors with f64, to a part of the largest wanted entry.
    fn compare(&self, gpu: &Gpu, name: &str, t: &Tensor, wanted: &[(usize, Vec<f64>)]) -> Result<Check> {
        let largest = wanted.iter().flat_map(|(_, v)| v).fold(0.0f64, |a, v| a.max(v.abs()));
        // Those of `ops::attention`, twice as wide: the largest of a sample may be less than that of all.
        let tolerance = largest * if self.dtype == DType::F32 { 2e-5 } else { 2e-2 } + 1e-30;
        let width = t.cols();
        let samples: Vec<Sample> = wanted
            .iter()
            .flat_map(|(start, v)| v.iter().enumerate().map(move |(d, want)| (start + d, *want)))
            .map(|(at, want)| Sample { row: at / width, col: at % width, want, tolerance })
            .collect();
        Check::tensor(gpu, name, t, &samples)
    }

    fn start(&self, (b, t, head): (usize, usize, usize), heads: usize) -> usize {
        ((b * self.shape.seq + t) * heads + head) * self.shape.head_dim
    }

    fn case(&self, op: &str, products: f64) -> Case {
        let s = self.shape;
        // Pairs of a query and a key that it sees.
        let pairs = s.batch as f64 * s.heads as f64 * s.seq as f64 * (s.seq as f64 + 1.0) / 2.0;
        Case {
            op: op.into(),
            shape: format!("{}x{}x{}x{}x{}", s.batch, s.seq, s.heads, s.kv_heads, s.head_dim),
            groups: "-".into(),
            dtype: if self.dtype == DType::F32 { "f32" } else { "bf16" }.into(),
            work: Work::Flops(products * 2.0 * pairs * s.head_dim as f64),
            run: Box::new(|_| Ok(Vec::new())),
            check: Box::new(|_, _| Ok(Check::default())),
        }
    }

    /// Forward: two products of what the causal mask leaves.
    pub fn forward(self: &Rc<Self>) -> Case {
        let (a, c) = (self.clone(), self.clone());
        let run = move |gpu: &Gpu| {
            let [q, k, v, _] = &a.tensors;
            let (out, lse) = attention::forward(gpu, q, k, v, a.shape, None)?;
            Ok(vec![out, lse])
        };
        let check = move |gpu: &Gpu, results: &[Tensor]| {
            let at = c.positions(c.shape.heads, c.shape.seq, SAMPLES);
            let wanted: Vec<_> =
                at.iter().map(|p| (c.start(*p, c.shape.heads), c.query(p.0, p.1, p.2).out)).collect();
            c.compare(gpu, "out", &results[0], &wanted)
        };
        Case { run: Box::new(run), check: Box::new(check), ..self.case("attention_forward", 2.0) }
    }

    /// Backward: five products.
    ///
    /// # Errors
    /// Limits or memory of the device, or a head size that the kernels do not have.
    pub fn backward(self: &Rc<Self>, gpu: &Gpu) -> Result<Case> {
        let [q, k, v, _] = &self.tensors;
        let (out, lse) = attention::forward(gpu, q, k, v, self.shape, None)?;
        let (a, c) = (self.clone(), self.clone());
        let run = move |gpu: &Gpu| {
            let [q, k, v, d_out] = &a.tensors;
            let (d_q, d_k, d_v) = attention::backward(gpu, d_out, q, k, v, &out, &lse, a.shape, None)?;
            Ok(vec![d_q, d_k, d_v])
        };
        let check = move |gpu: &Gpu, results: &[Tensor]| {
            let (s, [mut d_k, mut d_v]) = (c.shape, [Vec::new(), Vec::new()]);
            let queries = c.positions(s.heads, s.seq, SAMPLES);
            let d_q: Vec<_> =
                queries.iter().map(|p| (c.start(*p, s.heads), c.query(p.0, p.1, p.2).d_q)).collect();
            for p in c.positions(s.kv_heads, LAST_KEYS, SAMPLES / 2) {
                let [k, v] = c.key(p.0, p.1, p.2);
                d_k.push((c.start(p, s.kv_heads), k));
                d_v.push((c.start(p, s.kv_heads), v));
            }
            let check = c.compare(gpu, "d_q", &results[0], &d_q)?;
            let check = check.and(c.compare(gpu, "d_k", &results[1], &d_k)?);
            Ok(check.and(c.compare(gpu, "d_v", &results[2], &d_v)?))
        };
        Ok(Case { run: Box::new(run), check: Box::new(check), ..self.case("attention_backward", 5.0) })
    }
}

struct Query {
    p: Vec<f64>,
    out: Vec<f64>,
    d_s: Vec<f64>,
    d_q: Vec<f64>,
    q: Vec<f64>,
    d_out: Vec<f64>,
}

fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], factor: f64, v: &[f64]) {
    to.iter_mut().zip(v).for_each(|(t, v)| *t += factor * v);
}

//! Dense and grouped GEMMs, and the differentiable linear op with all its quantizations.

use super::check::{Check, Sample, dot};
use super::data::{Random, Split, places};
use super::runner::{Case, Work};
use super::step::Precision;
use crate::Result;
use crate::gpu::{GemmKernel, Gpu};
use crate::num::{DType, Fp8};
use crate::ops::choice::choose;
use crate::ops::fp8_linear::{self, Recipe};
use crate::ops::gemm::{self, GemmOptions, Scale};
use crate::ops::gemm_choice::{self, Form, Product};
use crate::ops::quantize;
use crate::reference;
use crate::tensor::Tensor;
use std::rc::Rc;

/// Places of each result that are checked.
const SAMPLES: usize = 24;

/// Which of a linear layer's three products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// `y(M, N) = x(M, K) w(N, K)^T`
    Forward,
    /// `d_x(M, K) = d_y(M, N) w(N, K)`
    Input,
    /// `d_w(N, K) = d_y(M, N)^T x(M, K)` of each group
    Weight,
}

impl Pass {
    /// All three.
    pub const ALL: [Pass; 3] = [Pass::Forward, Pass::Input, Pass::Weight];

    fn name(self) -> &'static str {
        match self {
            Pass::Forward => "fprop",
            Pass::Input => "dgrad",
            Pass::Weight => "wgrad",
        }
    }
}

/// The operands of a linear layer, on the device and as functions of their places.
#[derive(Clone)]
pub struct Linear {
    m: usize,
    k: usize,
    n: usize,
    split: Split,
    dense: bool,
    precision: Precision,
    values: [Random; 3],
    x: Tensor,
    w: Tensor,
    d_y: Tensor,
    ends: Tensor,
}

impl Linear {
    /// Random operands for `[M, K, N]`; `split` gives M rows to as many weights as it has groups, `None` is a dense layer.
    ///
    /// # Errors
    /// Limits or memory of the device.
    pub fn new(
        gpu: &Gpu,
        [m, k, n]: [usize; 3],
        split: Option<&Split>,
        precision: Precision,
    ) -> Result<Rc<Linear>> {
        let dense = split.is_none();
        let split = split.cloned().unwrap_or_else(|| Split::dense(m));
        let dtype = if precision == Precision::F32 { DType::F32 } else { DType::BF16 };
        let values = [("x", 1.0), ("w", 0.02), ("d_y", 1.0)].map(|(name, std)| Random::new(name, std, dtype));
        let w_shape = [split.sizes.len(), n, k];
        let w_shape = if dense { &w_shape[1..] } else { &w_shape[..] };
        Ok(Rc::new(Linear {
            x: values[0].tensor(gpu, "x", &[m, k])?,
            w: values[1].tensor(gpu, "w", w_shape)?,
            d_y: values[2].tensor(gpu, "d_y", &[m, n])?,
            ends: Tensor::from_u32(gpu, "ends", &split.ends())?,
            m,
            k,
            n,
            split,
            dense,
            precision,
            values,
        }))
    }

    /// The same operands, bf16 in memory, in bf16 or fp8.
    ///
    /// # Panics
    /// From or to f32, whose operands are others.
    pub fn in_precision(self: &Rc<Self>, precision: Precision) -> Rc<Linear> {
        let both = [self.precision, precision];
        assert!(
            precision == self.precision || !both.contains(&Precision::F32),
            "operands of {both:?} differ"
        );
        Rc::new(Linear { precision, ..(**self).clone() })
    }

    fn ends(&self) -> Option<&Tensor> {
        (!self.dense).then_some(&self.ends)
    }

    fn flops(&self) -> f64 {
        2.0 * self.k as f64 * self.n as f64 * self.split.rows() as f64
    }

    /// A vector as a GEMM sees it: through fp8 with a scale of its own, or as it is.
    fn seen(&self, vector: &[f32]) -> Vec<f64> {
        if self.precision != Precision::Fp8 {
            return vector.iter().map(|v| f64::from(*v)).collect();
        }
        let q = reference::quantize::rowwise(vector, 1, vector.len(), Fp8::E4m3);
        q.values().iter().map(|v| v * f64::from(q.inverse()[0])).collect()
    }

    /// The two vectors whose product stands at (row, col) of a pass's result.
    fn vectors(&self, pass: Pass, row: usize, col: usize) -> [Vec<f32>; 2] {
        let [x, w, d_y] = &self.values;
        let (k, n) = (self.k, self.n);
        match pass {
            Pass::Forward => {
                let g = self.split.group_of(row);
                [x.vector(row * k, 1, k), w.vector((g * n + col) * k, 1, k)]
            }
            Pass::Input => {
                let g = self.split.group_of(row);
                [d_y.vector(row * n, 1, n), w.vector(g * n * k + col, k, n)]
            }
            Pass::Weight => {
                let rows = self.split.range(row / n);
                let (first, len) = (rows.start, rows.len());
                [d_y.vector(first * n + row % n, n, len), x.vector(first * k + col, k, len)]
            }
        }
    }

    /// Compares sampled elements of a pass's result with the f64 product of the same codes.
    ///
    /// # Errors
    /// What the device reported.
    pub fn check(&self, gpu: &Gpu, pass: Pass, result: &Tensor) -> Result<Check> {
        let (rows, cols) = match pass {
            Pass::Forward => (self.m, self.n),
            Pass::Input => (self.m, self.k),
            Pass::Weight => (self.split.sizes.len() * self.n, self.k),
        };
        let sample = |(row, col)| {
            let [a, b] = self.vectors(pass, row, col).map(|v| self.seen(&v));
            let (want, tolerance) = dot(&a, &b, result.dtype());
            Sample { row, col, want, tolerance }
        };
        let samples: Vec<Sample> = places(rows, cols, SAMPLES).into_iter().map(sample).collect();
        Check::tensor(gpu, pass.name(), result, &samples)
    }

    fn case(self: &Rc<Self>, op: String, flops: f64, run: super::runner::Run, passes: Vec<Pass>) -> Case {
        let shape = format!("{}x{}x{}", self.m, self.k, self.n);
        let experts = if self.dense { String::new() } else { format!("x{}", self.split.sizes.len()) };
        let this = self.clone();
        let check = move |gpu: &Gpu, results: &[Tensor]| {
            let each = passes.iter().zip(results).map(|(pass, result)| this.check(gpu, *pass, result));
            each.reduce(|a, b| Ok(a?.and(b?))).unwrap_or_else(|| Ok(Check::default()))
        };
        Case {
            op,
            shape: shape + &experts,
            groups: self.split.name.clone(),
            dtype: self.precision.name().into(),
            work: Work::Flops(flops),
            run,
            check: Box::new(check),
        }
    }

    /// One product, of operands that are quantized already.
    ///
    /// # Errors
    /// Limits or memory of the device.
    pub fn product(self: &Rc<Self>, gpu: &Gpu, pass: Pass) -> Result<Case> {
        let run = match self.precision {
            Precision::Fp8 => self.scaled(gpu, pass, DType::E4M3)?,
            _ => self.plain(pass),
        };
        Ok(self.case(self.name(pass), self.flops(), run, vec![pass]))
    }

    /// The kernel that computes a pass of two operands of `dtype`; halves are for matrix units.
    fn kernel(&self, gpu: &Gpu, pass: Pass, dtype: DType) -> GemmKernel {
        if dtype == DType::F16 {
            return GemmKernel::Coop;
        }
        let (m, k, n) = (self.m, self.k, self.n);
        let (form, sizes) = match pass {
            Pass::Forward => (Form::Nt, [m, n, k]),
            Pass::Input => (Form::Nn, [m, k, n]),
            Pass::Weight => (Form::Tn, [n, k, m]),
        };
        let groups = (!self.dense).then_some(self.split.sizes.len());
        choose(gpu, &Product { form, operands: [dtype; 2], sizes, groups })
    }

    /// One product of bf16 operands that are halves for the matrix units already, where those compute it.
    ///
    /// # Errors
    /// Limits or memory of the device.
    pub fn product_of_halves(self: &Rc<Self>, gpu: &Gpu, pass: Pass) -> Result<Option<Case>> {
        let kernel = self.kernel(gpu, pass, DType::BF16);
        if self.precision != Precision::Bf16 || kernel != GemmKernel::Coop {
            return Ok(None);
        }
        let run = self.scaled(gpu, pass, DType::F16)?;
        let name = self.name(pass) + "_of_halves";
        Ok(Some(self.case(name, self.flops(), run, vec![pass])))
    }

    fn name(&self, pass: Pass) -> String {
        format!("{}_{}", if self.dense { "gemm" } else { "grouped" }, pass.name())
    }

    fn plain(self: &Rc<Self>, pass: Pass) -> super::runner::Run {
        let l = self.clone();
        Box::new(move |gpu| {
            let options = GemmOptions { offs: l.ends(), ..GemmOptions::default() };
            let out = l.x.dtype();
            Ok(vec![match pass {
                Pass::Forward => gemm::nt(gpu, &l.x, &l.w, out, options)?,
                Pass::Input => gemm::nn(gpu, &l.d_y, &l.w, out, options)?,
                Pass::Weight => gemm::tn(gpu, &l.d_y, &l.x, out, options)?,
            }])
        })
    }

    /// A product of operands that are `dtype` already, in the order that it reads.
    fn scaled(self: &Rc<Self>, gpu: &Gpu, pass: Pass, dtype: DType) -> Result<super::runner::Run> {
        let l = self.clone();
        let order = gemm_choice::order(l.kernel(gpu, pass, dtype));
        let (a, b) = match pass {
            Pass::Forward => (
                quantize::along_rows(gpu, &l.x, dtype, order)?,
                quantize::along_rows(gpu, &l.w, dtype, order)?,
            ),
            Pass::Input => (
                quantize::along_rows(gpu, &l.d_y, dtype, order)?,
                quantize::along_weight_columns(gpu, &l.w, dtype, order)?,
            ),
            Pass::Weight => (
                quantize::along_columns(gpu, &l.d_y, l.ends(), dtype, order)?,
                quantize::along_columns(gpu, &l.x, l.ends(), dtype, order)?,
            ),
        };
        Ok(Box::new(move |gpu| {
            let row = match pass {
                Pass::Weight => Scale::per_group(&a.descale, l.n),
                _ => Scale::per_row(&a.descale),
            };
            let col = Scale::per_group(&b.descale, if pass == Pass::Forward { l.n } else { l.k });
            // The same as before; asked again, so that a planner hears of it.
            let kernel = Some(l.kernel(gpu, pass, dtype));
            let options = GemmOptions { offs: l.ends(), scales: Some((row, col)), kernel };
            let product = match pass {
                Pass::Forward => gemm::nt_of,
                Pass::Input => gemm::nn_of,
                Pass::Weight => gemm::tn_of,
            };
            Ok(vec![product(gpu, &a.codes, &b.codes, DType::BF16, options)?])
        }))
    }

    /// The whole op, forward and backward, with all quantizations.
    pub fn op(self: &Rc<Self>) -> Case {
        let l = self.clone();
        let recipe = if self.precision == Precision::Fp8 { Recipe::Rowwise } else { Recipe::HighPrecision };
        let run = move |gpu: &Gpu| {
            let y = fp8_linear::forward(gpu, &l.x, &l.w, l.ends(), recipe)?;
            let (d_x, d_w) = fp8_linear::backward(gpu, &l.d_y, &l.x, &l.w, l.ends(), recipe, true)?;
            Ok(vec![y, d_x.expect("was asked for"), d_w])
        };
        self.case("op".into(), 3.0 * self.flops(), Box::new(run), Pass::ALL.to_vec())
    }
}

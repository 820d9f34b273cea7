//! Linear layers whose GEMMs may run on fp8 codes: one differentiable op for dense and grouped weights.
//!
//! x (M, K), weight (N, K), or (E, N, K) with the end rows of the E groups in `offs`; out (M, N). Each GEMM quantizes
//! both operands along the dimension that it contracts, so x, the weight and the output's gradient are quantized
//! twice per step; only the tensor-wise recipe has codes that serve two GEMMs. Sums are f32, de-scales come after the
//! sum, and the result is rounded once to its dtype. Any M, N, K and group sizes. Rows past the last offset give zeros
//! and touch nothing, an empty group's weight gradient is zero.
//!
//! Definition: torchao (commit `36027d82d`) `prototype/moe_training` (`_to_fp8_rowwise_then_scaled_grouped_mm`) for
//! grouped weights and `float8/config.py` for the recipes of dense ones; f32 operands give f32 results here, where
//! torchao has bf16 only.
//! Tolerance against the f64 product of the same codes: that of [`gemm`].

use crate::Result;
use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::gemm::{self, GemmOptions, Scale};
use crate::ops::gemm_choice::{self, Form, Product};
use crate::ops::panels::{Codes, Order};
use crate::ops::quantize::{self, Quantized};
use crate::tensor::Tensor;
use std::cell::OnceCell;

/// How a linear layer's operands become fp8.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recipe {
    /// Not at all: operands as they are, f32 accumulation.
    HighPrecision,
    /// e4m3 everywhere, one power-of-two scale per contracted row or column. torchao's `rowwise`.
    Rowwise,
    /// One scale per tensor, not rounded; e4m3 for x and the weight, e5m2 for the output's gradient. torchao's
    /// `tensorwise`. With groups, a NaN past the last offset poisons everything: it is for dense layers.
    Tensorwise,
    /// [`Recipe::Rowwise`] forward; input gradient from a row-wise output gradient and a weight with one power-of-two
    /// scale; weight gradient without fp8. torchao's `rowwise_with_gw_hp`.
    RowwiseGwHp,
}

/// An input with its group ends, and its quantized forms, made when first asked for and kept: two weights that share
/// an input (w1 and w3 of SwiGLU) quantize it once. Make one per pass and drop it after the last use, since it keeps
/// the codes alive.
#[derive(Debug)]
pub struct Operand {
    x: Tensor,
    offs: Option<Tensor>,
    along_k: OnceCell<Quantized<Codes>>,
    along_rows: OnceCell<Quantized<Codes>>,
    whole: OnceCell<Quantized<Codes>>,
}

impl Operand {
    /// x (M, K); `offs` are the exclusive end rows of the groups (flat u32), for grouped weights.
    pub fn new(x: &Tensor, offs: Option<&Tensor>) -> Operand {
        Operand {
            x: x.clone(),
            offs: offs.cloned(),
            along_k: OnceCell::new(),
            along_rows: OnceCell::new(),
            whole: OnceCell::new(),
        }
    }

    /// Whether its rows are in groups.
    pub fn is_grouped(&self) -> bool {
        self.offs.is_some()
    }

    fn along_k(&self, gpu: &Gpu, order: Order) -> Result<&Quantized<Codes>> {
        get_or_try(&self.along_k, || quantize::along_rows(gpu, &self.x, DType::E4M3, order))
    }

    fn along_rows(&self, gpu: &Gpu, order: Order) -> Result<&Quantized<Codes>> {
        let offs = self.offs.as_ref();
        get_or_try(&self.along_rows, || quantize::along_columns(gpu, &self.x, offs, DType::E4M3, order))
    }

    fn whole(&self, gpu: &Gpu) -> Result<&Quantized<Codes>> {
        get_or_try(&self.whole, || Ok(quantize::tensorwise(gpu, &self.x, DType::E4M3)?.into()))
    }

    /// How the product of this form with a weight of N rows reads its operands.
    fn order(&self, gpu: &Gpu, form: Form, n: usize) -> Order {
        let (m, k) = (self.x.rows(), self.x.cols());
        let sizes = match form {
            Form::Nt => [m, n, k],
            Form::Nn => [m, k, n],
            Form::Tn => [n, k, m],
        };
        let groups = self.offs.as_ref().map(Tensor::numel);
        gemm_choice::order(gpu, &Product { form, operands: [DType::E4M3; 2], sizes, groups })
    }

    fn plain(&self) -> GemmOptions<'_> {
        GemmOptions { offs: self.offs.as_ref(), scales: None }
    }

    fn scaled<'a>(&'a self, row: Scale<'a>, col: Scale<'a>) -> GemmOptions<'a> {
        GemmOptions { offs: self.offs.as_ref(), scales: Some((row, col)) }
    }
}

fn get_or_try(
    cell: &OnceCell<Quantized<Codes>>,
    make: impl FnOnce() -> Result<Quantized<Codes>>,
) -> Result<&Quantized<Codes>> {
    if let Some(known) = cell.get() {
        return Ok(known);
    }
    let made = make()?;
    Ok(cell.get_or_init(|| made))
}

/// `out(M, N) = x(M, K) w[g](N, K)^T`, in the dtype of x.
///
/// # Errors
/// A result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn forward(gpu: &Gpu, x: &Tensor, w: &Tensor, offs: Option<&Tensor>, recipe: Recipe) -> Result<Tensor> {
    forward_with(gpu, &Operand::new(x, offs), w, recipe)
}

/// [`forward`] of an input whose quantized form other weights use too.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn forward_with(gpu: &Gpu, input: &Operand, w: &Tensor, recipe: Recipe) -> Result<Tensor> {
    let (n, out) = (check(&input.x, w, recipe), input.x.dtype());
    match recipe {
        Recipe::HighPrecision => gemm::nt(gpu, &input.x, w, out, input.plain()),
        Recipe::Rowwise | Recipe::RowwiseGwHp => {
            let order = input.order(gpu, Form::Nt, n);
            let (x, w) = (input.along_k(gpu, order)?, quantize::along_rows(gpu, w, DType::E4M3, order)?);
            let scales = input.scaled(Scale::per_row(&x.descale), Scale::per_group(&w.descale, n));
            gemm::nt_of(gpu, &x.codes, &w.codes, out, scales)
        }
        Recipe::Tensorwise => {
            let (x, w) = (input.whole(gpu)?, quantize::tensorwise(gpu, w, DType::E4M3)?);
            let scales = input.scaled(Scale::tensorwise(&x.descale), Scale::tensorwise(&w.descale));
            gemm::nt_of(gpu, &x.codes, &Codes::Rows(w.codes), out, scales)
        }
    }
}

/// Gradients of [`forward`] for `d_out` (M, N): d_x (M, K) in x's dtype if `need_d_x`, d_w in w's shape and dtype.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward(
    gpu: &Gpu,
    d_out: &Tensor,
    x: &Tensor,
    w: &Tensor,
    offs: Option<&Tensor>,
    recipe: Recipe,
    need_d_x: bool,
) -> Result<(Option<Tensor>, Tensor)> {
    let d_x = if need_d_x { InputGradient::New } else { InputGradient::None };
    backward_with(gpu, d_out, &Operand::new(x, offs), w, recipe, d_x)
}

/// What becomes of the gradient of a linear's input.
#[derive(Clone, Copy, Debug)]
pub enum InputGradient<'a> {
    /// It is not computed.
    None,
    /// It is a new tensor.
    New,
    /// It is added to this one, like x, in place.
    Onto(&'a Tensor),
}

/// [`backward`] of an input whose quantized form other weights use too, and whose gradient may be a sum over them.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward_with(
    gpu: &Gpu,
    d_out: &Tensor,
    input: &Operand,
    w: &Tensor,
    recipe: Recipe,
    d_x: InputGradient<'_>,
) -> Result<(Option<Tensor>, Tensor)> {
    let n = check(&input.x, w, recipe);
    assert_eq!(
        (d_out.rows(), d_out.cols(), d_out.dtype()),
        (input.x.rows(), n, input.x.dtype()),
        "fp8_linear: d_out {:?} of x {:?} and w {:?}",
        d_out.shape(),
        input.x.shape(),
        w.shape()
    );
    let wanted = !matches!(d_x, InputGradient::None);
    let quantized = |d_out: &Quantized<Codes>| d_input(gpu, d_out, input, w, recipe, d_x);
    let offs = input.offs.as_ref();
    let d_x = match recipe {
        Recipe::Tensorwise => return tensorwise_backward(gpu, d_out, input, w, d_x),
        Recipe::Rowwise if wanted => {
            // One pass writes both where both products read the same order; tuning may choose different kernels.
            let [order, by_rows] = [Form::Nn, Form::Tn].map(|form| input.order(gpu, form, n));
            let (along_n, along_rows) = if order == by_rows {
                quantize::along_both(gpu, d_out, offs, order)?
            } else {
                let along_n = quantize::along_rows(gpu, d_out, DType::E4M3, order)?;
                (along_n, quantize::along_columns(gpu, d_out, offs, DType::E4M3, by_rows)?)
            };
            let d_x = quantized(&along_n)?;
            drop(along_n);
            return Ok((d_x, d_weight(gpu, &along_rows, input, w)?));
        }
        Recipe::Rowwise => {
            let order = input.order(gpu, Form::Tn, n);
            let d_out = quantize::along_columns(gpu, d_out, offs, DType::E4M3, order)?;
            return Ok((None, d_weight(gpu, &d_out, input, w)?));
        }
        _ if !wanted => None,
        Recipe::HighPrecision => {
            let (d_out, w) = (Codes::Rows(d_out.clone()), Codes::Rows(w.clone()));
            input_product(gpu, &d_out, &w, &input.x, d_x, input.plain())?
        }
        Recipe::RowwiseGwHp => {
            let order = input.order(gpu, Form::Nn, n);
            quantized(&quantize::along_rows(gpu, d_out, DType::E4M3, order)?)?
        }
    };
    let d_w = gemm::tn(gpu, d_out, &input.x, w.dtype(), input.plain())?;
    Ok((d_x, d_w.reshape(w.shape())))
}

/// `a(M, N) w[g](N, K)` in the dtype of x (M, K), new or onto a sum.
fn input_product(
    gpu: &Gpu,
    a: &Codes,
    w: &Codes,
    x: &Tensor,
    d_x: InputGradient<'_>,
    options: GemmOptions<'_>,
) -> Result<Option<Tensor>> {
    match d_x {
        InputGradient::None => Ok(None),
        InputGradient::New => gemm::nn_of(gpu, a, w, x.dtype(), options).map(Some),
        InputGradient::Onto(sum) => {
            assert_eq!((sum.rows(), sum.cols()), (x.rows(), x.cols()), "fp8_linear: sum of d_x, x");
            gemm::nn_codes_into(gpu, a, w, sum, true, options)?;
            Ok(Some(sum.clone()))
        }
    }
}

/// `d_x(M, K) = d_out(M, N) w[g]`, both quantized along N.
fn d_input(
    gpu: &Gpu,
    d_out: &Quantized<Codes>,
    input: &Operand,
    w: &Tensor,
    recipe: Recipe,
    d_x: InputGradient<'_>,
) -> Result<Option<Tensor>> {
    let quantized = match recipe {
        Recipe::RowwiseGwHp => quantize::tensorwise_pow2(gpu, w)?.into(),
        _ => {
            let order = input.order(gpu, Form::Nn, d_out.codes.cols());
            quantize::along_weight_columns(gpu, w, DType::E4M3, order)?
        }
    };
    let col = match recipe {
        Recipe::RowwiseGwHp => Scale::tensorwise(&quantized.descale),
        _ => Scale::per_group(&quantized.descale, w.cols()),
    };
    let scales = input.scaled(Scale::per_row(&d_out.descale), col);
    input_product(gpu, &d_out.codes, &quantized.codes, &input.x, d_x, scales)
}

/// `d_w[g](N, K) = d_out_g^T x_g`, both quantized along the rows of each group.
fn d_weight(gpu: &Gpu, d_out: &Quantized<Codes>, input: &Operand, w: &Tensor) -> Result<Tensor> {
    let (n, k) = (d_out.codes.cols(), input.x.cols());
    let x = input.along_rows(gpu, input.order(gpu, Form::Tn, n))?;
    let scales = input.scaled(Scale::per_group(&d_out.descale, n), Scale::per_group(&x.descale, k));
    let d_w = gemm::tn_of(gpu, &d_out.codes, &x.codes, w.dtype(), scales)?;
    Ok(d_w.reshape(w.shape()))
}

/// Both gradients from one set of codes: a tensor-wise scale does not depend on what is contracted.
fn tensorwise_backward(
    gpu: &Gpu,
    d_out: &Tensor,
    input: &Operand,
    w: &Tensor,
    wanted: InputGradient<'_>,
) -> Result<(Option<Tensor>, Tensor)> {
    let d_out: Quantized<Codes> = quantize::tensorwise(gpu, d_out, DType::E5M2)?.into();
    let row = Scale::tensorwise(&d_out.descale);
    let mut d_x = None;
    if !matches!(wanted, InputGradient::None) {
        let w: Quantized<Codes> = quantize::tensorwise(gpu, w, DType::E4M3)?.into();
        let scales = input.scaled(row, Scale::tensorwise(&w.descale));
        d_x = input_product(gpu, &d_out.codes, &w.codes, &input.x, wanted, scales)?;
    }
    let x = input.whole(gpu)?;
    let scales = input.scaled(row, Scale::tensorwise(&x.descale));
    let d_w = gemm::tn_of(gpu, &d_out.codes, &x.codes, w.dtype(), scales)?;
    Ok((d_x, d_w.reshape(w.shape())))
}

/// N, after checking x (M, K) against the weight; without fp8 both have one dtype.
#[track_caller]
fn check(x: &Tensor, w: &Tensor, recipe: Recipe) -> usize {
    let shape = w.shape();
    assert!(
        (2..=3).contains(&shape.len()) && w.cols() == x.cols(),
        "fp8_linear: x {:?} is (M, K), w {shape:?} is (N, K) or (E, N, K)",
        x.shape()
    );
    let same = recipe != Recipe::HighPrecision || x.dtype() == w.dtype();
    assert!(same, "fp8_linear: x is {}, w is {}, without fp8", x.dtype(), w.dtype());
    shape[shape.len() - 2]
}

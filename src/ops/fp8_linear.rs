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
use crate::gpu::{GemmKernel, Gpu};
use crate::num::DType;
use crate::ops::choice::choose;
use crate::ops::gemm::{self, GemmOptions, Scale};
use crate::ops::gemm_choice::{self, Form, Product};
use crate::ops::panels::{Codes, Order};
use crate::ops::quantize::{self, Quantized, Ready, Wish};
use crate::ops::quantize_wide::{Groups, Tops};
use crate::tensor::Tensor;
use std::cell::RefCell;

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

/// How a product of a linear is computed: one decision, for those who prepare its operands and for the product itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Way {
    kernel: GemmKernel,
    /// What both operands become first, if anything: e4m3, or halves where bf16 runs on matrix units.
    codes: Option<DType>,
}

impl Way {
    /// Of this form for x (M, K) of `dtype`, in so many groups, and weights of N rows.
    fn of(
        gpu: &Gpu,
        form: Form,
        ([m, n, k], groups): ([usize; 3], Option<usize>),
        dtype: DType,
        recipe: Recipe,
    ) -> Way {
        let sizes = match form {
            Form::Nt => [m, n, k],
            Form::Nn => [m, k, n],
            Form::Tn => [n, k, m],
        };
        let fp8 = match recipe {
            Recipe::HighPrecision => false,
            Recipe::RowwiseGwHp => form != Form::Tn,
            Recipe::Rowwise | Recipe::Tensorwise => true,
        };
        let operand = if fp8 { DType::E4M3 } else { dtype };
        let kernel = choose(gpu, &Product { form, operands: [operand; 2], sizes, groups });
        let halves = operand == DType::BF16 && kernel == GemmKernel::Coop;
        Way { kernel, codes: if halves { Some(DType::F16) } else { fp8.then_some(DType::E4M3) } }
    }

    fn order(self) -> Order {
        gemm_choice::order(self.kernel)
    }
}

/// An input with its group ends, and its quantized forms, made when first asked for and kept: two weights that share
/// an input (w1 and w3 of SwiGLU) quantize it once. Make one per pass and drop it after the last use, since it keeps
/// the codes alive.
#[derive(Debug)]
pub struct Operand {
    x: Tensor,
    offs: Option<Tensor>,
    tops: Option<Tops>,
    made: RefCell<Vec<(Key, Quantized<Codes>)>>,
}

/// Along what an operand is quantized.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Axis {
    K,
    Rows,
    Whole,
}

/// What tells the quantized forms of an operand apart.
type Key = (Axis, DType, Order);

impl Operand {
    /// x (M, K); `offs` are the exclusive end rows of the groups (flat u32), for grouped weights.
    pub fn new(x: &Tensor, offs: Option<&Tensor>) -> Operand {
        Operand::with(x, offs, Ready::default())
    }

    /// [`Operand::new`] of a tensor whose maker has left a part of its quantization, with tops of these groups.
    pub(crate) fn with(x: &Tensor, offs: Option<&Tensor>, ready: Ready) -> Operand {
        let key = |q: &Quantized<Codes>| (Axis::K, q.codes.memory().dtype(), q.codes.order());
        let made = ready.rows.into_iter().map(|q| (key(&q), q)).collect();
        Operand { x: x.clone(), offs: offs.cloned(), tops: ready.tops, made: RefCell::new(made) }
    }

    /// Whether its rows are in groups.
    pub fn is_grouped(&self) -> bool {
        self.offs.is_some()
    }

    /// The form of this kind, made now if it is not there.
    fn get(&self, key: Key, make: impl FnOnce() -> Result<Quantized<Codes>>) -> Result<Quantized<Codes>> {
        if let Some((_, known)) = self.made.borrow().iter().find(|(k, _)| *k == key) {
            return Ok(known.clone());
        }
        let made = make()?;
        self.made.borrow_mut().push((key, made.clone()));
        Ok(made)
    }

    fn along_k(&self, gpu: &Gpu, codes: DType, order: Order) -> Result<Quantized<Codes>> {
        self.get((Axis::K, codes, order), || quantize::along_rows(gpu, &self.x, codes, order))
    }

    fn along_rows(&self, gpu: &Gpu, codes: DType, order: Order) -> Result<Quantized<Codes>> {
        self.get((Axis::Rows, codes, order), || {
            quantize::columns(gpu, &self.x, self.groups(), self.tops.as_ref(), codes, order)
        })
    }

    fn whole(&self, gpu: &Gpu) -> Result<Quantized<Codes>> {
        self.get((Axis::Whole, DType::E4M3, Order::Rows), || {
            Ok(quantize::tensorwise(gpu, &self.x, DType::E4M3)?.into())
        })
    }

    fn groups(&self) -> Groups<'_> {
        Groups::of_rows(self.offs.as_ref())
    }

    /// How the product of this form with a weight of N rows is computed.
    fn way(&self, gpu: &Gpu, form: Form, n: usize, recipe: Recipe) -> Way {
        let sizes = [self.x.rows(), n, self.x.cols()];
        Way::of(gpu, form, (sizes, self.offs.as_ref().map(Tensor::numel)), self.x.dtype(), recipe)
    }

    /// What the product of this form would read of the output's gradient, (M, N), if its maker can leave it. For linears whose
    /// input's gradient is wanted.
    pub(crate) fn wish_of_gradient(&self, gpu: &Gpu, n: usize, recipe: Recipe) -> Option<Wish<'_>> {
        let [by_n, by_rows] = [Form::Nn, Form::Tn].map(|form| self.way(gpu, form, n, recipe));
        let is_coded = by_rows.codes.is_some() && recipe != Recipe::Tensorwise;
        wish(by_n, recipe, is_coded.then(|| self.groups()))
    }

    fn plain(&self, way: Way) -> GemmOptions<'_> {
        GemmOptions { offs: self.offs.as_ref(), scales: None, kernel: Some(way.kernel) }
    }

    fn scaled<'a>(&'a self, row: Scale<'a>, col: Scale<'a>, way: Option<Way>) -> GemmOptions<'a> {
        let kernel = way.map(|way| way.kernel);
        GemmOptions { offs: self.offs.as_ref(), scales: Some((row, col)), kernel }
    }
}

/// What a product computed this way reads along the rows of an operand, if that can be made beside the operand.
fn wish(way: Way, recipe: Recipe, tops: Option<Groups<'_>>) -> Option<Wish<'_>> {
    let dtype = way.codes.filter(|_| recipe != Recipe::Tensorwise)?;
    Some(Wish { dtype, order: way.order(), tops })
}

/// What linears with weights of these numbers of rows will read of an input like `x` in `rows` rows, if its maker can leave it and
/// they agree; with `backward`, what their weights' gradients will read too.
pub(crate) fn wish_of_input<'a>(
    gpu: &Gpu,
    (rows, x): (usize, &Tensor),
    readers: &[(usize, Recipe)],
    offs: Option<&'a Tensor>,
    backward: bool,
) -> Option<Wish<'a>> {
    let groups = offs.map(Tensor::numel);
    let way = |form, (n, recipe)| Way::of(gpu, form, ([rows, n, x.cols()], groups), x.dtype(), recipe);
    let (first, others) = readers.split_first()?;
    let forward = way(Form::Nt, *first);
    if others.iter().any(|other| way(Form::Nt, *other) != forward || other.1 != first.1) {
        return None;
    }
    let is_coded = backward && way(Form::Tn, *first).codes.is_some();
    wish(forward, first.1, is_coded.then(|| Groups::of_rows(offs)))
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
    if recipe == Recipe::Tensorwise {
        let (x, w) = (input.whole(gpu)?, quantize::tensorwise(gpu, w, DType::E4M3)?);
        let scales = input.scaled(Scale::tensorwise(&x.descale), Scale::tensorwise(&w.descale), None);
        return gemm::nt_of(gpu, &x.codes, &Codes::Rows(w.codes), out, scales);
    }
    let way = input.way(gpu, Form::Nt, n, recipe);
    let Some(codes) = way.codes else { return gemm::nt(gpu, &input.x, w, out, input.plain(way)) };
    let x = input.along_k(gpu, codes, way.order())?;
    let w = quantize::along_rows(gpu, w, codes, way.order())?;
    let scales = input.scaled(Scale::per_row(&x.descale), Scale::per_group(&w.descale, n), Some(way));
    gemm::nt_of(gpu, &x.codes, &w.codes, out, scales)
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
    backward_of(gpu, (d_out, Ready::default()), input, w, recipe, d_x, None)
}

/// [`backward_with`] for a `d_out` whose maker has left a part of its quantization, as [`Operand::wish_of_gradient`] says. The
/// weight's gradient is written into `d_w`, like the weight, or else is a new tensor.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub(crate) fn backward_of(
    gpu: &Gpu,
    (d_out, ready): (&Tensor, Ready),
    input: &Operand,
    w: &Tensor,
    recipe: Recipe,
    d_x: InputGradient<'_>,
    d_w: Option<&Tensor>,
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
    if recipe == Recipe::Tensorwise {
        return tensorwise_backward(gpu, d_out, input, w, d_x, d_w);
    }
    let [by_n, by_rows] = [Form::Nn, Form::Tn].map(|form| input.way(gpu, form, n, recipe));
    let wanted = !matches!(d_x, InputGradient::None);
    let [along_n, along_rows] = gradient_codes(gpu, d_out, ready, input, (by_n, by_rows), wanted)?;
    let d_x = match &along_n {
        _ if !wanted => None,
        Some(d_out) => {
            let w = along_n_of(gpu, w, d_out.codes.memory().dtype(), (by_n, recipe))?;
            d_input(gpu, d_out, &w, input, (by_n, recipe), d_x)?
        }
        None => {
            let (d_out, w) = (Codes::Rows(d_out.clone()), Codes::Rows(w.clone()));
            input_product(gpu, &d_out, &w, &input.x, d_x, input.plain(by_n))?
        }
    };
    drop(along_n);
    let d_w = match &along_rows {
        Some(d_out) => d_weight(gpu, d_out, input, (w, d_w), by_rows)?,
        None => {
            let (d_out, x) = (Codes::Rows(d_out.clone()), Codes::Rows(input.x.clone()));
            weight_product(gpu, &d_out, &x, (w, d_w), input.plain(by_rows))?
        }
    };
    Ok((d_x, d_w))
}

/// The output's gradient as both products read it, along N and along the rows, where they read codes. One pass writes both if they
/// read the same kind, unless a part is there already; tuning may choose different kernels.
fn gradient_codes(
    gpu: &Gpu,
    d_out: &Tensor,
    ready: Ready,
    input: &Operand,
    (by_n, by_rows): (Way, Way),
    along_n: bool,
) -> Result<[Option<Quantized<Codes>>; 2]> {
    let operand = Operand::with(d_out, input.offs.as_ref(), ready);
    let codes_n = by_n.codes.filter(|_| along_n);
    let nothing = operand.tops.is_none() && operand.made.borrow().is_empty();
    if let (Some(codes), true, true) = (codes_n, nothing, by_n == by_rows) {
        let (a, b) = quantize::both_axes(gpu, d_out, input.groups(), codes, by_n.order())?;
        return Ok([Some(a), Some(b)]);
    }
    let along_n = codes_n.map(|codes| operand.along_k(gpu, codes, by_n.order())).transpose()?;
    let along_rows =
        by_rows.codes.map(|codes| operand.along_rows(gpu, codes, by_rows.order())).transpose()?;
    Ok([along_n, along_rows])
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

/// A weight, or a stack of them, as the input's gradient reads it: quantized along N, or with one scale.
fn along_n_of(gpu: &Gpu, w: &Tensor, codes: DType, (way, recipe): (Way, Recipe)) -> Result<Quantized<Codes>> {
    match recipe {
        Recipe::RowwiseGwHp => Ok(quantize::tensorwise_pow2(gpu, w)?.into()),
        _ => quantize::along_weight_columns(gpu, w, codes, way.order()),
    }
}

/// `d_x(M, K) = d_out(M, N) w[g]`, both quantized along N.
fn d_input(
    gpu: &Gpu,
    d_out: &Quantized<Codes>,
    w: &Quantized<Codes>,
    input: &Operand,
    (way, recipe): (Way, Recipe),
    d_x: InputGradient<'_>,
) -> Result<Option<Tensor>> {
    let col = match recipe {
        Recipe::RowwiseGwHp => Scale::tensorwise(&w.descale),
        _ => Scale::per_group(&w.descale, input.x.cols()),
    };
    let scales = input.scaled(Scale::per_row(&d_out.descale), col, Some(way));
    input_product(gpu, &d_out.codes, &w.codes, &input.x, d_x, scales)
}

/// `a_g^T b_g` in the shape and dtype of w, new or in the place that there is for it.
fn weight_product(
    gpu: &Gpu,
    a: &Codes,
    b: &Codes,
    (w, place): (&Tensor, Option<&Tensor>),
    options: GemmOptions<'_>,
) -> Result<Tensor> {
    let d_w = place_of(gpu, w, place)?;
    gemm::tn_codes_into(gpu, a, b, &d_w, false, options)?;
    Ok(d_w)
}

/// The place for a weight's gradient: the one that there is, or a new tensor like w.
#[track_caller]
fn place_of(gpu: &Gpu, w: &Tensor, place: Option<&Tensor>) -> Result<Tensor> {
    let Some(place) = place else { return Tensor::empty(gpu, "weight gradient", w.shape(), w.dtype()) };
    let kind = |t: &Tensor| (t.numel(), t.cols(), t.dtype());
    assert_eq!(kind(place), kind(w), "fp8_linear: size, columns and dtype of the place for d_w, of w");
    Ok(place.clone())
}

/// `d_w[g](N, K) = d_out_g^T x_g`, both quantized along the rows of each group.
fn d_weight(
    gpu: &Gpu,
    d_out: &Quantized<Codes>,
    input: &Operand,
    w: (&Tensor, Option<&Tensor>),
    way: Way,
) -> Result<Tensor> {
    let (n, k) = (d_out.codes.cols(), input.x.cols());
    let x = input.along_rows(gpu, d_out.codes.memory().dtype(), way.order())?;
    let row = Scale::per_group(&d_out.descale, n);
    let scales = input.scaled(row, Scale::per_group(&x.descale, k), Some(way));
    weight_product(gpu, &d_out.codes, &x.codes, w, scales)
}

/// Both gradients from one set of codes: a tensor-wise scale does not depend on what is contracted.
fn tensorwise_backward(
    gpu: &Gpu,
    d_out: &Tensor,
    input: &Operand,
    w: &Tensor,
    wanted: InputGradient<'_>,
    d_w: Option<&Tensor>,
) -> Result<(Option<Tensor>, Tensor)> {
    let d_out: Quantized<Codes> = quantize::tensorwise(gpu, d_out, DType::E5M2)?.into();
    let row = Scale::tensorwise(&d_out.descale);
    let mut d_x = None;
    if !matches!(wanted, InputGradient::None) {
        let w: Quantized<Codes> = quantize::tensorwise(gpu, w, DType::E4M3)?.into();
        let scales = input.scaled(row, Scale::tensorwise(&w.descale), None);
        d_x = input_product(gpu, &d_out.codes, &w.codes, &input.x, wanted, scales)?;
    }
    let x = input.whole(gpu)?;
    let scales = input.scaled(row, Scale::tensorwise(&x.descale), None);
    let d_w = weight_product(gpu, &d_out.codes, &x.codes, (w, d_w), scales)?;
    Ok((d_x, d_w))
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

mod stacked;
#[cfg(test)]
mod tests;

pub use stacked::{backward_stacked, can_stack, forward_stacked};

//! Linears that share an input and whose weights are of one shape and follow each other in memory, as q, k and v, or w1 and w3: their
//! operands are quantized, and their products computed, in one launch where that can be. The same bits as one by one, but for the
//! weights' gradients, whose sums may be cut differently.

use super::{
    InputGradient, Operand, Recipe, Way, along_n_of, backward_of, check, d_input, d_weight, gradient_codes,
    input_product, place_of, weight_product,
};
use crate::Result;
use crate::gpu::{GemmKernel, Gpu};
use crate::num::DType;
use crate::ops::gemm::{self, Scale};
use crate::ops::gemm_choice::Form;
use crate::ops::panels::{BLOCK, Codes};
use crate::ops::quantize::{self, Quantized, Ready};
use crate::ops::quantize_wide::Groups;
use crate::tensor::Tensor;

/// Whether linears with the weights `w`, (P, N, K) or (P, E, N, K), can be computed as one stack here, and gain by it: on matrix units,
/// where a launch costs more than its work, and if every part of the stack can be bound by itself.
pub fn can_stack(gpu: &Gpu, input: &Operand, w: &Tensor, recipe: Recipe) -> bool {
    let (count, n) = stack_of(&input.x, w, input.is_grouped(), recipe);
    let (m, k, groups) = (input.x.rows(), input.x.cols(), input.offs.as_ref().map(Tensor::numel));
    count > 1
        && recipe != Recipe::Tensorwise
        && !gpu.caps().software
        && input.way(gpu, Form::Nt, n, recipe).kernel == GemmKernel::Coop
        && gemm::is_launch_bound(gpu, [m, n, k], groups)
        && fits(gpu, &input.x, w)
}

/// Whether the parts of a stack for x (M, K) and w can be bound by themselves, and all of them at once.
fn fits(gpu: &Gpu, x: &Tensor, w: &Tensor) -> bool {
    let (caps, shape) = (gpu.caps(), w.shape());
    let (count, m, n, k) = (shape[0], x.rows(), shape[shape.len() - 2], x.cols());
    let experts = w.rows() / (count * n).max(1);
    let quads = [m * n.div_ceil(4), experts * n * k.div_ceil(4)];
    let values = [quads[0] * x.dtype().quad_bytes(), quads[1] * w.dtype().quad_bytes()];
    let (codes, scales) =
        (quads.map(|quads| quads * DType::E4M3.quad_bytes()), [m, experts * n, experts * k]);
    let parts = values.into_iter().chain(codes).chain(scales.map(|count| count * DType::F32.size()));
    let padded = |size: usize| size.next_multiple_of(BLOCK);
    let panels = [padded(m) * n, m * padded(n), experts * padded(n) * k, experts * n * padded(k)];
    // No element is larger than an f32.
    let largest = count * panels.into_iter().max().unwrap_or(0) * DType::F32.size();
    parts.into_iter().all(|bytes| (bytes as u64).is_multiple_of(caps.align))
        && largest as u64 <= caps.max_binding.min(caps.max_buffer)
}

/// P and N of a stack of weights, after [`check`].
#[track_caller]
fn stack_of(x: &Tensor, w: &Tensor, grouped: bool, recipe: Recipe) -> (usize, usize) {
    let shape = w.shape();
    // As one weight of a dense linear may be (1, N, K).
    let fits = match shape {
        [p, _, _] => !grouped && *p > 0,
        [p, e, _, _] => (grouped || *e == 1) && *p > 0,
        _ => false,
    };
    assert!(
        fits,
        "fp8_linear: a stack of weights is (P, N, K), or (P, E, N, K) in groups, not {shape:?} {}",
        if grouped { "in groups" } else { "without" }
    );
    (shape[0], check(x, &w.unstack(0), recipe))
}

/// All matrices of a stack of weights, one after the other: (P, N, K), or (P*E, N, K).
fn matrices(w: &Tensor) -> Tensor {
    let [.., n, k] = w.shape() else { unreachable!("checked before") };
    w.reshape(&[w.rows() / n.max(&1), *n, *k])
}

/// [`super::forward_with`] for P weights, (P, N, K) or (P, E, N, K) in groups: (P, M, N), of each the bits that it has by itself.
/// Without matrix units, parts of both must suit the adapter's binding alignment.
///
/// # Errors
/// As [`super::forward`].
#[track_caller]
pub fn forward_stacked(gpu: &Gpu, input: &Operand, w: &Tensor, recipe: Recipe) -> Result<Tensor> {
    let (count, n) = stack_of(&input.x, w, input.is_grouped(), recipe);
    let out = input.x.dtype();
    if recipe == Recipe::Tensorwise {
        let x = input.whole(gpu)?;
        let result = Tensor::empty(gpu, "linears", &[count, input.x.rows(), n], out)?;
        for p in 0..count {
            let w: Quantized<Codes> = quantize::tensorwise(gpu, &w.unstack(p), DType::E4M3)?.into();
            let scales = input.scaled(Scale::tensorwise(&x.descale), Scale::tensorwise(&w.descale), None);
            gemm::nt_codes_into(gpu, &x.codes, &w.codes, &result.unstack(p), scales)?;
        }
        return Ok(result);
    }
    let (way, w) = (input.way(gpu, Form::Nt, n, recipe), matrices(w));
    let Some(codes) = way.codes else {
        let (x, w) = (Codes::Rows(input.x.clone()), Codes::Rows(w));
        return gemm::nt_stacked(gpu, &x, &w, count, out, input.plain(way));
    };
    let x = input.along_k(gpu, codes, way.order())?;
    let w = quantize::along_rows(gpu, &w, codes, way.order())?;
    let scales = input.scaled(Scale::per_row(&x.descale), Scale::per_group(&w.descale, n), Some(way));
    gemm::nt_stacked(gpu, &x.codes, &w.codes, count, out, scales)
}

/// [`super::backward_with`] for P weights and d_out (P, M, N), whose d_x is the sum over the weights from the last to the first, each
/// product rounded and then added, onto what is there if wished; so it has the bits of one by one. d_w is like w, in the place given.
/// Parts of all must suit the adapter's binding alignment.
///
/// # Errors
/// As [`super::forward`].
#[track_caller]
pub fn backward_stacked(
    gpu: &Gpu,
    d_out: &Tensor,
    input: &Operand,
    w: &Tensor,
    recipe: Recipe,
    d_x: InputGradient<'_>,
    d_w: Option<&Tensor>,
) -> Result<(Option<Tensor>, Tensor)> {
    let (count, n) = stack_of(&input.x, w, input.is_grouped(), recipe);
    let m = input.x.rows();
    assert_eq!(
        (d_out.rows(), d_out.cols(), d_out.dtype()),
        (count * m, n, input.x.dtype()),
        "fp8_linear: d_out {:?} of x {:?} and w {:?}",
        d_out.shape(),
        input.x.shape(),
        w.shape()
    );
    let [by_n, by_rows] = [Form::Nn, Form::Tn].map(|form| input.way(gpu, form, n, recipe));
    let d_w = place_of(gpu, w, d_w)?.reshape(w.shape());
    let d_out = d_out.reshape(&[count, m, n]);
    let pass = Backward { gpu, d_out, input, w, d_w: &d_w, recipe, by_n, by_rows };
    let d_x = match () {
        () if recipe == Recipe::Tensorwise => pass.one_by_one(d_x)?,
        () if input.is_grouped() => pass.grouped(d_x)?,
        () => pass.dense(d_x)?,
    };
    Ok((d_x, d_w))
}

/// The backward pass of a stack.
struct Backward<'a> {
    gpu: &'a Gpu,
    /// (P, M, N)
    d_out: Tensor,
    input: &'a Operand,
    w: &'a Tensor,
    d_w: &'a Tensor,
    recipe: Recipe,
    by_n: Way,
    by_rows: Way,
}

impl Backward<'_> {
    fn count(&self) -> usize {
        self.d_out.shape()[0]
    }

    /// Part `p` of d_out, w and d_w.
    fn part(&self, p: usize) -> [Tensor; 3] {
        [&self.d_out, self.w, self.d_w].map(|t| t.unstack(p))
    }

    /// The sum of what `one` gives for each weight, from the last to the first.
    fn sum(
        &self,
        wanted: InputGradient<'_>,
        mut one: impl FnMut(usize, InputGradient<'_>) -> Result<Option<Tensor>>,
    ) -> Result<Option<Tensor>> {
        let mut sum = None;
        for p in (0..self.count()).rev() {
            let so_far = match (&sum, wanted) {
                (Some(sum), InputGradient::New) => InputGradient::Onto(sum),
                _ => wanted,
            };
            sum = one(p, so_far)?;
        }
        Ok(sum)
    }

    fn one_by_one(&self, wanted: InputGradient<'_>) -> Result<Option<Tensor>> {
        self.sum(wanted, |p, so_far| {
            let [d_out, w, d_w] = self.part(p);
            let d_out = (&d_out, Ready::default());
            Ok(backward_of(self.gpu, d_out, self.input, &w, self.recipe, so_far, Some(&d_w))?.0)
        })
    }

    /// Of the gradients' codes only those along rows could share a launch, which one by one share it with those along columns.
    fn grouped(&self, wanted: InputGradient<'_>) -> Result<Option<Tensor>> {
        let is_wanted = !matches!(wanted, InputGradient::None);
        let weights = self.weights_along_n(is_wanted)?;
        let (gpu, input, ways) = (self.gpu, self.input, (self.by_n, self.by_rows));
        self.sum(wanted, |p, so_far| {
            let [d_out, w, d_w] = self.part(p);
            let [along_n, along_rows] =
                gradient_codes(gpu, &d_out, Ready::default(), input, ways, is_wanted)?;
            let d_x = self.d_x(p, along_n, weights.as_ref(), so_far)?;
            if let Some(d_out) = along_rows {
                d_weight(gpu, &d_out, input, (&w, Some(&d_w)), self.by_rows)?;
            } else {
                let (d_out, x) = (Codes::Rows(d_out), Codes::Rows(input.x.clone()));
                weight_product(gpu, &d_out, &x, (&w, Some(&d_w)), input.plain(self.by_rows))?;
            }
            Ok(d_x)
        })
    }

    fn dense(&self, wanted: InputGradient<'_>) -> Result<Option<Tensor>> {
        let is_wanted = !matches!(wanted, InputGradient::None);
        let [along_n, along_rows] = self.dense_codes(is_wanted)?;
        let weights = self.weights_along_n(is_wanted)?;
        let d_x = match (&along_n, &weights) {
            (Some(d_out), Some(w)) => self.summed(d_out, w, wanted)?,
            _ => self.sum(wanted, |p, so_far| {
                let codes = along_n.as_ref().map(|all| all.part(p, self.count()));
                self.d_x(p, codes, weights.as_ref(), so_far)
            })?,
        };
        drop((along_n, weights));
        let (gpu, input, way) = (self.gpu, self.input, self.by_rows);
        let Some(d_out) = along_rows else {
            let (d_out, x) = (Codes::Rows(self.d_out.clone()), Codes::Rows(input.x.clone()));
            gemm::tn_stacked(gpu, &d_out, &x, self.d_w, input.plain(way))?;
            return Ok(d_x);
        };
        let x = input.along_rows(gpu, d_out.codes.memory().dtype(), way.order())?;
        let row = Scale::per_group(&d_out.descale, d_out.codes.cols());
        let scales = input.scaled(row, Scale::per_group(&x.descale, input.x.cols()), Some(way));
        gemm::tn_stacked(gpu, &d_out.codes, &x.codes, self.d_w, scales)?;
        Ok(d_x)
    }

    /// The sum over all weights, of codes of them and of their outputs' gradients.
    fn summed(
        &self,
        d_out: &Quantized<Codes>,
        w: &Quantized<Codes>,
        wanted: InputGradient<'_>,
    ) -> Result<Option<Tensor>> {
        let (gpu, x) = (self.gpu, &self.input.x);
        let (sum, onto) = match wanted {
            InputGradient::None => return Ok(None),
            InputGradient::New => (Tensor::empty(gpu, "d_x", &[x.rows(), x.cols()], x.dtype())?, false),
            InputGradient::Onto(sum) => (sum.clone(), true),
        };
        assert_eq!((sum.rows(), sum.cols()), (x.rows(), x.cols()), "fp8_linear: sum of d_x, x");
        let (row, col) = (Scale::per_row(&d_out.descale), Scale::per_group(&w.descale, x.cols()));
        gemm::nn_summed(
            gpu,
            &d_out.codes,
            &w.codes,
            &sum,
            onto,
            self.input.scaled(row, col, Some(self.by_n)),
        )?;
        Ok(Some(sum))
    }

    /// All outputs' gradients as both products read them: as weights are quantized, each along its own columns.
    fn dense_codes(&self, along_n: bool) -> Result<[Option<Quantized<Codes>>; 2]> {
        let (gpu, d_out) = (self.gpu, &self.d_out);
        let (by_n, by_rows) = (self.by_n.codes.filter(|_| along_n), self.by_rows.codes);
        if let (Some(codes), true) = (by_n, self.by_n == self.by_rows) {
            let groups = Groups::of_weight(d_out);
            let (a, b) = quantize::both_axes(gpu, d_out, groups, codes, self.by_n.order())?;
            return Ok([Some(a), Some(b)]);
        }
        let a = by_n.map(|codes| quantize::along_rows(gpu, d_out, codes, self.by_n.order())).transpose()?;
        let b = by_rows.map(|codes| quantize::along_weight_columns(gpu, d_out, codes, self.by_rows.order()));
        Ok([a, b.transpose()?])
    }

    /// All weights quantized along N, where the input's gradient reads them so; a scale for a whole weight is made one by one.
    fn weights_along_n(&self, wanted: bool) -> Result<Option<Quantized<Codes>>> {
        let codes = self.by_n.codes.filter(|_| wanted && self.recipe != Recipe::RowwiseGwHp);
        let all = |codes| along_n_of(self.gpu, &matrices(self.w), codes, (self.by_n, self.recipe));
        codes.map(all).transpose()
    }

    /// What weight `p` adds to the input's gradient, of its output's gradient in codes if there are any.
    fn d_x(
        &self,
        p: usize,
        d_out: Option<Quantized<Codes>>,
        weights: Option<&Quantized<Codes>>,
        so_far: InputGradient<'_>,
    ) -> Result<Option<Tensor>> {
        let (gpu, input, [values, w, _]) = (self.gpu, self.input, self.part(p));
        if let InputGradient::None = so_far {
            return Ok(None);
        }
        let Some(d_out) = d_out else {
            let (d_out, w) = (Codes::Rows(values), Codes::Rows(w));
            return input_product(gpu, &d_out, &w, &input.x, so_far, input.plain(self.by_n));
        };
        let how = (self.by_n, self.recipe);
        let w = match weights {
            Some(all) => all.part(p, self.count()),
            None => along_n_of(gpu, &w, d_out.codes.memory().dtype(), how)?,
        };
        d_input(gpu, &d_out, &w, input, how, so_far)
    }
}

#[cfg(test)]
mod tests;

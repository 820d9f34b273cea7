//! Stacks: products that share an operand, of equal sizes, whose other operands and results follow each other in memory. On matrix units
//! a stack is one launch, since short products cost more than their work; elsewhere it is a loop.

use super::{Dims, GemmOptions, NN, NT, Scale, TN, chosen, gemm_coop, grid, launch};
use crate::Result;
use crate::gpu::{GemmKernel, Gpu};
use crate::num::DType;
use crate::ops::gemm_choice::Form;
use crate::ops::panels::Codes;
use crate::tensor::Tensor;

/// `out[p](M, N) = A(M, K) W[p, g](N, K)^T` for a stack of P: W is (P*E, N, K), (P, N, K) without groups; out is (P, M, N). Its columns'
/// de-scales follow each other as its matrices do, the rows' are those of A. Each result has the bits that [`super::nt`] gives it.
///
/// The memory of a part of W, its scales and out must suit the adapter's binding alignment where the kernel is not that of matrix units.
///
/// # Errors
/// The result is over the adapter's limits, or what the device reported.
#[track_caller]
pub(crate) fn nt_stacked(
    gpu: &Gpu,
    a: &Codes,
    w: &Codes,
    stack: usize,
    out: DType,
    options: GemmOptions<'_>,
) -> Result<Tensor> {
    let (n, k) = (w.shape()[w.shape().len() - 2], w.cols());
    assert_eq!(a.cols(), k, "gemm nt: A {:?} and W {:?} contract their last dimension", a.shape(), w.shape());
    assert!(stack > 0 && w.shape().len() == 3, "gemm nt: a stack of {stack} weights {:?}", w.shape());
    let all = w.rows() / n.max(1);
    let groups = options.offs.map_or(1, Tensor::numel);
    assert_eq!(stack * groups, all, "gemm nt: {stack} times the groups in the offsets, W {:?}", w.shape());
    let dims = Dims { m: a.rows(), n, k, groups, stack };
    let result = Tensor::empty(gpu, "gemm results", &[stack, dims.m, n], out)?;
    let one = Dims { stack: 1, ..dims };
    if chosen(gpu, Form::Nt, [a, w], one, options) == GemmKernel::Coop {
        launch(gpu, &NT, (a, w), &result, dims, options, false)?;
        return Ok(result);
    }
    for p in 0..stack {
        let part = options.scales.map(|(_, col)| part_of(col.values, p, stack));
        let scales = options.scales.zip(part.as_ref());
        let scales = scales.map(|((row, col), values)| (row, Scale { values, ..col }));
        let options = GemmOptions { scales, ..options };
        launch(gpu, &NT, (a, &w.part(p, stack)), &result.unstack(p), one, options, false)?;
    }
    Ok(result)
}

/// `out[p](M, N) = A[p](R, M)^T B(R, N)` for a stack: A is (P, R, M), `result` (P, M, N). The rows' de-scales follow each other, P times
/// M, the columns' are those of B. Sums may be cut into other parts than [`super::tn`] of one would.
///
/// Memory as in [`nt_stacked`]: of A, the rows' scales and the results.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub(crate) fn tn_stacked(
    gpu: &Gpu,
    a: &Codes,
    b: &Codes,
    result: &Tensor,
    options: GemmOptions<'_>,
) -> Result<()> {
    let &[stack, rows, m] = a.shape() else { panic!("gemm tn: a stack is (P, R, M), not {:?}", a.shape()) };
    assert_eq!(rows, b.rows(), "gemm tn: A {:?} and B {:?} contract their rows", a.shape(), b.shape());
    assert!(stack > 0 && options.offs.is_none(), "gemm tn: a stack {:?} in groups", a.shape());
    let dims = Dims { m, n: b.cols(), k: rows, groups: 1, stack };
    assert_eq!(result.numel(), stack * m * dims.n, "gemm tn: results {:?} of {dims:?}", result.shape());
    let (result, one) = (result.reshape(&[stack, m, dims.n]), Dims { stack: 1, ..dims });
    if chosen(gpu, Form::Tn, [a, b], one, options) == GemmKernel::Coop {
        return launch(gpu, &TN, (a, b), &result, dims, options, false);
    }
    for p in 0..stack {
        let part = options.scales.map(|(row, _)| part_of(row.values, p, stack));
        let scales = options.scales.zip(part.as_ref());
        let scales = scales.map(|((row, col), values)| (Scale { values, ..row }, col));
        let options = GemmOptions { scales, ..options };
        launch(gpu, &TN, (&a.part(p, stack), b), &result.unstack(p), one, options, false)?;
    }
    Ok(())
}

/// The sum over p, from the last to the first, of `A[p](M, N) W[p, g](N, K)`, each product rounded to the dtype of `result` (M, K) and then
/// added, onto what is there if `accumulate`: the bits of [`super::nn`] and [`super::nn_onto`] one after another. A is (P, M, N), W is
/// (P*E, N, K), (P, N, K) without groups; the de-scales of both follow each other as they do. One launch for short products on matrix
/// units, else a loop.
///
/// Memory as in [`nt_stacked`]: of A, of W and of both scales.
///
/// # Errors
/// What the device reported.
#[track_caller]
pub(crate) fn nn_summed(
    gpu: &Gpu,
    a: &Codes,
    w: &Codes,
    result: &Tensor,
    accumulate: bool,
    options: GemmOptions<'_>,
) -> Result<()> {
    let &[stack, m, k] = a.shape() else { panic!("gemm nn: a stack is (P, M, N), not {:?}", a.shape()) };
    let groups = options.offs.map_or(1, Tensor::numel);
    assert_eq!(w.shape()[..2], [stack * groups, k], "gemm nn: W {:?} of a stack {:?}", w.shape(), a.shape());
    let dims = Dims { m, n: w.cols(), k, groups, stack };
    assert_eq!(result.numel(), m * dims.n, "gemm nn: result {:?} of {dims:?}", result.shape());
    let one = Dims { stack: 1, ..dims };
    let kernel = chosen(gpu, Form::Nn, [a, w], one, options);
    let (tiles, _) = grid(Form::Nn, options.offs.is_some(), one, kernel, &gpu.caps());
    if stack > 1 && kernel == GemmKernel::Coop && gemm_coop::is_short(k, tiles) {
        let by_part = options.scales.map(|(row, col)| (Scale { group: m, ..row }, col));
        return launch(
            gpu,
            &NN,
            (a, w),
            result,
            dims,
            GemmOptions { scales: by_part, ..options },
            accumulate,
        );
    }
    for p in (0..stack).rev() {
        let parts = options.scales.map(|(row, col)| [row, col].map(|s| part_of(s.values, p, stack)));
        let scales = options.scales.zip(parts.as_ref()).map(|((row, col), [of_row, of_col])| {
            (Scale { values: of_row, ..row }, Scale { values: of_col, ..col })
        });
        let options = GemmOptions { scales, ..options };
        let onto = accumulate || p + 1 < stack;
        launch(gpu, &NN, (&a.part(p, stack), &w.part(p, stack)), result, one, options, onto)?;
    }
    Ok(())
}

/// Part `p` of flat de-scales.
fn part_of(scales: &Tensor, p: usize, stack: usize) -> Tensor {
    let each = scales.numel() / stack;
    scales.slice_flat(p * each, (p + 1) * each)
}

/// Whether a launch of such a [`super::nt`] on matrix units costs so much beside its work that a stack pays.
pub(crate) fn is_launch_bound(gpu: &Gpu, [m, n, k]: [usize; 3], groups: Option<usize>) -> bool {
    let dims = Dims { m, n, k, groups: groups.unwrap_or(1), stack: 1 };
    let (tiles, _) = grid(Form::Nt, groups.is_some(), dims, GemmKernel::Coop, &gpu.caps());
    gemm_coop::is_short(k, tiles)
}

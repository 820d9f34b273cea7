//! Input gradients that are the sum of a stack's products, against one product after another: equal bit for bit. What one product is
//! worth is seen in [`super::gemm`].

use super::data::{Codes, Operand, are_bindable, scales};
use super::gemm::Outcome;
use crate::Result;
use crate::gpu::{GemmKernel, Gpu};
use crate::num::DType;
use crate::ops::gemm::{self as op, GemmOptions, Scale};
use crate::ops::panels::Codes as InOrder;
use crate::tensor::Tensor;

/// One sum: how many products, group ends, M, N, K as in [`super::gemm`], and whether it is added to what is there.
struct Sum(usize, Option<&'static [u32]>, [usize; 3], bool);

/// Parts of the first two can be bound by themselves, and of the last, which is long for matrix units: they compute it one by one.
/// Between them one past a tile, an empty group and rows of none, a contraction of one step and of the most that is short.
static TABLE: [Sum; 7] = [
    Sum(2, None, [64, 64, 64], false),
    Sum(3, Some(&[64, 192, 192]), [256, 64, 64], true),
    Sum(3, None, [129, 45, 131], false),
    Sum(4, Some(&[4, 4, 17]), [20, 33, 65], true),
    Sum(2, None, [257, 1, 70], true),
    Sum(2, None, [300, 1000, 36], false),
    Sum(2, None, [192, 1100, 64], false),
];

/// Runs the table, of fp8 codes and of bf16 values, with the kernel that `gpu` chooses, or what `--kernel` names can compute of it.
///
/// # Errors
/// What the device reported; a wrong result is an [`Outcome`].
pub(super) fn sums(gpu: &Gpu) -> Result<Vec<Outcome>> {
    let planner = gpu.planner();
    let mut kept = Vec::new();
    for (sum, codes) in TABLE.iter().flat_map(|sum| [(sum, Codes::Any), (sum, Codes::WideRows)]) {
        let kernel = sum.run(&planner, codes)?.kernel;
        let wished = gpu.options().kernel.is_none_or(|wish| kernel == wish.name());
        if wished && (kernel == GemmKernel::Coop.name() || sum.has_bindable_parts()) {
            kept.push((sum, codes));
        }
    }
    gpu.prepare(&planner)?;
    kept.into_iter().map(|(sum, codes)| sum.run(gpu, codes)).collect()
}

impl Sum {
    fn run(&self, gpu: &Gpu, codes: Codes) -> Result<Outcome> {
        let &Sum(stack, ends, [m, n, k], accumulate) = self;
        let e = ends.map_or(1, <[u32]>::len);
        let a = Operand::new("a", &[stack, m, n], codes);
        let w = Operand::new("b", &[stack * e, n, k], codes);
        let (row, col) = (scales("row", stack * m), scales("col", stack * e * k));
        let offs = ends.map(|ends| Tensor::from_u32(gpu, "ends", ends)).transpose()?;
        let result = || Tensor::from_f32(gpu, "sum", &[m, k], DType::BF16, &vec![1.0; m * k]);
        let product = |a: &Operand, w: &Operand, [row, col]: [&[f32]; 2], sum: &Tensor, one: Option<bool>| {
            let (a, w) = (InOrder::Rows(a.upload(gpu)?), InOrder::Rows(w.upload(gpu)?));
            let row = Tensor::from_flat_f32(gpu, "row scales", row)?;
            let col = Tensor::from_flat_f32(gpu, "column scales", col)?;
            let of_codes = (Scale::per_row(&row), Scale::per_group(&col, k));
            let scales = (codes != Codes::WideRows).then_some(of_codes);
            let options = GemmOptions { offs: offs.as_ref(), scales, kernel: None };
            match one {
                None => op::nn_summed(gpu, &a, &w, sum, accumulate, options),
                Some(onto) => op::nn_codes_into(gpu, &a, &w, sum, onto, options),
            }
        };
        let (before, together) = (gpu.launches(), result()?);
        product(&a, &w, [&row, &col], &together, None)?;
        let kernel = super::launched(gpu, &before, "gemm");
        let case = format!("sum of {stack} nn {m} x {n} x {k}, ends {ends:?}, {codes:?} codes, {accumulate}");
        let apart = result()?;
        for p in (0..stack).rev() {
            let part = |all: &'_ [f32]| all[p * all.len() / stack..(p + 1) * all.len() / stack].to_vec();
            let (row, col) = (part(&row), part(&col));
            let onto = accumulate || p + 1 < stack;
            product(&a.part(p, stack), &w.part(p, stack), [&row, &col], &apart, Some(onto))?;
        }
        if gpu.is_planner() {
            return Ok(Outcome { case, kernel, error: None });
        }
        let (together, apart) = (together.to_f32(gpu)?, apart.to_f32(gpu)?);
        let other = together.iter().zip(&apart).position(|(a, b)| a.to_bits() != b.to_bits());
        let error = other.map(|at| {
            let (row, col) = (at / k, at % k);
            format!("{} at row {row}, column {col}; {} one by one", together[at], apart[at])
        });
        Ok(Outcome { case, kernel, error })
    }

    /// Whether parts of both operands and of their scales can be bound by themselves.
    fn has_bindable_parts(&self) -> bool {
        let &Sum(_, ends, [m, n, k], _) = self;
        let e = ends.map_or(1, <[u32]>::len);
        are_bindable(&[4 * m * n.div_ceil(4), 4 * e * n * k.div_ceil(4), 4 * m, 4 * e * k])
    }
}

//! Cases of kernels that quantize a tensor as they make it, as training has them in front of a linear in fp8: beside the tensor they
//! write its codes, de-scales and, for backward, the tops of its columns. Where an adapter has none, both steps are measured.

use super::activations::{EPS, Rows, case, sample};
use super::check::{Check, Sample};
use super::data::places;
use super::runner::Case;
use crate::Result;
use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::fp8_linear::{Recipe, wish_of_input};
use crate::ops::quantize::{self, Ready, Wish};
use crate::ops::rmsnorm::{self, Norm};
use crate::ops::swiglu;
use crate::reference;
use crate::tensor::Tensor;
use std::rc::Rc;

/// Places of each result that are checked.
const SAMPLES: usize = 24;

/// Makes a tensor, and what is wished of it.
pub(super) type Make = Box<dyn Fn(&Gpu, Option<Wish<'_>>) -> Result<(Tensor, Ready)>>;

/// The case of an op that makes a bf16 tensor (M, K) in groups that end at `offs`, reading `read` bytes, for linears with weights as
/// wide as the tensor. Its own `check` judges the tensor; the codes must be those that the quantizer makes of it, bit for bit.
pub(super) fn quantized(
    op: &str,
    (shape, [m, k]): (&[usize], [usize; 2]),
    offs: Option<&Tensor>,
    read: usize,
    make: Make,
    check: impl Fn(&Gpu, &Tensor) -> Result<Check> + 'static,
) -> Case {
    let tops = move |ready: &Ready| ready.tops.iter().map(|tops| tops.memory().clone()).collect::<Vec<_>>();
    let offs = offs.cloned();
    let one = Rc::new(move |gpu: &Gpu| {
        // As the linears would.
        let like = Tensor::empty(gpu, "shape", &[1, k], DType::BF16)?;
        let wish = wish_of_input(gpu, (m, &like), &[(k, Recipe::Rowwise)], offs.as_ref(), true);
        let (made, mut ready) = make(gpu, wish)?;
        let rows = match (ready.rows.take(), wish) {
            (Some(rows), _) => rows,
            (None, Some(wish)) => quantize::along_rows(gpu, &made, wish.dtype, wish.order)?,
            (None, None) => return Ok(vec![made]),
        };
        let wide = rows.codes.memory().clone();
        Ok([vec![made, wide, rows.descale], tops(&ready)].concat())
    });
    let check = move |gpu: &Gpu, results: &[Tensor]| {
        let [made, codes, descale, ..] = results else { return check(gpu, &results[0]) };
        let order = wish_of_input(gpu, (m, made), &[(k, Recipe::Rowwise)], None, true).map(|w| w.order);
        let want = quantize::along_rows(gpu, made, codes.dtype(), order.expect("codes were made"))?;
        let same = same_bytes(gpu, codes, want.codes.memory())? && same_bytes(gpu, descale, &want.descale)?;
        let wrong = (!same).then(|| "codes are not the quantizer's".to_owned());
        Ok(check(gpu, made)?.and(Check { error: 0.0, wrong }))
    };
    let bytes = read + m * k * 3 + 4 * m;
    case(op, shape, DType::BF16, bytes, move |gpu| one(gpu), check)
}

fn same_bytes(gpu: &Gpu, a: &Tensor, b: &Tensor) -> Result<bool> {
    let bytes = |t: &Tensor| gpu.download(t.memory().0, t.memory().1, t.bytes());
    Ok(bytes(a)? == bytes(b)?)
}

/// SwiGLU of (T, F) with the quantization of its result.
///
/// # Errors
/// Limits or memory of the device.
pub fn gate(gpu: &Gpu, [t, f]: [usize; 2]) -> Result<Case> {
    let [gate, up] = ["gate", "up"].map(|name| Rows::new(gpu, name, [t, f], DType::BF16));
    let (gate, up) = (gate?, up?);
    let (g, u) = (gate.tensor.clone(), up.tensor.clone());
    let make: Make = Box::new(move |gpu, wish| swiglu::forward_for(gpu, &g, &u, wish));
    Ok(quantized("swiglu_quantize", (&[t, f], [t, f]), None, 4 * t * f, make, move |gpu, h| {
        let want = |p| {
            let h = reference::swiglu::forward(&[gate.at(p)], &[up.at(p)])[0];
            sample(p, h, (DType::BF16, 2.0), 1e-5)
        };
        let samples: Vec<Sample> = places(t, f, SAMPLES).into_iter().map(want).collect();
        Check::tensor(gpu, "h", h, &samples)
    }))
}

/// RMSNorm of (T, D) with the quantization of its result, which must be that of the norm alone, bit for bit.
///
/// # Errors
/// Limits or memory of the device.
pub fn norm(gpu: &Gpu, [t, d]: [usize; 2]) -> Result<Case> {
    let x = Rows::new(gpu, "norm x", [t, d], DType::BF16)?;
    let weight = Rows::new(gpu, "norm weight", [1, d], DType::BF16)?;
    let (tx, tw) = (x.tensor.clone(), weight.tensor.clone());
    let make: Make = Box::new(move |gpu, wish| {
        let norm = Norm { x: &tx, weight: &tw, sum: None, eps: EPS };
        rmsnorm::forward_for(gpu, norm, wish).map(|(y, _, ready)| (y, ready))
    });
    // With the rows' factors, which are written.
    let bytes = 2 * t * d + 2 * d + 4 * t;
    Ok(quantized("rmsnorm_quantize", (&[t, d], [t, d]), None, bytes, make, move |gpu, y| {
        let want = |(r, c)| {
            let row = reference::rmsnorm::forward(&x.row(r), &weight.row(0), f64::from(EPS));
            sample((r, c), row[c], (DType::BF16, 1.0), 1e-5)
        };
        let samples: Vec<Sample> = places(t, d, SAMPLES).into_iter().map(want).collect();
        let (alone, _) = rmsnorm::forward(gpu, &x.tensor, &weight.tensor, EPS)?;
        let wrong = (!same_bytes(gpu, y, &alone)?).then(|| "y is not the norm's alone".to_owned());
        Ok(Check::tensor(gpu, "y", y, &samples)?.and(Check { error: 0.0, wrong }))
    }))
}

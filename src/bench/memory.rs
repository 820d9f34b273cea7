//! Cases bound by memory: a copy, and the quantizers.

use super::check::{Check, Sample, read, read_flat};
use super::data::{Random, Split, places};
use super::runner::{Case, Work};
use crate::Result;
use crate::gpu::Gpu;
use crate::num::{DType, Fp8};
use crate::ops::elementwise;
use crate::ops::quantize::{self, Quantized};
use crate::reference;
use crate::tensor::Tensor;

/// Columns of the copied tensor.
const COLS: usize = 1024;
/// Places of each result that are checked.
const SAMPLES: usize = 24;

/// Copies `bytes` bytes (whole rows of 4 KiB) with a kernel: what the adapter's memory gives, as the other kernels see it.
///
/// # Errors
/// Limits or memory of the device.
pub fn copy(gpu: &Gpu, bytes: usize) -> Result<Case> {
    let rows = (bytes / 4 / COLS).max(1);
    let values = Random::new("copy", 1.0, DType::F32);
    let from = values.tensor(gpu, "copied", &[rows, COLS])?;
    let to = Tensor::empty(gpu, "copy", &[rows, COLS], DType::F32)?;
    let check = move |gpu: &Gpu, results: &[Tensor]| {
        let samples: Vec<Sample> = places(rows, COLS, SAMPLES)
            .into_iter()
            .map(|(row, col)| exact(row, col, f64::from(values.value(row * COLS + col))))
            .collect();
        Check::tensor(gpu, "copy", &results[0], &samples)
    };
    Ok(Case {
        op: "copy".into(),
        shape: format!("{rows}x{COLS}"),
        groups: "-".into(),
        dtype: "f32".into(),
        work: Work::Bytes((2 * rows * COLS * 4) as f64),
        run: Box::new(move |gpu| elementwise::cast_into(gpu, &from, &to).map(|()| vec![to.clone()])),
        check: Box::new(check),
    })
}

fn exact(row: usize, col: usize, want: f64) -> Sample {
    Sample { row, col, want, tolerance: 0.0 }
}

/// Along what a quantizer takes its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Row,
    Column,
}

/// The quantizers on bf16 input: of (M, K) rows, columns of each group, and both; of a weight (E, N, K) columns, and both.
///
/// # Errors
/// Limits or memory of the device.
pub fn quantizers(gpu: &Gpu, (m, k): (usize, usize), weight: [usize; 3], split: &Split) -> Result<Vec<Case>> {
    let x = Random::new("quantized", 1.0, DType::BF16);
    let rows = x.tensor(gpu, "x", &[m, k])?;
    let ends = Tensor::from_u32(gpu, "ends", &split.ends())?;
    let [e, n, wk] = weight;
    let w = Random::new("weight", 0.02, DType::BF16);
    let experts = w.tensor(gpu, "w", &weight)?;
    let dense = Split::dense(m);
    let row = Form { axes: &[Axis::Row], size: (m, k), values: x, split: &dense };
    let column = Form { axes: &[Axis::Column], split, ..row };
    let both = Form { axes: &[Axis::Row, Axis::Column], ..column };
    let equal = Split::uniform(e * n, e);
    let expert = Form { axes: &[Axis::Column], size: (e * n, wk), values: w, split: &equal };
    let experts_both = Form { axes: both.axes, ..expert };
    let pair = |(a, b)| vec![a, b];
    let (x, w) = (rows, experts);
    let weights = |case: Case| Case { shape: format!("{e}x{n}x{wk}"), groups: "-".into(), ..case };
    let [x1, x2, x3] = [x.clone(), x.clone(), x];
    let [w1, w2] = [w.clone(), w];
    let [ends1, ends2] = [ends.clone(), ends];
    Ok(vec![
        quantizer("quantize_rowwise", row, move |gpu| Ok(vec![quantize::rowwise(gpu, &x1)?])),
        quantizer("quantize_colwise", column, move |gpu| {
            Ok(vec![quantize::colwise(gpu, &x2, Some(&ends1))?])
        }),
        quantizer("quantize_both", both, move |gpu| quantize::both(gpu, &x3, Some(&ends2)).map(pair)),
        weights(quantizer("quantize_weight_colwise", expert, move |gpu| {
            Ok(vec![quantize::weight_colwise(gpu, &w1)?])
        })),
        weights(quantizer("quantize_weight_both", experts_both, move |gpu| {
            quantize::weight_both(gpu, &w2).map(pair)
        })),
    ])
}

/// What a quantizer's case quantizes, and along which axes.
#[derive(Clone, Copy)]
struct Form<'a> {
    axes: &'static [Axis],
    size: (usize, usize),
    values: Random,
    split: &'a Split,
}

fn quantizer(op: &str, form: Form, run: impl Fn(&Gpu) -> Result<Vec<Quantized>> + 'static) -> Case {
    let Form { axes, size: (rows, cols), values, split } = form;
    let scales = |axis: &Axis| if *axis == Axis::Row { rows } else { split.sizes.len() * cols };
    let written: usize = axes.iter().map(|axis| rows * cols + 4 * scales(axis)).sum();
    let (name, groups) = (op.to_string(), split.clone());
    let check = move |gpu: &Gpu, results: &[Tensor]| {
        let mut all = Check::default();
        for (axis, results) in axes.iter().zip(results.chunks(2)) {
            all = all.and(check_codes(gpu, &name, (rows, cols), *axis, values, &groups, results)?);
        }
        Ok(all)
    };
    Case {
        op: op.into(),
        shape: format!("{rows}x{cols}"),
        groups: split.name.clone(),
        dtype: "bf16".into(),
        work: Work::Bytes((2 * rows * cols + written) as f64),
        run: Box::new(move |gpu| {
            run(gpu).map(|all| all.into_iter().flat_map(|q| [q.codes, q.descale]).collect())
        }),
        check: Box::new(check),
    }
}

/// Codes and de-scales at sampled places are those of the reference, bit for bit.
fn check_codes(
    gpu: &Gpu,
    name: &str,
    (rows, cols): (usize, usize),
    axis: Axis,
    values: Random,
    split: &Split,
    results: &[Tensor],
) -> Result<Check> {
    let places = places(rows, cols, SAMPLES);
    let (mut codes, mut scales, mut at) = (Vec::new(), Vec::new(), Vec::new());
    for &(row, col) in &places {
        let (line, here, scale) = match axis {
            Axis::Row => (values.vector(row * cols, 1, cols), col, row),
            Axis::Column => {
                let g = split.group_of(row);
                let range = split.range(g);
                let line = values.vector(range.start * cols + col, cols, range.len());
                (line, row - range.start, g * cols + col)
            }
        };
        let want = reference::quantize::rowwise(&line, 1, line.len(), Fp8::E4m3);
        codes.push(exact(row, col, want.values()[here]));
        scales.push(exact(0, scale, f64::from(want.inverse()[0])));
        at.push(scale);
    }
    let got = read(gpu, &results[0], &places)?;
    let check = Check::of(&format!("{name} codes"), &codes, &got);
    Ok(check.and(Check::of(&format!("{name} de-scales"), &scales, &read_flat(gpu, &results[1], &at)?)))
}

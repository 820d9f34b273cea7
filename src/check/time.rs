//! How fast the matrix kernels are, each checked on sampled outputs first.

use super::data::{Codes, Operand, scales};
use super::gemm::bound;
use crate::gpu::Gpu;
use crate::num::rng::Stream;
use crate::num::{DType, Fp8};
use crate::ops::gemm::{self as op, GemmOptions, Scale};
use crate::ops::gemm_choice::Form;
use crate::tensor::Tensor;
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// One measurement.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Form, operands, M, K, N and groups.
    pub case: String,
    /// The kernel that ran.
    pub kernel: String,
    /// Median of five, milliseconds a product; wall clock over several in one submit.
    pub median_ms: f64,
    /// Floating-point operations of the rows that exist, `2 K N sum M_g`, over the median: 10^12 a second.
    pub tflops: f64,
}

/// Rows in all groups, contraction (tn: width of A), width of the result.
const SHAPES: [(usize, usize, usize); 2] = [(16384, 4096, 4096), (16384, 5120, 8192)];
const UNIFORM: [u32; 8] = [2048; 8];
const RAGGED: [u32; 8] = [8199, 4099, 2050, 1025, 512, 256, 128, 115];
/// Outputs compared in each case.
const SAMPLES: u64 = 320;

/// Measures fp8 products in the three forms, and bf16 ones in the first, over uniform and ragged groups; `say` hears each
/// result at once.
///
/// # Errors
/// A wrong result, too little memory, or what the device reported.
pub fn time(gpu: &Gpu, mut say: impl FnMut(&Timing)) -> Result<()> {
    let warm = Instant::now();
    for (m, k, n) in SHAPES {
        let a = Operand::new("a", &[m, k], Codes::Normal);
        let w = Operand::new("w", &[8, n, k], Codes::Normal);
        let b = Operand::new("b", &[m, n], Codes::Normal);
        let device = [&a, &w, &b].map(|o| o.upload(gpu));
        let [at, wt, bt] = device;
        let (at, wt, bt) = (at?, wt?, bt?);
        let factors = Factors::new(gpu, m, k, n)?;
        for (groups, sizes) in [("uniform", UNIFORM), ("ragged", RAGGED)] {
            let ends: Vec<u32> =
                sizes.iter().scan(0, |end, s| Some(*end + s).inspect(|e| *end = *e)).collect();
            let offs = Tensor::from_u32(gpu, "ends", &ends)?;
            for form in Form::ALL {
                let case = Case { form, dims: [m, k, n], ends: &ends, factors: &factors };
                let host = [&a, if form == Form::Tn { &b } else { &w }];
                let second = match form {
                    Form::Nt => wt.clone(),
                    Form::Nn => Tensor::view(wt.memory().0, wt.memory().1, &[8, k, n], DType::E4M3),
                    Form::Tn => bt.clone(),
                };
                let before = gpu.launches();
                case.verify(gpu, host, &case.product(gpu, &at, &second, &offs)?)?;
                let kernel = super::launched(gpu, &before, "gemm");
                let run = || case.product(gpu, &at, &second, &offs).map(drop);
                let ms = median(gpu, warm, run)?;
                let tflops = 2.0 * (m * k * n) as f64 / ms / 1e9;
                let case = format!("{} e4m3 {m} x {k} x {n}, {groups}", form.name());
                say(&Timing { case, kernel, median_ms: ms, tflops });
            }
        }
        halves(gpu, warm, [m, k, n], &mut say)?;
    }
    Ok(())
}

/// Runs for two seconds since `warm`, then five times as many products as take 60 ms; median, per product.
fn median(gpu: &Gpu, warm: Instant, run: impl Fn() -> Result<()>) -> Result<f64> {
    let several = |count: usize| -> Result<f64> {
        let start = Instant::now();
        for _ in 0..count {
            run()?;
        }
        gpu.finish()?;
        Ok(start.elapsed().as_secs_f64() * 1e3 / count as f64)
    };
    let mut each = several(1)?;
    while warm.elapsed() < Duration::from_secs(2) {
        each = several(4)?;
    }
    each = each.min(several(4)?);
    let count = (60.0 / each).ceil().clamp(1.0, 100.0) as usize;
    let mut all = (0..5).map(|_| several(count)).collect::<Result<Vec<_>>>()?;
    all.sort_by(f64::total_cmp);
    Ok(all[2])
}

/// bf16 operands, uniform groups, conversion to halves included. What they hold is any bits of finite numbers; the table
/// of [`super::gemm()`] has checked such results.
fn halves(gpu: &Gpu, warm: Instant, [m, k, n]: [usize; 3], say: &mut impl FnMut(&Timing)) -> Result<()> {
    let stream = Stream::new(4, "bf16");
    let table: Vec<f32> = (0..1 << 16).map(|i| stream.normal(i)).collect();
    let values =
        |len: usize| (0..len).map(|i| table[i.wrapping_mul(0x9E37_79B1) >> 7 & 0xffff]).collect::<Vec<_>>();
    let a = Tensor::from_f32(gpu, "a", &[m, k], DType::BF16, &values(m * k))?;
    let w = Tensor::from_f32(gpu, "w", &[8, n, k], DType::BF16, &values(8 * n * k))?;
    let offs = Tensor::from_u32(gpu, "ends", &[1, 2, 3, 4, 5, 6, 7, 8].map(|g| g * (m / 8) as u32))?;
    let options = GemmOptions { offs: Some(&offs), ..GemmOptions::default() };
    let before = gpu.launches();
    let ms = median(gpu, warm, || op::nt(gpu, &a, &w, DType::BF16, options).map(drop))?;
    let kernel = super::launched(gpu, &before, "gemm");
    let tflops = 2.0 * (m * k * n) as f64 / ms / 1e9;
    say(&Timing { case: format!("nt bf16 {m} x {k} x {n}, uniform"), kernel, median_ms: ms, tflops });
    Ok(())
}

/// Scales of the three forms, on both sides: rows of tokens, and columns (tn: rows too) of each group.
struct Factors {
    row: Vec<f32>,
    col: Vec<f32>,
    row_t: Tensor,
    col_t: Tensor,
}

impl Factors {
    fn new(gpu: &Gpu, m: usize, k: usize, n: usize) -> Result<Factors> {
        let (row, col) = (scales("row", m.max(8 * k)), scales("col", 8 * n));
        let row_t = Tensor::from_flat_f32(gpu, "row scales", &row)?;
        let col_t = Tensor::from_flat_f32(gpu, "column scales", &col)?;
        Ok(Factors { row, col, row_t, col_t })
    }
}

struct Case<'a> {
    form: Form,
    dims: [usize; 3],
    ends: &'a [u32],
    factors: &'a Factors,
}

impl Case<'_> {
    fn product(&self, gpu: &Gpu, a: &Tensor, b: &Tensor, offs: &Tensor) -> Result<Tensor> {
        let [_, k, n] = self.dims;
        let f = self.factors;
        let row =
            if self.form == Form::Tn { Scale::per_group(&f.row_t, k) } else { Scale::per_row(&f.row_t) };
        let scales = Some((row, Scale::per_group(&f.col_t, n)));
        let options = GemmOptions { offs: Some(offs), scales, kernel: None };
        match self.form {
            Form::Nt => op::nt(gpu, a, b, DType::BF16, options),
            Form::Nn => op::nn(gpu, a, b, DType::BF16, options),
            Form::Tn => op::tn(gpu, a, b, DType::BF16, options),
        }
    }

    /// Compares random outputs with their sums in f64.
    fn verify(&self, gpu: &Gpu, [a, b]: [&Operand; 2], out: &Tensor) -> Result<()> {
        let [m, k, n] = self.dims;
        let stream = Stream::new(2, self.form.name());
        let decode = |o: &Operand, at: usize| f64::from(Fp8::E4m3.decode(o.codes[at]));
        for s in 0..SAMPLES {
            let pick = |i: u64, below: usize| stream.word(3 * s + i) as usize % below;
            let j = pick(1, n);
            let (row, scale, terms, g): (usize, f32, Vec<f64>, usize) = if self.form == Form::Tn {
                let (g, i) = (s as usize % 8, pick(0, k));
                let from = if g == 0 { 0 } else { self.ends[g - 1] };
                let terms = (from..self.ends[g]).map(|r| r as usize);
                let terms = terms.map(|r| decode(a, r * k + i) * decode(b, r * n + j)).collect();
                (g * k + i, self.factors.row[g * k + i], terms, g)
            } else {
                let i = pick(0, m);
                let g = self.ends.iter().take_while(|e| **e as usize <= i).count();
                let at =
                    |c: usize| if self.form == Form::Nt { (g * n + j) * k + c } else { (g * k + c) * n + j };
                let terms = (0..k).map(|c| decode(a, i * k + c) * decode(b, at(c))).collect();
                (i, self.factors.row[i], terms, g)
            };
            let factor = f64::from(scale) * f64::from(self.factors.col[g * n + j]);
            let want = terms.iter().sum::<f64>() * factor;
            let sum = terms.iter().map(|t| t.abs()).sum::<f64>() * factor;
            let flat = out.reshape(&[out.rows(), n]);
            let got = f64::from(flat.slice_rows(row, row + 1).to_f32(gpu)?[j]);
            let most = bound(DType::BF16, terms.len(), want, sum);
            if (got - want).abs() > most || got.is_nan() {
                let what = format!(
                    "{} {:?}: out[{row}][{j}] is {got}, want {want} within {most}",
                    self.form.name(),
                    self.dims
                );
                return Err(Error::gpu(what, "run `moe8 selftest`, and use --no-coop until it passes"));
            }
        }
        Ok(())
    }
}

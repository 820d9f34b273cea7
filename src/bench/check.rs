//! Results against f64 on the host, at sampled places, so that large shapes stay cheap to check.

use crate::Result;
use crate::gpu::Gpu;
use crate::num::{DType, bf16, e4m3, e5m2};
use crate::tensor::Tensor;

/// One place of a result and what must stand there.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Row, all leading dimensions as one.
    pub row: usize,
    /// Column.
    pub col: usize,
    /// The value in f64.
    pub want: f64,
    /// How far the result may be off.
    pub tolerance: f64,
}

/// The outcome of a check.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Check {
    /// The largest difference, as a part of the root mean square of what was wanted.
    pub error: f64,
    /// What is wrong, if something is.
    pub wrong: Option<String>,
}

impl Check {
    /// Compares values with samples of the result called `name`. A NaN is always wrong.
    pub fn of(name: &str, samples: &[Sample], got: &[f64]) -> Check {
        assert_eq!(samples.len(), got.len(), "a value for each sample");
        let squares: f64 = samples.iter().map(|s| s.want * s.want).sum();
        let rms = (squares / samples.len().max(1) as f64).sqrt().max(f64::MIN_POSITIVE);
        let mut check = Check::default();
        for (s, got) in samples.iter().zip(got) {
            let off = (got - s.want).abs();
            check.error = if off.is_nan() { f64::NAN } else { check.error.max(off / rms) };
            let fits = off <= s.tolerance;
            if !fits {
                let place = format!("{name}[{}, {}]", s.row, s.col);
                check.wrong = Some(format!("{place} is {got}, not {} within {:.2e}", s.want, s.tolerance));
                break;
            }
        }
        check
    }

    /// [`Check::of`] for places of a tensor of quads.
    ///
    /// # Errors
    /// What the device reported.
    pub fn tensor(gpu: &Gpu, name: &str, t: &Tensor, samples: &[Sample]) -> Result<Check> {
        let places: Vec<_> = samples.iter().map(|s| (s.row, s.col)).collect();
        Ok(Check::of(name, samples, &read(gpu, t, &places)?))
    }

    /// Both: the larger error, and the first thing wrong.
    #[must_use]
    pub fn and(self, other: Check) -> Check {
        let error = if other.error.is_nan() { other.error } else { self.error.max(other.error) };
        Check { error, wrong: self.wrong.or(other.wrong) }
    }
}

/// Values at places (row, column) of a tensor of quads; fp8 codes as what they stand for.
///
/// # Errors
/// What the device reported.
pub fn read(gpu: &Gpu, t: &Tensor, places: &[(usize, usize)]) -> Result<Vec<f64>> {
    let (buffer, offset) = t.memory();
    let quad = t.dtype().quad_bytes() as u64;
    let all: Vec<_> = places
        .iter()
        .map(|(row, col)| {
            let at = offset + (row * t.quads() + col / 4) as u64 * quad;
            gpu.download_later(buffer, at, quad)
        })
        .collect();
    let decode = |(download, (_, col)): (crate::gpu::Download, &(usize, usize))| {
        let bytes = download.wait()?;
        let size = t.dtype().size();
        let b = &bytes[col % 4 * size..][..size];
        Ok(f64::from(match t.dtype() {
            DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            DType::BF16 => bf16::from_bits(u16::from_le_bytes([b[0], b[1]])),
            DType::E4M3 => e4m3::decode(b[0]),
            DType::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
            DType::E5M2 => e5m2::decode(b[0]),
            DType::U32 => panic!("u32 tensors are flat"),
        }))
    };
    all.into_iter().zip(places).map(decode).collect()
}

/// Values at places of a flat f32 tensor.
///
/// # Errors
/// What the device reported.
pub fn read_flat(gpu: &Gpu, t: &Tensor, places: &[usize]) -> Result<Vec<f64>> {
    let (buffer, offset) = t.memory();
    let all: Vec<_> = places.iter().map(|i| gpu.download_later(buffer, offset + *i as u64 * 4, 4)).collect();
    let decode = |d: crate::gpu::Download| Ok(f64::from(bytemuck::pod_read_unaligned::<f32>(&d.wait()?)));
    all.into_iter().map(decode).collect()
}

/// The product of two vectors in f64, and how far a GEMM may be off: f32 sums in any order, whose errors add up like a random
/// walk (four times `sqrt(K)` roundings of the sum of magnitudes), and one rounding to `out`.
pub fn dot(a: &[f64], b: &[f64], out: DType) -> (f64, f64) {
    let (mut sum, mut magnitude) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        sum += a * b;
        magnitude += (a * b).abs();
    }
    let rounding = if out == DType::BF16 { sum.abs() * 2f64.powi(-8) } else { 0.0 };
    (sum, 4.0 * (a.len() as f64).sqrt() * 2f64.powi(-24) * magnitude + rounding + 1e-30)
}

#[cfg(test)]
mod tests {
    use super::{Check, Sample, dot};
    use crate::num::DType;

    #[test]
    fn what_is_off_is_found() {
        let samples = [1.0, -2.0].map(|want| Sample { row: 0, col: 0, want, tolerance: 1e-3 });
        assert_eq!(Check::of("y", &samples, &[1.0, -2.0]), Check::default());
        assert!(Check::of("y", &samples, &[1.0, -2.0005]).wrong.is_none());
        for bad in [[1.002, -2.0], [1.0, 2.0], [0.0, 0.0], [f64::NAN, -2.0], [1.0, f64::INFINITY]] {
            assert!(Check::of("y", &samples, &bad).wrong.is_some(), "{bad:?}");
        }
        let bad = Check::of("y", &samples, &[1.0, 0.0]);
        assert_eq!(Check::default().and(bad.clone()).and(Check::default()), bad);
    }

    #[test]
    fn tolerance_is_a_small_part() {
        let a: Vec<f64> = (0..4096).map(|i| f64::from(i % 7 - 3)).collect();
        let (sum, tolerance) = dot(&a, &a, DType::F32);
        assert!(tolerance > 0.0 && tolerance < sum * 1e-4, "{sum} within {tolerance}");
    }
}

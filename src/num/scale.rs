//! Scales: the multiplier `s` that takes a row (or a tensor) into the range of an fp8 format.
//!
//! torchao's `tensor_to_scale`: `s = F / max(amax, 1e-12)` in f64, rounded to f32; row-wise recipes then
//! round `s` **down** to a power of two. Here the power of two comes from the bits of `amax` alone, without
//! division or logarithm; equal for every bf16 `amax` to the literal procedure (tests/numbers.rs). For f32
//! inputs torchao takes the logarithm in f32 and can, within a few ulp of a power of two, round up; the rule
//! here never does.
//!
//! Not finite: a NaN or an infinity poisons its own row and no other. A NaN row has scale NaN and every code
//! NaN. A row with an infinity has scale 0: its finite elements become (signed) zero, its infinities NaN, and
//! the factor `1/s` is infinite, so that every product with the row is NaN. Both as torchao's composed path
//! does it.

use super::Fp8;

/// The smallest `amax` that counts, as in torchao.
pub const EPS: f64 = 1e-12;

/// The bits of the largest magnitude in `values`, 0 for none.
///
/// As integers the patterns of magnitudes sort like the numbers, and NaN sorts above infinity, so NaN wins.
pub fn amax_bits(values: impl IntoIterator<Item = f32>) -> u32 {
    values.into_iter().fold(0, |top, v| top.max(v.to_bits() & 0x7FFF_FFFF))
}

/// `log2 s` of the row scale for a row whose largest magnitude has the bits `amax_bits` (finite).
///
/// With `amax = m * 2^e`, `1 <= m < 2`: `8 - e` for e4m3 (15 - e for e5m2), one less when `m > 1.75`, at most
/// 48 (55). The result lies in -120..=48 (-113..=55), so `s` and `1/s` are normal f32 numbers.
pub fn log2_row_scale(amax_bits: u32, format: Fp8) -> i32 {
    assert!(amax_bits < 0x7F80_0000, "row scale of a magnitude that is not finite: bits {amax_bits:#x}");
    let (top, cap) = match format {
        Fp8::E4m3 => (8, 48),
        Fp8::E5m2 => (15, 55),
    };
    let exponent = (amax_bits >> 23) as i32 - 127;
    let past = (amax_bits & 0x7F_FFFF) > 0x60_0000; // m > 1.75 = 448 / 2^8 = 57344 / 2^15
    (top - exponent - past as i32).min(cap)
}

/// The power-of-two multiplier of a row: 0 if `amax_bits` is infinity's, NaN if it is a NaN's.
pub fn row_scale(amax_bits: u32, format: Fp8) -> f32 {
    match amax_bits {
        0x7F80_0000 => 0.0,
        0x7F80_0001.. => f32::NAN,
        _ => pow2(log2_row_scale(amax_bits, format)),
    }
}

/// The multiplier of a whole tensor, not rounded to a power of two: `F / max(amax, 1e-12)` in f64, then f32.
pub fn tensor_scale(amax_bits: u32, format: Fp8) -> f32 {
    let amax = f32::from_bits(amax_bits) as f64;
    if amax.is_nan() {
        return f32::NAN;
    }
    (format.max() as f64 / amax.max(EPS)) as f32
}

/// What undoes multiplier `s`: `1/s` in f32. Exact for a power of two, infinite for 0, NaN for NaN.
pub fn inverse(s: f32) -> f32 {
    1.0 / s
}

/// `2^exponent`, for an exponent of a normal f32 (-126..=127).
pub fn pow2(exponent: i32) -> f32 {
    assert!((-126..=127).contains(&exponent), "2^{exponent} is not a normal f32 (exponents -126..=127)");
    f32::from_bits(((127 + exponent) as u32) << 23)
}

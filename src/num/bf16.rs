//! bfloat16: the upper half of an f32, rounded to nearest, ties to even.

/// The 16 bits of the bf16 nearest to `x`. NaN stays NaN (quiet, sign kept).
pub fn to_bits(x: f32) -> u16 {
    let u = x.to_bits();
    if u & 0x7FFF_FFFF > 0x7F80_0000 {
        return (u >> 16) as u16 | 0x40; // rounding could carry a NaN's mantissa into the exponent
    }
    ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) as u16
}

/// The f32 with the value of bf16 `bits`, exact.
pub fn from_bits(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `x` rounded to a bf16 value, as f32.
pub fn round(x: f32) -> f32 {
    from_bits(to_bits(x))
}

/// Every element of `x` rounded to a bf16 value, as f32.
pub fn round_all(x: &[f32]) -> Vec<f32> {
    x.iter().map(|&v| round(v)).collect()
}

/// Two values in a word: `lo` in the low half.
pub fn pack(lo: f32, hi: f32) -> u32 {
    to_bits(lo) as u32 | (to_bits(hi) as u32) << 16
}

/// The two values of a word, the low half first.
pub fn unpack(word: u32) -> (f32, f32) {
    (from_bits(word as u16), from_bits((word >> 16) as u16))
}

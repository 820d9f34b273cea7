//! e4m3fn: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity; NaN is 0x7F and 0xFF.
//!
//! Definition: OCP "8-bit Floating Point Specification" 1.0 (2023), the same as PyTorch's `float8_e4m3fn`.

use super::shift_round_even;

/// Largest finite value, code 0x7E.
pub const MAX: f32 = 448.0;

/// Bits of 2^-6, the smallest normal value.
const MIN_NORMAL: u32 = 0x3C80_0000;

/// The code nearest to `y`, ties to even; what lies past 448 (infinity included) becomes 448; NaN keeps its
/// sign.
///
/// Callers clamp first where torchao does; the saturation here makes the function total.
pub fn encode(y: f32) -> u8 {
    let bits = y.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    sign | encode_magnitude(bits & 0x7FFF_FFFF)
}

/// The code (without sign) for the f32 pattern `a` of a non-negative number.
fn encode_magnitude(a: u32) -> u8 {
    if a > 0x7F80_0000 {
        return 0x7F;
    }
    if a >= MIN_NORMAL {
        // Round at bit 20 to even, then move the exponent bias from 127 to 7: (127 - 7) << 3 = 960.
        let code = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960;
        return code.min(0x7E) as u8;
    }
    // Subnormal: the integer nearest to y * 2^9. Code 8 is the smallest normal, so the join is seamless.
    let exponent = a >> 23;
    let shift = 141 - exponent;
    if shift >= 26 {
        return 0; // at most 2^-11
    }
    shift_round_even((a & 0x7F_FFFF) | 0x80_0000, shift) as u8
}

/// The value of `code`, exact in f32.
pub fn decode(code: u8) -> f32 {
    let exponent = (code >> 3) & 15;
    let mantissa = (code & 7) as f32;
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    match (exponent, code & 7) {
        (15, 7) => f32::from_bits(0x7FC0_0000 | ((code as u32 & 0x80) << 24)),
        (0, _) => sign * mantissa / 512.0,
        _ => sign * (8.0 + mantissa) * f32::from_bits((exponent as u32 + 117) << 23), // 2^(exponent - 10)
    }
}

//! e5m2: sign, 5 exponent bits (bias 15), 2 mantissa bits; infinities 0x7C and 0xFC; NaN above them.
//!
//! Definition: OCP "8-bit Floating Point Specification" 1.0 (2023), the same as PyTorch's `float8_e5m2`:
//! the upper byte of an IEEE half.

use super::shift_round_even;

/// Largest finite value, code 0x7B.
pub const MAX: f32 = 57344.0;

/// Bits of 2^-14, the smallest normal value.
const MIN_NORMAL: u32 = 0x3880_0000;

/// The code nearest to `y`, ties to even; what lies past 57344 (infinity included) becomes 57344; NaN becomes
/// 0x7F or 0xFF by its sign.
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
        // Round at bit 21 to even, then move the exponent bias from 127 to 15: (127 - 15) << 2 = 448.
        let code = ((a + 0xF_FFFF + ((a >> 21) & 1)) >> 21) - 448;
        return code.min(0x7B) as u8;
    }
    // Subnormal: the integer nearest to y * 2^16. Code 4 is the smallest normal.
    let exponent = a >> 23;
    let shift = 134 - exponent;
    if shift >= 26 {
        return 0; // at most 2^-18
    }
    shift_round_even((a & 0x7F_FFFF) | 0x80_0000, shift) as u8
}

/// The value of `code`, exact in f32.
pub fn decode(code: u8) -> f32 {
    let exponent = (code >> 2) & 31;
    let mantissa = (code & 3) as f32;
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    match (exponent, code & 3) {
        (31, 0) => sign * f32::INFINITY,
        (31, _) => f32::from_bits(0x7FC0_0000 | ((code as u32 & 0x80) << 24)),
        (0, _) => sign * mantissa / 65536.0,
        _ => sign * (4.0 + mantissa) * f32::from_bits((exponent as u32 + 110) << 23), // 2^(exponent - 17)
    }
}

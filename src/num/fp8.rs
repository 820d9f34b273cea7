//! The two fp8 formats behind one type.

use super::{e4m3, e5m2};

/// An 8-bit float format of the OCP specification "8-bit Floating Point" (2023).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// 4 exponent bits, 3 mantissa bits, bias 7, no infinity ([`e4m3`]).
    E4m3,
    /// 5 exponent bits, 2 mantissa bits, bias 15, with infinities ([`e5m2`]).
    E5m2,
}

impl Fp8 {
    /// The code that stands for "not a number" in both formats.
    pub const NAN_CODE: u8 = 0x7F;

    /// The largest finite value: 448 or 57344.
    pub const fn max(self) -> f32 {
        match self {
            Fp8::E4m3 => e4m3::MAX,
            Fp8::E5m2 => e5m2::MAX,
        }
    }

    /// The code nearest to `y` (ties to even), saturating at the largest finite value.
    pub fn encode(self, y: f32) -> u8 {
        match self {
            Fp8::E4m3 => e4m3::encode(y),
            Fp8::E5m2 => e5m2::encode(y),
        }
    }

    /// The value of `code`.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Fp8::E4m3 => e4m3::decode(code),
            Fp8::E5m2 => e5m2::decode(code),
        }
    }

    /// The code of `x` under multiplier `s`: product in f32, clamp to the largest finite value, cast.
    ///
    /// NaN when `x` is not finite or `s` is NaN: infinity times any scale that an infinite row can have (0)
    /// is NaN. NaN codes carry no sign, as on CUDA, where a computed NaN is the positive one.
    pub fn quantize(self, x: f32, s: f32) -> u8 {
        if !x.is_finite() || s.is_nan() {
            return Self::NAN_CODE;
        }
        let max = self.max();
        self.encode((x * s).clamp(-max, max))
    }
}

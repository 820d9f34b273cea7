//! The element types that tensors can have.

/// How an element is stored; see "Quads" in ARCHITECTURE.md for the packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16: the upper half of an `F32`, rounded to nearest even.
    BF16,
    /// IEEE half precision: what matrix units multiply; only inside ops, for scaled operands.
    F16,
    /// OCP e4m3fn: 4 exponent bits, 3 mantissa bits, largest value 448, no infinities.
    E4M3,
    /// OCP e5m2: 5 exponent bits, 2 mantissa bits, largest value 57344.
    E5M2,
    /// Unsigned 32-bit integers: tokens, offsets, counts. Only in flat tensors.
    U32,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::E4M3 | DType::E5M2 => 1,
        }
    }

    /// Bytes of one quad: four neighbouring elements.
    pub const fn quad_bytes(self) -> usize {
        4 * self.size()
    }

    /// The name as torchtitan spells it in its configuration.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
            DType::E4M3 => "float8_e4m3fn",
            DType::E5M2 => "float8_e5m2",
            DType::U32 => "uint32",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

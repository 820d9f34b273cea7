//! Operands that are made on the host as fp8 codes, so that both sides multiply the same numbers.

use crate::Result;
use crate::gpu::Gpu;
use crate::num::rng::Stream;
use crate::num::{DType, Fp8, bf16};
use crate::tensor::Tensor;

/// Bytes at multiples of which every adapter can bind a part of memory.
const APART: usize = 256;

/// Whether parts of so many bytes, one after the other, can each be bound by itself.
pub(super) fn are_bindable(parts: &[usize]) -> bool {
    parts.iter().all(|bytes| bytes.is_multiple_of(APART))
}

/// Which codes a test draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codes {
    /// Normal numbers of deviation 100, clipped at 448.
    Normal,
    /// Every finite code with equal chance.
    Any,
    /// Zero and subnormal ones: f16 arithmetic that flushes its own subnormals shows here.
    Tiny,
    /// Every finite code of e5m2.
    E5m2,
    /// Not codes but bf16 values, row by row between 2^-30 and 2^30.
    WideRows,
    /// The same, column by column.
    WideColumns,
}

/// Row-major fp8 codes, or bf16 values.
pub(super) struct Operand {
    pub codes: Vec<u8>,
    pub shape: Vec<usize>,
    format: Fp8,
    wide: Option<Vec<f32>>,
}

impl Operand {
    pub(super) fn new(name: &str, shape: &[usize], kind: Codes) -> Operand {
        let stream = Stream::new(0, name);
        let format = if kind == Codes::E5m2 { Fp8::E5m2 } else { Fp8::E4m3 };
        if matches!(kind, Codes::WideRows | Codes::WideColumns) {
            let wide = Some(wide_values(name, shape, kind == Codes::WideRows));
            return Operand { codes: Vec::new(), shape: shape.to_vec(), format, wide };
        }
        // A table of 2^16 draws and a fast walk over it: the large operands have hundreds of millions of elements.
        let draw = |i: u64| match kind {
            Codes::Normal => Fp8::E4m3.encode((100.0 * stream.normal(i)).clamp(-448.0, 448.0)),
            Codes::Any => {
                let code = (stream.word(i) & 0xff) as u8;
                if code & 0x7f == 0x7f { 0x3c } else { code }
            }
            Codes::E5m2 => {
                let code = (stream.word(i) & 0xff) as u8;
                if code & 0x7c == 0x7c { code ^ 0x40 } else { code }
            }
            Codes::Tiny => (stream.word(i) & 0x87) as u8,
            Codes::WideRows | Codes::WideColumns => unreachable!("made above"),
        };
        let table: Vec<u8> = (0..1 << 16).map(draw).collect();
        let mut state = u64::from(stream.word(1 << 20)) << 32 | 1;
        let len = shape.iter().product();
        let mut codes = Vec::with_capacity(len);
        while codes.len() < len {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            codes.extend([16, 32, 48].map(|shift| table[(state >> shift) as usize & 0xffff]));
        }
        codes.truncate(len);
        Operand { codes, shape: shape.to_vec(), format, wide: None }
    }

    /// Part `p` of `count` equal ones along the first dimension, which is dropped where it is `count`.
    pub(super) fn part(&self, p: usize, count: usize) -> Operand {
        let (first, rest) = self.shape.split_first().expect("a stack has a dimension");
        let each = (*first != count).then_some(first / count);
        let range = |len: usize| p * len / count..(p + 1) * len / count;
        Operand {
            codes: self.codes[range(self.codes.len())].to_vec(),
            shape: each.into_iter().chain(rest.iter().copied()).collect(),
            format: self.format,
            wide: self.wide.as_ref().map(|all| all[range(all.len())].to_vec()),
        }
    }

    pub(super) fn dtype(&self) -> DType {
        match self.format {
            _ if self.wide.is_some() => DType::BF16,
            Fp8::E4m3 => DType::E4M3,
            Fp8::E5m2 => DType::E5M2,
        }
    }

    pub(super) fn values(&self) -> Vec<f64> {
        if let Some(values) = &self.wide {
            return values.iter().map(|&v| f64::from(v)).collect();
        }
        self.codes.iter().map(|&c| f64::from(self.format.decode(c))).collect()
    }

    pub(super) fn upload(&self, gpu: &Gpu) -> Result<Tensor> {
        if let Some(values) = &self.wide {
            return Tensor::from_f32(gpu, "values", &self.shape, DType::BF16, values);
        }
        let tensor = Tensor::empty(gpu, "codes", &self.shape, self.dtype())?;
        let (cols, padded) = (tensor.cols(), 4 * tensor.quads());
        let (buffer, offset) = tensor.memory();
        // A few megabytes at a time: the driver stages each piece.
        let rows = ((8 << 20) / padded).max(1);
        for (i, part) in self.codes.chunks(rows * cols).enumerate() {
            let mut bytes = vec![0; part.len() / cols * padded];
            for (from, to) in part.chunks(cols).zip(bytes.chunks_mut(padded)) {
                to[..cols].copy_from_slice(from);
            }
            gpu.upload(buffer, offset + (i * rows * padded) as u64, &bytes)?;
        }
        Ok(tensor)
    }
}

/// Normal numbers times a power of two of their row (column).
fn wide_values(name: &str, shape: &[usize], by_row: bool) -> Vec<f32> {
    let (values, powers) = (Stream::new(0, name), Stream::new(3, name));
    let cols = shape.last().copied().unwrap_or(1).max(1) as u64;
    let len = shape.iter().product::<usize>() as u64;
    let power = |at: u64| 2f32.powi((powers.word(at) % 61) as i32 - 30);
    (0..len)
        .map(|i| bf16::round(values.normal(i) * power(if by_row { i / cols } else { i % cols })))
        .collect()
}

/// Powers of two between 2^-4 and 2^3.
pub(super) fn scales(name: &str, len: usize) -> Vec<f32> {
    let stream = Stream::new(1, name);
    (0..len as u64).map(|i| 2f32.powi((stream.word(i) % 8) as i32 - 4)).collect()
}

//! What the tests of the kernels at the speed of memory share: the simple kernels as their oracle, and values with traps.

use super::Quantized;
use crate::gpu::{DeviceChoice, Gpu, Options, QuantizeKernel};
use crate::num::bf16;
use crate::num::rng::Stream;
use crate::ops::panels::Codes;
use crate::tensor::Tensor;

/// An adapter with poisoned memory that runs what GPUs do.
pub(in crate::ops) fn gpu() -> Gpu {
    let options = Options { treat_as_hardware: true, poison: true, ..Options::default() };
    Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
}

/// The oracle.
pub(in crate::ops) fn simple() -> Gpu {
    let options = Options { quantizer: Some(QuantizeKernel::Simple), poison: true, ..Options::default() };
    Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
}

/// The memory of a tensor.
pub(in crate::ops) fn bytes(gpu: &Gpu, t: &Tensor) -> Vec<u8> {
    let (buffer, offset) = t.memory();
    gpu.download(buffer, offset, t.bytes()).unwrap()
}

/// Normal values in columns of different sizes; zeros, a NaN, an infinity, and a column that only the exact encoder can do.
pub(in crate::ops) fn values(rows: usize, cols: usize) -> Vec<f32> {
    let stream = Stream::new(0, "strips");
    let value = |i: usize| bf16::round(stream.normal(i as u64) * 2f32.powi((i % cols % 9) as i32 - 4));
    let mut x: Vec<f32> = (0..rows * cols).map(value).collect();
    for (row, col, value) in
        [(4, cols - 1, 3e38), (9, 0, f32::INFINITY), (12, cols / 2, f32::NAN), (rows - 1, 1, 700.0)]
    {
        if row < rows {
            x[row * cols + col] = value;
        }
    }
    if rows > 2 {
        x[2 * cols..3 * cols].fill(0.0);
    }
    x
}

/// Codes and de-scales equal bit for bit to those of the simple kernels, which their tests compare with the reference.
pub(in crate::ops) fn same(
    what: &str,
    (gpu, got): (&Gpu, &Quantized<Codes>),
    (simple, want): (&Gpu, &Quantized<Codes>),
) {
    assert_eq!(got.codes.order(), want.codes.order(), "{what}");
    let codes = [(gpu, got), (simple, want)].map(|(gpu, q)| bytes(gpu, q.codes.memory()));
    assert!(codes[0] == codes[1], "{what}: codes differ");
    assert!(bytes(gpu, &got.descale) == bytes(simple, &want.descale), "{what}: de-scales differ");
}

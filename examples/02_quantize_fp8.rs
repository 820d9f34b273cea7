//! You learn: what row-wise e4m3 quantization does to a matrix, what its codes and scales look like, and what it costs.

use moe8::gpu::{DeviceChoice, Gpu};
use moe8::num::rng::Stream;
use moe8::num::{DType, Fp8, bf16};
use moe8::ops::quantize::{self, Quantized};
use moe8::reference::{compare, quantize as reference};
use moe8::tensor::Tensor;

/// What the codes stand for: their values times the row's (or the tensor's) factor `1/s`.
fn dequantize(gpu: &Gpu, q: &Quantized) -> moe8::Result<Vec<f32>> {
    let (codes, descale) = (q.codes.to_codes(gpu)?, q.descale.to_f32(gpu)?);
    let per_scale = codes.len() / descale.len();
    Ok(codes.iter().enumerate().map(|(i, c)| Fp8::E4m3.decode(*c) * descale[i / per_scale]).collect())
}

fn show_a_small_matrix(gpu: &Gpu) -> moe8::Result<()> {
    // The largest magnitude of a row, times a power of two `s`, must not pass 448, e4m3's largest number.
    let rows = [
        [1.0, -0.5, 0.3, 0.0],
        [1000.0, 3.0, -448.0, 0.1],
        [1e-6, 2e-6, 0.0, -3e-6],
        [f32::NAN, 1.0, 2.0, 3.0], // spoils its own row and no other
    ];
    let x = Tensor::from_f32(gpu, "x", &[4, 4], DType::F32, rows.as_flattened())?;
    let q = quantize::rowwise(gpu, &x)?;
    let (codes, descale) = (q.codes.to_codes(gpu)?, q.descale.to_f32(gpu)?);
    for ((row, codes), factor) in rows.iter().zip(codes.chunks(4)).zip(&descale) {
        let values: Vec<f32> = codes.iter().map(|c| Fp8::E4m3.decode(*c) * factor).collect();
        println!("{row:?}: codes {codes:02x?}, 1/s {factor:e}, so {values:?}");
    }
    // The oracle on the host gives the same bits.
    let want = reference::rowwise(rows.as_flattened(), 4, 4, Fp8::E4m3);
    compare::first_mismatch(&codes, &want.codes, &[4, 4]).expect("the reference's codes");
    compare::same_bits(&descale, &want.inverse(), &[4]).expect("the reference's scales");
    Ok(())
}

fn main() -> moe8::Result<()> {
    let gpu = Gpu::open(&DeviceChoice::from_env())?;
    show_a_small_matrix(&gpu)?;

    // A larger one, normal but for one row that is 2^16 times as large, as activations of real models have.
    let (rows, cols) = (64, 300);
    let stream = Stream::new(1, "activations");
    let mut values: Vec<f32> = (0..rows * cols).map(|i| bf16::round(stream.normal(i as u64))).collect();
    values[..cols].iter_mut().for_each(|v| *v *= 65536.0);
    let x = Tensor::from_f32(&gpu, "x", &[rows, cols], DType::BF16, &values)?;
    let by_row = dequantize(&gpu, &quantize::rowwise(&gpu, &x)?)?;
    let by_tensor = dequantize(&gpu, &quantize::tensorwise(&gpu, &x, DType::E4M3)?)?;

    // Signal-to-quantization-noise ratio of the ordinary rows. One scale for all wastes its range on the large row.
    let [row, tensor] = [by_row, by_tensor].map(|v| compare::sqnr_db(&values[cols..], &v[cols..]));
    println!("SQNR of the ordinary rows: {row:.1} dB with a scale per row, {tensor:.1} dB with one for all");
    assert!(row > 30.0 && tensor < row - 10.0);
    Ok(())
}

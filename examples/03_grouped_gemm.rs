//! You learn: the one op that this crate is about, a grouped GEMM on fp8 codes that can be differentiated. Rows are in
//! groups of any size, one weight matrix each, as tokens are sorted to their experts.

use moe8::gpu::{DeviceChoice, Gpu};
use moe8::num::rng::Stream;
use moe8::num::{DType, bf16};
use moe8::ops::fp8_linear::{self, Recipe};
use moe8::reference::compare::{sqnr_at_least, sqnr_db};
use moe8::reference::fp8_linear as reference;
use moe8::tensor::Tensor;

/// Rows, output width, input width: no multiple of 16 is asked for.
const M: usize = 40;
const N: usize = 45;
const K: usize = 100;
/// Where each group ends. The second has no rows, and rows 37 to 39 belong to none.
const ENDS: [u32; 4] = [5, 5, 30, 37];

fn normal(name: &str, len: usize) -> Vec<f32> {
    let stream = Stream::new(3, name);
    (0..len as u64).map(|i| bf16::round(stream.normal(i))).collect()
}

fn main() -> moe8::Result<()> {
    let gpu = Gpu::open(&DeviceChoice::from_env())?;
    let (mut x, w, d_out) = (normal("x", M * K), normal("w", ENDS.len() * N * K), normal("d_out", M * N));
    x[37 * K..].fill(f32::NAN); // rows outside all groups are never looked at

    let tensor = |name: &str, shape: &[usize], v: &[f32]| Tensor::from_f32(&gpu, name, shape, DType::BF16, v);
    let (tx, tw) = (tensor("x", &[M, K], &x)?, tensor("w", &[ENDS.len(), N, K], &w)?);
    let (t_d_out, offs) = (tensor("d_out", &[M, N], &d_out)?, Tensor::from_u32(&gpu, "ends", &ENDS)?);

    // Three GEMMs, each with both operands quantized along the dimension that it contracts:
    //   out (M, N)     = x (M, K) w[g] (N, K)^T          along K
    //   d_x (M, K)     = d_out (M, N) w[g] (N, K)        along N
    //   d_w[g] (N, K)  = d_out_g (M_g, N)^T x_g (M_g, K)  along the rows of the group
    let run = |recipe| -> moe8::Result<[Vec<f32>; 3]> {
        let out = fp8_linear::forward(&gpu, &tx, &tw, Some(&offs), recipe)?;
        let (d_x, d_w) = fp8_linear::backward(&gpu, &t_d_out, &tx, &tw, Some(&offs), recipe, true)?;
        Ok([out.to_f32(&gpu)?, d_x.expect("asked for").to_f32(&gpu)?, d_w.to_f32(&gpu)?])
    };
    let fp8 = run(Recipe::Rowwise)?;
    let exact = run(Recipe::HighPrecision)?;

    // The oracle sums the same codes in f64 and rounds to bf16.
    let layer = reference::Layer { recipe: reference::Recipe::Rowwise, offs: &ENDS, n: N, k: K };
    let out = reference::forward(layer, &x, &w);
    let (d_x, d_w) = reference::backward(layer, &x, &w, &d_out);
    for (name, (got, (want, exact))) in
        ["out", "d_x", "d_w"].iter().zip(fp8.iter().zip([out, d_x, d_w].iter().zip(&exact)))
    {
        sqnr_at_least(want, got, 50.0).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (rounding, cost) = (sqnr_db(want, got), sqnr_db(exact, got));
        // Without any noise their ratio is infinite.
        let rounding = if rounding.is_finite() { format!("{rounding:.1} dB") } else { "equal".into() };
        println!("{name}: {rounding} to the reference, {cost:.1} dB to the product without fp8");
        assert!(cost > 25.0, "{name}");
    }
    let zero = |v: &[f32]| v.iter().all(|v| *v == 0.0);
    assert!(zero(&fp8[0][37 * N..]) && zero(&fp8[1][37 * K..]), "rows past the last group give zeros");
    assert!(zero(&fp8[2][N * K..2 * N * K]), "a group without rows has no weight gradient");
    println!("rows past the last group and the empty group gave exact zeros");
    Ok(())
}

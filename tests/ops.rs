//! Every op on the running adapter against its reference.

use moe8::gpu::{DeviceChoice, Gpu};
use moe8::num::DType;
use moe8::ops::gemm::{self, GemmOptions};
use moe8::tensor::Tensor;

fn gpu() -> Gpu {
    Gpu::open(&DeviceChoice::from_env()).expect("an adapter")
}

#[test]
fn gemm_smoke() {
    let g = gpu();
    let n = 512;
    let f = |s: usize| -> Vec<f32> { (0..n * n).map(|i| (((i * 31 + s) % 17) as f32 - 8.0) / 8.0).collect() };
    let (av, bv) = (f(1), f(5));
    for dt in [DType::F32, DType::BF16] {
        let a = Tensor::from_f32(&g, "a", &[n, n], dt, &av).unwrap();
        let b = Tensor::from_f32(&g, "b", &[n, n], dt, &bv).unwrap();
        for (name, f) in [
            ("nt", gemm::nt as fn(&Gpu, &Tensor, &Tensor, DType, GemmOptions<'_>) -> _),
            ("nn", gemm::nn),
            ("tn", gemm::tn),
        ] {
            let out = f(&g, &a, &b, DType::F32, GemmOptions::default()).unwrap();
            let got = out.to_f32(&g).unwrap();
            let at = |i: usize, j: usize| -> f32 {
                (0..n)
                    .map(|k| match name {
                        "nt" => av[i * n + k] * bv[j * n + k],
                        "nn" => av[i * n + k] * bv[k * n + j],
                        _ => av[k * n + i] * bv[k * n + j],
                    })
                    .sum()
            };
            for (i, j) in [(0, 0), (1, 7), (511, 510), (100, 333)] {
                assert!(
                    (got[i * n + j] - at(i, j)).abs() < 1e-2,
                    "{name} {i} {j}: {} {}",
                    got[i * n + j],
                    at(i, j)
                );
            }
            let mut best = f64::MAX;
            for _ in 0..3 {
                let t = std::time::Instant::now();
                let _o = f(&g, &a, &b, DType::F32, GemmOptions::default()).unwrap();
                g.finish().unwrap();
                best = best.min(t.elapsed().as_secs_f64());
            }
            println!(
                "{dt} {name}: {:.1} ms {:.2} GFLOP/s",
                best * 1e3,
                2.0 * (n as f64).powi(3) / best / 1e9
            );
        }
    }
}

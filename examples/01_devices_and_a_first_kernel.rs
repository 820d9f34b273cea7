//! You learn: how to open an adapter, bring numbers to it, run an op, run a kernel of your own, and read the result.

use moe8::gpu::{DeviceChoice, Gpu, Kernel, Variant, list_adapters};
use moe8::num::DType;
use moe8::ops::elementwise;
use moe8::tensor::Tensor;

/// WGSL over *quads* (four neighbouring elements): `X`, `x_get` and `x_put` are bound to a dtype by the variant, so one
/// text serves f32 and bf16. Workgroups are numbered by `grid_index`, since one dimension ends at 65535.
const TEXT: &str = "
struct Scale { quads: u32, factor: f32 }
@group(0) @binding(0) var<uniform> p: Scale;
@group(0) @binding(1) var<storage, read> x: array<X>;
@group(0) @binding(2) var<storage, read_write> y: array<X>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let i = grid_index(wg, n) * 64u + li;
  if i < p.quads { y[i] = x_put(p.factor * x_get(x[i])); }
}";
const SCALE: Kernel = Kernel { name: "example.scale", text: TEXT, entry: "main" };

// The Rust twin of `struct Scale`; names and offsets are compared with the shader's when it is compiled.
moe8::params! {
    struct Scale { quads: u32, factor: f32 }
}

fn scale(gpu: &Gpu, x: &Tensor, factor: f32) -> moe8::Result<Tensor> {
    let y = Tensor::empty(gpu, "scaled", x.shape(), x.dtype())?;
    let quads = (x.rows() * x.quads()) as u32;
    let variant = Variant::new().quad("X", x.dtype());
    gpu.dispatch(&SCALE, &variant, &Scale { quads, factor }, &[x.read(), y.write()], quads.div_ceil(64))?;
    Ok(y)
}

fn main() -> moe8::Result<()> {
    for (i, adapter) in list_adapters().iter().enumerate() {
        println!("adapter {i}: {} ({}, {})", adapter.name, adapter.kind, adapter.backend);
    }
    // What MOE8_DEVICE names, else the best one.
    let gpu = Gpu::open(&DeviceChoice::from_env())?;
    println!("opened {} with driver {}", gpu.name(), gpu.driver());

    // Three rows of five: each row takes two quads, and the three elements past its end are zero.
    let values: Vec<f32> = (0..15).map(|i| i as f32).collect();
    for dtype in [DType::F32, DType::BF16] {
        let a = Tensor::from_f32(&gpu, "a", &[3, 5], dtype, &values)?;
        // Both are only recorded; the download submits them and waits.
        let doubled = elementwise::add(&gpu, &a, &a)?;
        let scaled = scale(&gpu, &doubled, 0.5)?;
        assert_eq!(scaled.to_f32(&gpu)?, values, "2 x / 2 in {dtype}");
    }
    let c = gpu.counters();
    println!(
        "dispatches {}, submits {}, uploads {}, downloads {}",
        c.dispatches, c.submits, c.uploads, c.downloads
    );
    assert_eq!((c.dispatches, c.submits, c.uploads, c.downloads), (4, 2, 2, 2));
    Ok(())
}

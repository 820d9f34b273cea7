//! Token embedding: rows of a table, and the table's gradient in a fixed order.
//!
//! Definition: `torch.nn.functional.embedding` (PyTorch 2.8).
//! Forward copies, so it is exact. Backward adds a row's `n` tokens one after another in f32: `n * 2^-24 * sum |d|`,
//! plus one rounding to the result's dtype.

use crate::Result;
use crate::gpu::{Binding, Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Embedding {
        tokens: u32,
        vocab: u32,
        quads: u32,
    }
}

const TEXT: &str = include_str!("../../shaders/embedding.wgsl");
const FORWARD: Kernel = Kernel { name: "embedding.forward", text: TEXT, entry: "forward" };
const BUCKET: Kernel = Kernel { name: "embedding.bucket", text: TEXT, entry: "bucket" };
const BACKWARD: Kernel = Kernel { name: "embedding.backward", text: TEXT, entry: "backward" };

/// `out[t] = table[tokens[t]]`: tokens flat u32 `[T]`, each below V; table `(V, D)`; the result `(T, D)` in its dtype.
///
/// # Errors
/// The result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn forward(gpu: &Gpu, tokens: &Tensor, table: &Tensor) -> Result<Tensor> {
    assert_eq!(tokens.dtype(), DType::U32, "embedding: tokens {:?} are u32", tokens.shape());
    let out = Tensor::empty(gpu, "embedded tokens", &[tokens.numel(), table.cols()], table.dtype())?;
    let bindings = [tokens.read(), table.read(), out.write()];
    let variant = variant("FORWARD").quad("X", table.dtype());
    let threads = out.rows() * out.quads();
    launch(gpu, &FORWARD, &variant, (tokens.numel(), table.rows(), table.quads()), &bindings, threads)?;
    Ok(out)
}

/// The table's gradient `(vocab, D)` in `dtype`: row v is the sum of `d_out[t]` over the tokens `t` that are v, in
/// their order. `d_out` is `(T, D)`. Takes two scans of the tokens per vocabulary row.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward(gpu: &Gpu, tokens: &Tensor, d_out: &Tensor, vocab: usize, dtype: DType) -> Result<Tensor> {
    let count = tokens.numel();
    assert_eq!(count, d_out.rows(), "embedding: tokens, rows of d_out {:?}", d_out.shape());
    let sizes = (count, vocab, d_out.quads());
    let order = Tensor::flat(gpu, "token order", count, DType::U32)?;
    let first = Tensor::flat(gpu, "token starts", vocab + 1, DType::U32)?;
    let bindings = [tokens.read(), order.write(), first.write()];
    launch(gpu, &BUCKET, &variant("BUCKET"), sizes, &bindings, vocab + 1)?;
    let out = Tensor::empty(gpu, "embedding gradient", &[vocab, d_out.cols()], dtype)?;
    let bindings = [order.read(), first.read(), d_out.read(), out.write()];
    let variant = variant("BACKWARD").quad("X", d_out.dtype()).quad("OUT", dtype);
    launch(gpu, &BACKWARD, &variant, sizes, &bindings, vocab * d_out.quads())?;
    Ok(out)
}

/// `sizes` are tokens, vocabulary and quads of a row; `threads` what the kernel needs.
fn launch(
    gpu: &Gpu,
    kernel: &Kernel,
    variant: &Variant,
    sizes: (usize, usize, usize),
    bindings: &[Binding],
    threads: usize,
) -> Result<()> {
    let params = Embedding { tokens: sizes.0 as u32, vocab: sizes.1 as u32, quads: sizes.2 as u32 };
    let workgroup = if kernel.entry == "bucket" { 64 } else { 256 };
    gpu.dispatch(kernel, variant, &params, bindings, threads.div_ceil(workgroup) as u32)
}

/// The variant that compiles one of the three entry points.
fn variant(which: &str) -> Variant {
    let names = ["FORWARD", "BUCKET", "BACKWARD"];
    names.into_iter().fold(Variant::new(), |v, name| v.constant(name, u32::from(name == which)))
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    use DType::{BF16, F32};
    let mut all = vec![(BUCKET, variant("BUCKET"))];
    for x in [F32, BF16] {
        all.push((FORWARD, variant("FORWARD").quad("X", x)));
        for out in [F32, BF16] {
            all.push((BACKWARD, variant("BACKWARD").quad("X", x).quad("OUT", out)));
        }
    }
    all
}

//! Causal scaled dot-product attention with grouped key/value heads, blocks and documents, without S x S in memory.
//!
//! Definition: `softmax(q k^T / sqrt(head_dim) + mask) v` per head; query head `h` uses key/value head
//! `h / (heads / kv_heads)`; a query sees the keys at or before it that lie in its block (Llama4's
//! `fixed_attn_block_size`) and in its document. As torchtitan's Llama4 (July 2025) with `scaled_dot_product_attention`
//! or flex attention. Method: FlashAttention-2 (Dao 2023), one thread per query or key.
//! Tolerance against the reference: f32 dot products and sums and the adapter's `exp` and `log` (WGSL allows
//! `3 + 2 |x|` units in the last place of `exp`): 1e-5 of the largest entry of each result in f32; in bf16 one rounding
//! of each result, and 1e-2 of the largest entry of `d_q` and `d_k`, because `out` enters the backward pass rounded.

use super::attention_choice::{Attention, Pass};
use super::attention_coop;
use super::choice::choose;
use crate::gpu::{Binding, GemmKernel, Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;
use crate::{Error, Result};

crate::params! {
    /// The parameters of every kernel of attention.
    pub(super) struct Sizes {
        batch: u32, seq: u32, heads: u32, kv_heads: u32, block: u32, quads: u32, scale: f32, padded: u32
    }
}

const TEXT: &str =
    concat!(include_str!("../../shaders/lib/attention.wgsl"), include_str!("../../shaders/attention.wgsl"));
const FORWARD: Kernel = Kernel { name: "attention.forward", text: TEXT, entry: "forward" };
const STATISTICS: Kernel = Kernel { name: "attention.statistics", text: TEXT, entry: "statistics" };
const BY_QUERY: Kernel = Kernel { name: "attention.by_query", text: TEXT, entry: "by_query" };
const BY_KEY: Kernel = Kernel { name: "attention.by_key", text: TEXT, entry: "by_key" };

/// Largest head: its query, key or value and their gradients stand in a thread's registers.
const MAX_HEAD_DIM: usize = 128;
/// Most quads of a head that a thread has in registers on software adapters.
const MAX_SOFTWARE_STEP: usize = 5;

/// The sizes and the mask of one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Positions of a sequence; row `b * seq + t` of every operand is position `t` of sequence `b`.
    pub seq: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements of a head: a multiple of 4, at most 128.
    pub head_dim: usize,
    /// Positions per block (`fixed_attn_block_size`); `None` is no blocks.
    pub block: Option<usize>,
}

impl Shape {
    /// As the kernels read it; `padded` is the positions of a head in the operands.
    pub(super) fn params(&self, padded: usize) -> Sizes {
        Sizes {
            batch: self.batch as u32,
            seq: self.seq as u32,
            heads: self.heads as u32,
            kv_heads: self.kv_heads as u32,
            block: self.block.unwrap_or(self.seq).min(self.seq) as u32,
            quads: (self.head_dim / 4) as u32,
            scale: (1.0 / (self.head_dim as f64).sqrt()) as f32,
            padded: padded as u32,
        }
    }
}

/// `(out, lse)`: `out` like `q` (T, heads * head_dim); `lse`, flat f32 [T * heads], is the logarithm of each query's sum
/// of exponentials, which [`backward`] needs. `k` and `v` are (T, kv_heads * head_dim); `docs` is the number of the
/// document of each position, flat u32 `[T]`.
///
/// # Errors
/// A head size that the kernels do not have; the result is over the adapter's limits; what the device reported.
#[track_caller]
pub fn forward(
    gpu: &Gpu,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: Shape,
    docs: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let kept = forward_kept(gpu, [q, k, v], shape, docs)?;
    Ok((kept.out, kept.lse))
}

/// What forward leaves for backward.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    /// The result.
    pub out: Tensor,
    /// What [`forward`] calls so.
    pub lse: Tensor,
    operands: Operands,
}

/// q, k and v as backward takes them.
#[derive(Clone, Debug)]
enum Operands {
    Plain([Tensor; 3]),
    Halves(attention_coop::Operands),
}

/// [`forward`] that keeps what [`backward_kept`] needs: q, k and v, or instead what both passes read of them.
#[track_caller]
pub(crate) fn forward_kept(
    gpu: &Gpu,
    [q, k, v]: [&Tensor; 3],
    shape: Shape,
    docs: Option<&Tensor>,
) -> Result<Kept> {
    check(shape, q.dtype(), &[q], &[k, v], docs)?;
    let kernel = |pass| choose(gpu, &Attention { pass, dtype: q.dtype(), shape });
    let plain = || Operands::Plain([q, k, v].map(Tensor::clone));
    if kernel(Pass::Forward) == GemmKernel::Coop {
        let operands = attention_coop::Operands::new(gpu, [q, k, v], shape)?;
        let (out, lse) = attention_coop::forward(gpu, &operands, shape, docs)?;
        let same = kernel(Pass::Backward) == GemmKernel::Coop;
        return Ok(Kept { out, lse, operands: if same { Operands::Halves(operands) } else { plain() } });
    }
    let out = Tensor::empty(gpu, "attention out", q.shape(), q.dtype())?;
    let lse = Tensor::flat(gpu, "attention lse", q.rows() * shape.heads, DType::F32)?;
    let call = Call::new(gpu, q, shape, docs);
    let bindings = [q.read(), k.read(), v.read(), call.docs.clone(), out.write(), lse.write()];
    call.dispatch(gpu, &FORWARD, &bindings, shape.heads)?;
    Ok(Kept { out, lse, operands: plain() })
}

/// `(d_q, d_k, d_v)` of [`forward`] from the gradient of `out`, and `out` and `lse` themselves.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward(
    gpu: &Gpu,
    d_out: &Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    shape: Shape,
    docs: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    check(shape, q.dtype(), &[q, d_out, out], &[k, v], docs)?;
    let operands = Operands::Plain([q, k, v].map(Tensor::clone));
    let kept = Kept { out: out.clone(), lse: lse.clone(), operands };
    let like = |name: &str, x: &Tensor| Tensor::empty(gpu, name, x.shape(), x.dtype());
    let (d_q, d_k, d_v) = (like("attention d_q", q)?, like("attention d_k", k)?, like("attention d_v", v)?);
    backward_kept(gpu, d_out, &kept, [&d_q, &d_k, &d_v], shape, docs)?;
    Ok((d_q, d_k, d_v))
}

/// [`backward`] of what [`forward_kept`] left, into `d_q`, `d_k` and `d_v`, like q, k and v.
#[track_caller]
pub(crate) fn backward_kept(
    gpu: &Gpu,
    d_out: &Tensor,
    kept: &Kept,
    gradients: [&Tensor; 3],
    shape: Shape,
    docs: Option<&Tensor>,
) -> Result<()> {
    let (Kept { out, lse, operands }, [d_q, d_k, d_v]) = (kept, gradients);
    check(shape, out.dtype(), &[d_out, out, d_q], &[d_k, d_v], docs)?;
    let pairs = out.rows() * shape.heads;
    assert_eq!(lse.numel(), pairs, "attention: elements of lse, rows times heads");
    let [q, k, v] = match operands {
        Operands::Halves(halves) => {
            return attention_coop::backward(gpu, d_out, halves, (out, lse), gradients, shape, docs);
        }
        Operands::Plain(plain) => plain,
    };
    let call = Attention { pass: Pass::Backward, dtype: q.dtype(), shape };
    if choose(gpu, &call) == GemmKernel::Coop {
        let halves = attention_coop::Operands::new(gpu, [q, k, v], shape)?;
        return attention_coop::backward(gpu, d_out, &halves, (out, lse), gradients, shape, docs);
    }
    let call = Call::new(gpu, q, shape, docs);
    let stats = Tensor::flat(gpu, "attention row statistics", 2 * pairs, DType::F32)?;
    let bindings = [out.read(), d_out.read(), lse.read(), stats.write()];
    let groups = pairs.div_ceil(workgroup(call.software)) as u32;
    gpu.dispatch(&STATISTICS, &call.variant(&STATISTICS, 1), &call.params, &bindings, groups)?;
    let mut bindings = vec![q.read(), k.read(), v.read(), call.docs.clone(), d_out.read(), stats.read()];
    bindings.push(d_q.write());
    call.dispatch(gpu, &BY_QUERY, &bindings, shape.heads)?;
    bindings.pop();
    bindings.extend([d_k.write(), d_v.write()]);
    call.dispatch(gpu, &BY_KEY, &bindings, shape.kv_heads)
}

/// What the kernels of one call have in common.
struct Call {
    params: Sizes,
    dtype: DType,
    head_dim: usize,
    masked: bool,
    software: bool,
    docs: Binding,
}

impl Call {
    fn new(gpu: &Gpu, q: &Tensor, shape: Shape, docs: Option<&Tensor>) -> Call {
        Call {
            params: shape.params(shape.seq),
            dtype: q.dtype(),
            head_dim: shape.head_dim,
            masked: docs.is_some(),
            software: gpu.caps().software,
            docs: docs.map_or_else(|| q.read(), Tensor::read),
        }
    }

    fn variant(&self, kernel: &Kernel, own: usize) -> Variant {
        variant(kernel, self.dtype, self.head_dim, self.masked, self.software, own)
    }

    /// Launches a thread per chunk of a head and run of positions of each of `heads` heads of every sequence.
    fn dispatch(&self, gpu: &Gpu, kernel: &Kernel, bindings: &[Binding], heads: usize) -> Result<()> {
        let own = own(kernel, self.head_dim, self.params.seq as usize, self.software);
        let tiles = (self.params.seq as usize).div_ceil(workgroup(self.software) * own);
        let chunks = self.head_dim / 4 / step(kernel, self.head_dim, self.software);
        let groups = tiles * self.params.batch as usize * heads * chunks;
        gpu.dispatch(kernel, &self.variant(kernel, own), &self.params, bindings, groups as u32)
    }
}

#[track_caller]
fn check(
    shape: Shape,
    dtype: DType,
    queries: &[&Tensor],
    keys: &[&Tensor],
    docs: Option<&Tensor>,
) -> Result<()> {
    let Shape { batch, seq, heads, kv_heads, head_dim, block } = shape;
    if head_dim == 0 || !head_dim.is_multiple_of(4) || head_dim > MAX_HEAD_DIM {
        return Err(Error::user(
            format!("attention heads of {head_dim} elements: not a multiple of 4 up to {MAX_HEAD_DIM}"),
            "choose model.args.dim and n_heads so that dim / n_heads is one",
        ));
    }
    assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "attention: {kv_heads} key heads share {heads}");
    assert!(seq > 0 && block != Some(0), "attention: {shape:?} has no positions or empty blocks");
    for (tensors, heads) in [(queries, heads), (keys, kv_heads)] {
        for t in tensors {
            let given = (t.rows(), t.cols(), t.dtype());
            assert_eq!(given, (batch * seq, heads * head_dim, dtype), "attention: operand {:?}", t.shape());
        }
    }
    if let Some(docs) = docs {
        assert_eq!((docs.numel(), docs.dtype()), (batch * seq, DType::U32), "attention: document numbers");
    }
    Ok(())
}

/// Threads of a workgroup: the lanes of one core on software adapters.
fn workgroup(software: bool) -> usize {
    if software { 8 } else { 32 }
}

/// Quads of a head whose results one thread has in registers: all, but a divisor for large heads where a compiler would
/// take minutes (software adapters) or the registers of a GPU would spill: `by_key` keeps two operands and two results
/// of each quad, `by_query` two and one.
fn step(kernel: &Kernel, head_dim: usize, software: bool) -> usize {
    let quads = head_dim / 4;
    let most = match (software, kernel.entry) {
        (true, _) => MAX_SOFTWARE_STEP,
        (false, "by_key") if quads > 16 => 16,
        (false, "by_key") if quads > 12 => 8,
        (false, "by_query") if quads > 16 => 16,
        (false, _) => quads,
    };
    (1..=most.min(quads)).rev().find(|s| quads.is_multiple_of(*s)).unwrap_or(1)
}

/// Positions that one thread owns: as many as its registers hold on a GPU (`by_key` keeps twice as much of each), one where
/// sequences are too short to fill the workgroup with them, and on software adapters.
fn own(kernel: &Kernel, head_dim: usize, seq: usize, software: bool) -> usize {
    let held = head_dim * if kernel.entry == "by_key" { 2 } else { 1 };
    let most = match held {
        _ if software => 1,
        0..=16 => 4,
        17..=32 => 2,
        _ => 1,
    };
    if seq < workgroup(software) * most { 1 } else { most }
}

fn variant(
    kernel: &Kernel,
    dtype: DType,
    head_dim: usize,
    docs: bool,
    software: bool,
    own: usize,
) -> Variant {
    Variant::new()
        .constant("WG", workgroup(software) as u32)
        .constant("OWN", own as u32)
        .constant("HD", (head_dim / 4) as u32)
        .constant("STEP", step(kernel, head_dim, software) as u32)
        // Software adapters have few registers: more than one key at a time is slower there and compiles longer.
        .constant("TILE", if software { 1 } else { 2 })
        .constant("DOCS", u32::from(docs))
        .quad("X", dtype)
}

/// Every kind of variant, for validation without a GPU: the head sizes are the smallest, the debug model's, one whose
/// loops are not written out whole, and the largest.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for kernel in [FORWARD, STATISTICS, BY_QUERY, BY_KEY] {
        for dtype in [DType::F32, DType::BF16] {
            for head_dim in [4, 16, 44, 128] {
                for flags in 0..4u8 {
                    let (docs, software) = (flags & 1 != 0, flags & 2 != 0);
                    for seq in [1, 1 << 16] {
                        let own = own(&kernel, head_dim, seq, software);
                        all.push((kernel, variant(&kernel, dtype, head_dim, docs, software, own)));
                    }
                }
            }
        }
    }
    all
}

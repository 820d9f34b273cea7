//! Attention on matrix units: the candidate next to one thread a position of [`super::attention`], for bf16 operands with heads
//! of 16 to 128 elements, a multiple of 16, on adapters with products of f16 and f32 sums, of 16x16x16 or 8x8x8.
//!
//! The operands become halves first, each tensor scaled by one power of two: exact within `2^29` of its largest value, off
//! by at most `2^-40` of that value below. Probabilities are rounded to f16, 2^-11 of them, and so are the gradients of scores,
//! to 2^-11 or `head_dim 2^-40` of the product of the largest `d_out` and `v`: less than the 2^-9 to which bf16 results are
//! rounded. So the tolerance is that of the other kernel in bf16. A NaN or an infinity gives NaN wherever it takes part, and may
//! in positions of the same tile that do not see it.

use super::attention::Shape;
use crate::Result;
use crate::gpu::{Binding, Caps, Fragments, Gpu, Kernel, MatrixUnits, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Tops { q: u32, k: u32, v: u32 }
}
crate::params! {
    struct Halves { batch: u32, seq: u32, heads: u32, kv_heads: u32, padded: u32, first: u32 }
}

const FORWARD_TEXT: &str = concat!(
    include_str!("../../shaders/lib/fragments.wgsl"),
    include_str!("../../shaders/lib/attention.wgsl"),
    include_str!("../../shaders/lib/attention_coop.wgsl"),
    include_str!("../../shaders/attention_coop.wgsl")
);
const BACKWARD_TEXT: &str = concat!(
    include_str!("../../shaders/lib/fragments.wgsl"),
    include_str!("../../shaders/lib/attention.wgsl"),
    include_str!("../../shaders/lib/attention_coop.wgsl"),
    include_str!("../../shaders/attention_coop_backward.wgsl")
);
const HALVES_TEXT: &str = include_str!("../../shaders/attention_halves.wgsl");
const FORWARD: Kernel = Kernel { name: "attention_coop.forward", text: FORWARD_TEXT, entry: "forward" };
const BY_QUERY: Kernel = Kernel { name: "attention_coop.by_query", text: BACKWARD_TEXT, entry: "by_query" };
const BY_KEY: Kernel = Kernel { name: "attention_coop.by_key", text: BACKWARD_TEXT, entry: "by_key" };
const TOPS: Kernel = Kernel { name: "attention_halves.tops", text: HALVES_TEXT, entry: "tops" };
const HALVES: Kernel = Kernel { name: "attention_halves.halves", text: HALVES_TEXT, entry: "halves" };
const STATISTICS: Kernel =
    Kernel { name: "attention_halves.statistics", text: HALVES_TEXT, entry: "statistics" };

/// A multiple of the positions of a workgroup and of those of a step.
const PADDED: usize = 128;
/// Subgroups of a workgroup.
const SUBGROUPS: u32 = 4;
/// Workgroups that look for the largest magnitude of a tensor.
const PARTS: usize = 256;
/// Quads that a thread makes halves of.
const EACH: usize = 4;
/// Number of `d_out` among q, k, v, `d_out`.
const D_OUT: u32 = 3;

/// Whether the kernels can compute heads of `head_dim` elements of such operands here.
pub(super) fn can_run(caps: &Caps, dtype: DType, head_dim: usize) -> bool {
    caps.coop.is_some()
        && dtype == DType::BF16
        && head_dim.is_multiple_of(16)
        && (16..=128).contains(&head_dim)
}

/// Bytes of q, k and v as halves, side by side.
pub(super) fn padded_bytes(shape: Shape) -> u64 {
    let rows = shape.batch * shape.seq.next_multiple_of(PADDED);
    (rows * (shape.heads + 2 * shape.kv_heads) * shape.head_dim * DType::F16.size()) as u64
}

/// q, k and v as halves, head by head, and `1/s` of each and of `d_out` for the power of two `s` that takes it into the range of
/// halves; that of `d_out` when backward has seen it.
#[derive(Clone, Debug)]
pub(super) struct Operands {
    halves: [Tensor; 3],
    scales: Tensor,
}

impl Operands {
    /// Of q, k and v.
    pub fn new(gpu: &Gpu, [q, k, v]: [&Tensor; 3], shape: Shape) -> Result<Operands> {
        let call = Call { shape, documents: None };
        let scales = Tensor::flat(gpu, "attention scales", 4, DType::F32)?;
        let halves = call.halves(gpu, &[q, k, v], 0, &scales)?;
        Ok(Operands { halves: halves.try_into().expect("three tensors"), scales })
    }
}

/// [`super::attention::forward`]: `out` in bf16, and lse.
pub(super) fn forward(
    gpu: &Gpu,
    operands: &Operands,
    shape: Shape,
    docs: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let call = Call { shape, documents: docs };
    let [q, k, v] = &operands.halves;
    let rows = shape.batch * shape.seq;
    let out = Tensor::empty(gpu, "attention out", &[rows, shape.heads * shape.head_dim], DType::BF16)?;
    let lse = Tensor::flat(gpu, "attention lse", rows * shape.heads, DType::F32)?;
    let bindings =
        [q.read(), k.read(), v.read(), call.docs(q), operands.scales.read(), out.write(), lse.write()];
    call.dispatch(gpu, &FORWARD, &bindings, shape.heads)?;
    Ok((out, lse))
}

/// [`super::attention::backward`] into `d_q`, `d_k`, `d_v`.
pub(super) fn backward(
    gpu: &Gpu,
    d_out: &Tensor,
    operands: &Operands,
    (out, lse): (&Tensor, &Tensor),
    [d_q, d_k, d_v]: [&Tensor; 3],
    shape: Shape,
    docs: Option<&Tensor>,
) -> Result<()> {
    let call = Call { shape, documents: docs };
    let Operands { halves, scales } = operands;
    let d_half = call.halves(gpu, &[d_out], D_OUT, scales)?.remove(0);
    let pairs = shape.batch * call.padded() * shape.heads;
    let stats = Tensor::flat(gpu, "attention row statistics", 2 * pairs + 4, DType::F32)?;
    let bindings = [d_out.read(), scales.read(), out.read(), lse.read(), stats.write()];
    let params = call.halves_params(D_OUT);
    gpu.dispatch(&STATISTICS, &call.halves_variant(), &params, &bindings, pairs.div_ceil(256) as u32)?;
    let mut bindings: Vec<Binding> = halves.iter().map(Tensor::read).collect();
    bindings.extend([call.docs(&d_half), d_half.read(), stats.read(), d_q.write()]);
    call.dispatch(gpu, &BY_QUERY, &bindings, shape.heads)?;
    bindings.pop();
    bindings.extend([d_k.write(), d_v.write()]);
    call.dispatch(gpu, &BY_KEY, &bindings, shape.kv_heads)
}

/// What the kernels of one call have in common.
struct Call<'a> {
    shape: Shape,
    documents: Option<&'a Tensor>,
}

impl<'a> Call<'a> {
    /// Positions of a sequence with the zeros after it.
    fn padded(&self) -> usize {
        self.shape.seq.next_multiple_of(PADDED)
    }

    /// The documents, or anything in their place.
    fn docs(&self, other: &Tensor) -> Binding {
        self.documents.unwrap_or(other).read()
    }

    fn halves_variant(&self) -> Variant {
        halves_variant(self.shape.head_dim)
    }

    fn halves_params(&self, first: u32) -> Halves {
        Halves {
            batch: self.shape.batch as u32,
            seq: self.shape.seq as u32,
            heads: self.shape.heads as u32,
            kv_heads: self.shape.kv_heads as u32,
            padded: self.padded() as u32,
            first,
        }
    }

    /// The `tensors`, which are q, k and v or `d_out` (`first` says which), as halves; theirs of `scales` are written.
    fn halves(&self, gpu: &Gpu, tensors: &[&Tensor], first: u32, scales: &Tensor) -> Result<Vec<Tensor>> {
        let operand = |i: usize| *tensors.get(i).unwrap_or(&tensors[0]);
        let quads = |i: usize| tensors.get(i).map_or(0, |t| (t.rows() * t.quads()) as u32);
        let tops = Tensor::flat(gpu, "attention largest magnitudes", tensors.len() * PARTS, DType::U32)?;
        let params = Tops { q: quads(0), k: quads(1), v: quads(2) };
        let three = [operand(0).read(), operand(1).read(), operand(2).read()];
        let mut bindings = three.to_vec();
        bindings.push(tops.write());
        let groups = (tensors.len() * PARTS) as u32;
        gpu.dispatch(&TOPS, &self.halves_variant(), &params, &bindings, groups)?;
        let rows = self.shape.batch * self.padded();
        let quads: Vec<usize> = tensors.iter().map(|t| rows * t.quads()).collect();
        let all = Tensor::empty(gpu, "attention halves", &[quads.iter().sum(), 4], DType::F16)?;
        bindings = three.to_vec();
        bindings.extend([tops.read(), all.write(), scales.write()]);
        let groups = quads.iter().map(|n| n.div_ceil(256 * EACH)).sum::<usize>() as u32;
        gpu.dispatch(&HALVES, &self.halves_variant(), &self.halves_params(first), &bindings, groups)?;
        let mut from = 0;
        let part = |n: &usize| {
            from += n;
            all.slice_rows(from - n, from)
        };
        Ok(quads.iter().map(part).collect())
    }

    /// Launches a workgroup for each [`Tile::span`] positions of each of `heads` heads of every sequence.
    fn dispatch(&self, gpu: &Gpu, kernel: &Kernel, bindings: &[Binding], heads: usize) -> Result<()> {
        let s = self.shape;
        let (params, fragments) = (s.params(self.padded()), fragments(&gpu.caps()));
        let variant = variant(kernel, s.head_dim, self.documents.is_some(), fragments);
        let span = tile(kernel, s.head_dim).span(fragments.units);
        let groups = s.seq.div_ceil(span) * s.batch * heads;
        #[cfg(test)]
        let (kernel, variant) = (&emulated::kernel(*kernel), super::emulation::told(variant));
        gpu.dispatch(kernel, &variant, &params, bindings, groups as u32)
    }
}

/// The matrix units, and the subgroups that share a fragment.
///
/// # Panics
/// Without matrix units: [`can_run`] was to be asked.
fn fragments(caps: &Caps) -> Fragments {
    #[cfg(test)]
    if let Some(fragments) = super::emulation::fragments() {
        return fragments;
    }
    caps.fragments().expect("matrix units")
}

/// Bits that gradients of scores lose, see attention_halves.wgsl: `2^fall >= head_dim 2^17`.
fn fall(head_dim: usize) -> u32 {
    head_dim.next_power_of_two().ilog2() + 17
}

fn halves_variant(head_dim: usize) -> Variant {
    Variant::new()
        .constant("HQ", head_dim as u32 / 4)
        .constant("FALL", fall(head_dim))
        .constant("EACH", EACH as u32)
}

/// How the work is cut, as measured for heads of 16 and 128 elements with fragments of 16x16 (docs/numbers.md). Those of 8x8 take
/// the same: a subgroup then has 8 rows, as in MLX.
#[derive(Clone, Copy, Debug)]
struct Tile {
    /// Fragments of rows of a subgroup.
    rows: u32,
    /// Rounds of a step.
    rounds: u32,
    /// Quads after a row of scores and one of probabilities in workgroup memory: without bank conflicts `[2, 2]`.
    pads: [u32; 2],
    /// Whether subgroups leave out rounds that none of their rows takes part in: costs more than it saves where rounds are long.
    skip: bool,
}

impl Tile {
    /// Positions of a workgroup.
    fn span(&self, units: MatrixUnits) -> usize {
        (units.edge() * self.rows * SUBGROUPS) as usize
    }
}

/// At most 24 KiB of workgroup memory in all, so that two workgroups share a core; at small heads three.
fn tile(kernel: &Kernel, head_dim: usize) -> Tile {
    let (rows, rounds, pads) = match (kernel.entry, head_dim) {
        (_, 0..=32) => (2, 2, [2, 2]),
        (_, 0..=64) => (1, 2, [2, 2]),
        // Its row statistics leave no room for more.
        ("by_key", _) => (1, 1, [2, 2]),
        (_, _) => (1, 2, [1, 0]),
    };
    Tile { rows, rounds, pads, skip: head_dim <= 32 }
}

fn variant(kernel: &Kernel, head_dim: usize, docs: bool, fragments: Fragments) -> Variant {
    let (t, Fragments { units, lanes, .. }) = (tile(kernel, head_dim), fragments);
    // A row of scores has 4 quads, and so has a row of 16 elements of a result.
    let quads = 4 * units.edge();
    let (threads, chunks) = (SUBGROUPS * lanes, t.rounds * 2 * head_dim as u32);
    Variant::new()
        .fragments(fragments)
        .constant("DF", head_dim as u32 / 16)
        .constant("RF", t.rows)
        .constant("SG", SUBGROUPS)
        .constant("ROUNDS", t.rounds)
        .constant("SCORE_PAD", t.pads[0])
        .constant("PROB_PAD", t.pads[1])
        .constant("SKIP", t.skip.into())
        .constant("WHOLE", (!t.skip).into())
        .constant("LOADS", chunks.div_ceil(threads))
        .constant("KQ", quads / lanes)
        .constant("STORES", quads / lanes)
        .constant("FALL", fall(head_dim))
        .constant("DOCS", docs.into())
}

/// Every kind of variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for head_dim in [16, 48, 80, 128] {
        all.extend([TOPS, HALVES, STATISTICS].map(|kernel| (kernel, halves_variant(head_dim))));
        for kernel in [FORWARD, BY_QUERY, BY_KEY] {
            for (docs, lanes) in [(false, 32), (true, 32), (false, 64)] {
                let fragments = Fragments { units: MatrixUnits::Coop16, lanes, vary: lanes == 64 };
                all.push((kernel, variant(&kernel, head_dim, docs, fragments)));
            }
            for docs in [false, true] {
                let fragments = Fragments { units: MatrixUnits::Coop8, lanes: 32, vary: false };
                all.push((kernel, variant(&kernel, head_dim, docs, fragments)));
            }
        }
    }
    all
}

mod emulated;

#[cfg(test)]
mod tests {
    use super::{Call, D_OUT, Operands, PADDED};
    use crate::gpu::{DeviceChoice, Gpu};
    use crate::num::rng::Stream;
    use crate::num::{DType, bf16};
    use crate::ops::attention::Shape;
    use crate::tensor::Tensor;
    use half::f16;

    /// `r` and the halves of a tensor (rows of `heads` heads), as the shader's head says, from its values.
    fn expected(shape: Shape, heads: usize, values: &[f32]) -> (f32, Vec<f16>) {
        let top = values.iter().filter(|v| v.is_finite()).fold(0f32, |a, v| a.max(v.abs()));
        let exponent = if top == 0.0 { -95 } else { top.log2().floor() as i32 };
        let past = i32::from(top > 1.75 * 2f32.powi(exponent));
        let r = 2f32.powi((exponent + past).max(-95) - 15);
        let (d, padded) = (shape.head_dim, shape.seq.next_multiple_of(PADDED));
        let mut halves = vec![f16::ZERO; shape.batch * heads * padded * d];
        for (i, v) in values.iter().enumerate() {
            let (row, head, c) = (i / (heads * d), i / d % heads, i % d);
            let at = ((row / shape.seq * heads + head) * padded + row % shape.seq) * d + c;
            halves[at] = f16::from_f32(v / r);
        }
        (r, halves)
    }

    /// Ragged cases: one position, one past a tile, key heads fewer than heads, chunks of a workgroup that end in the middle of a
    /// tensor, zeros, values of very different sizes.
    #[test]
    fn operands_become_halves_head_by_head() {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        for (batch, seq, heads, kv_heads, head_dim, power) in
            [(1, 1, 1, 1, 16, 0), (2, 129, 3, 1, 48, 20), (3, 7, 2, 2, 16, -30), (1, 259, 4, 2, 112, 0)]
        {
            let shape = Shape { batch, seq, heads, kv_heads, head_dim, block: None };
            let draw = |name: &str, heads: usize, power: i32| -> Vec<f32> {
                let stream = Stream::new(seq as u64, name);
                let n = batch * seq * heads * head_dim;
                (0..n as u64).map(|i| bf16::round(stream.normal(i) * 2f32.powi(power))).collect()
            };
            let zeros = vec![0.0; batch * seq * kv_heads * head_dim];
            let values = [draw("q", heads, power), draw("k", kv_heads, -power), zeros, draw("d", heads, 3)];
            let each = [heads, kv_heads, kv_heads, heads];
            let tensors = [0, 1, 2, 3].map(|i| {
                let shape = [batch * seq, each[i] * head_dim];
                Tensor::from_f32(&gpu, "operand", &shape, DType::BF16, &values[i]).unwrap()
            });
            let [q, k, v, d_out] = tensors.each_ref();
            let operands = Operands::new(&gpu, [q, k, v], shape).unwrap();
            let call = Call { shape, documents: None };
            let d_half = call.halves(&gpu, &[d_out], D_OUT, &operands.scales).unwrap();
            let scales = operands.scales.to_f32(&gpu).unwrap();
            for (i, halves) in operands.halves.iter().chain(&d_half).enumerate() {
                let (r, want) = expected(shape, each[i], &values[i]);
                let (buffer, at) = halves.memory();
                let got = gpu.download(buffer, at, halves.bytes()).unwrap();
                let got: Vec<f16> = got.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
                assert_eq!(scales[i], r, "1/s of tensor {i} of {shape:?}");
                assert!(got == want, "tensor {i} of {shape:?}");
            }
        }
    }
}

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
use crate::gpu::{Binding, Caps, Gpu, Kernel, MatrixUnits, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Tops { q: u32, k: u32, v: u32, d_out: u32 }
}
crate::params! {
    struct Scales { tensors: u32 }
}
crate::params! {
    struct Halves { batch: u32, seq: u32, heads: u32, padded: u32, which: u32 }
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
const SCALES: Kernel = Kernel { name: "attention_halves.scales", text: HALVES_TEXT, entry: "scales_of" };
const HALVES: Kernel = Kernel { name: "attention_halves.halves", text: HALVES_TEXT, entry: "halves" };
const STATISTICS: Kernel =
    Kernel { name: "attention_halves.statistics", text: HALVES_TEXT, entry: "statistics" };

/// A multiple of the positions of a workgroup and of those of a step.
const PADDED: usize = 128;
/// Subgroups of a workgroup.
const SUBGROUPS: u32 = 4;
/// Workgroups that look for the largest magnitude of a tensor.
const PARTS: usize = 256;

/// Whether the kernels can compute heads of `head_dim` elements of such operands here.
pub(super) fn can_run(caps: &Caps, dtype: DType, head_dim: usize) -> bool {
    caps.coop.is_some()
        && dtype == DType::BF16
        && head_dim.is_multiple_of(16)
        && (16..=128).contains(&head_dim)
}

/// Bytes of the largest of its operands as halves.
pub(super) fn padded_bytes(shape: Shape) -> u64 {
    let rows = shape.batch * shape.seq.next_multiple_of(PADDED);
    (rows * shape.heads.max(shape.kv_heads) * shape.head_dim * DType::F16.size()) as u64
}

/// [`super::attention::forward`].
pub(super) fn forward(
    gpu: &Gpu,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: Shape,
    docs: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let call = Call::new(gpu, shape, docs);
    let scales = call.scales(gpu, [q, k, v], None)?;
    let half = |which: usize| call.halves(gpu, [q, k, v][which], which, &scales);
    let (qh, kh, vh) = (half(0)?, half(1)?, half(2)?);
    let out = Tensor::empty(gpu, "attention out", q.shape(), q.dtype())?;
    let lse = Tensor::flat(gpu, "attention lse", q.rows() * shape.heads, DType::F32)?;
    let docs = call.docs(q);
    let bindings = [qh.read(), kh.read(), vh.read(), docs, scales.read(), out.write(), lse.write()];
    call.dispatch(gpu, &FORWARD, &bindings, shape.heads)?;
    Ok((out, lse))
}

/// [`super::attention::backward`].
pub(super) fn backward(
    gpu: &Gpu,
    d_out: &Tensor,
    [q, k, v]: [&Tensor; 3],
    out: &Tensor,
    lse: &Tensor,
    shape: Shape,
    docs: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let call = Call::new(gpu, shape, docs);
    let scales = call.scales(gpu, [q, k, v], Some(d_out))?;
    let half = |which: usize| call.halves(gpu, [q, k, v, d_out][which], which, &scales);
    let (halves, d_half) = ([half(0)?, half(1)?, half(2)?], half(3)?);
    let pairs = shape.batch * call.padded() * shape.heads;
    let stats = Tensor::flat(gpu, "attention row statistics", 2 * pairs + 4, DType::F32)?;
    let bindings = [d_out.read(), scales.read(), out.read(), lse.read(), stats.write()];
    let params = call.halves_params(shape.heads, 0);
    gpu.dispatch(&STATISTICS, &call.halves_variant(), &params, &bindings, pairs.div_ceil(256) as u32)?;
    let d_q = Tensor::empty(gpu, "attention d_q", q.shape(), q.dtype())?;
    let d_k = Tensor::empty(gpu, "attention d_k", k.shape(), q.dtype())?;
    let d_v = Tensor::empty(gpu, "attention d_v", v.shape(), q.dtype())?;
    let mut bindings: Vec<Binding> = halves.iter().map(Tensor::read).collect();
    bindings.extend([call.docs(q), d_half.read(), stats.read(), d_q.write()]);
    call.dispatch(gpu, &BY_QUERY, &bindings, shape.heads)?;
    bindings.pop();
    bindings.extend([d_k.write(), d_v.write()]);
    call.dispatch(gpu, &BY_KEY, &bindings, shape.kv_heads)?;
    Ok((d_q, d_k, d_v))
}

/// What the kernels of one call have in common.
struct Call<'a> {
    shape: Shape,
    /// The matrix units, and the lanes of a subgroup.
    units: (MatrixUnits, u32),
    documents: Option<&'a Tensor>,
}

impl<'a> Call<'a> {
    fn new(gpu: &Gpu, shape: Shape, documents: Option<&'a Tensor>) -> Call<'a> {
        Call { shape, units: units(&gpu.caps()), documents }
    }

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

    /// `1/s` of q, k, v and `d_out` for the power of two `s` that takes each into the range of halves.
    fn scales(&self, gpu: &Gpu, [q, k, v]: [&Tensor; 3], d_out: Option<&Tensor>) -> Result<Tensor> {
        let count = if d_out.is_some() { 4 } else { 3 };
        let parts = Tensor::flat(gpu, "attention largest magnitudes", count * PARTS, DType::U32)?;
        let quads = |t: &Tensor| (t.rows() * t.quads()) as u32;
        let params = Tops { q: quads(q), k: quads(k), v: quads(v), d_out: d_out.map_or(0, quads) };
        let bindings = [q.read(), k.read(), v.read(), d_out.unwrap_or(q).read(), parts.write()];
        gpu.dispatch(&TOPS, &self.halves_variant(), &params, &bindings, (count * PARTS) as u32)?;
        let scales = Tensor::flat(gpu, "attention scales", 4, DType::F32)?;
        let bindings = [parts.read(), scales.write()];
        gpu.dispatch(&SCALES, &self.halves_variant(), &Scales { tensors: count as u32 }, &bindings, 1)?;
        Ok(scales)
    }

    fn halves_params(&self, heads: usize, which: usize) -> Halves {
        Halves {
            batch: self.shape.batch as u32,
            seq: self.shape.seq as u32,
            heads: heads as u32,
            padded: self.padded() as u32,
            which: which as u32,
        }
    }

    /// Operand number `which` as halves.
    fn halves(&self, gpu: &Gpu, x: &Tensor, which: usize, scales: &Tensor) -> Result<Tensor> {
        let rows = self.shape.batch * self.padded();
        let codes = Tensor::empty(gpu, "attention halves", &[rows, x.cols()], DType::F16)?;
        let params = self.halves_params(x.cols() / self.shape.head_dim, which);
        let groups = (rows * x.quads()).div_ceil(256);
        let bindings = [x.read(), scales.read(), codes.write()];
        gpu.dispatch(&HALVES, &self.halves_variant(), &params, &bindings, groups as u32)?;
        Ok(codes)
    }

    /// Launches a workgroup for each [`Tile::span`] positions of each of `heads` heads of every sequence.
    fn dispatch(&self, gpu: &Gpu, kernel: &Kernel, bindings: &[Binding], heads: usize) -> Result<()> {
        let s = self.shape;
        let params = s.params(self.padded());
        let variant = variant(kernel, s.head_dim, self.documents.is_some(), self.units);
        let span = tile(kernel, s.head_dim).span(self.units.0);
        let groups = s.seq.div_ceil(span) * s.batch * heads;
        #[cfg(test)]
        let kernel = &emulated::kernel(*kernel);
        gpu.dispatch(kernel, &variant, &params, bindings, groups as u32)
    }
}

/// The matrix units, and the lanes of a subgroup.
///
/// # Panics
/// Without matrix units: [`can_run`] was to be asked.
fn units(caps: &Caps) -> (MatrixUnits, u32) {
    #[cfg(test)]
    if let Some(units) = emulated::units() {
        return (units, 32);
    }
    (caps.coop.expect("matrix units"), caps.subgroup_max)
}

/// Bits that gradients of scores lose, see attention_halves.wgsl: `2^fall >= head_dim 2^17`.
fn fall(head_dim: usize) -> u32 {
    head_dim.next_power_of_two().ilog2() + 17
}

fn halves_variant(head_dim: usize) -> Variant {
    Variant::new().constant("HQ", head_dim as u32 / 4).constant("FALL", fall(head_dim))
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

fn variant(kernel: &Kernel, head_dim: usize, docs: bool, (units, lanes): (MatrixUnits, u32)) -> Variant {
    let t = tile(kernel, head_dim);
    // A row of scores has 4 quads, and so has a row of 16 elements of a result.
    let quads = 4 * units.edge();
    let (threads, chunks) = (SUBGROUPS * lanes, t.rounds * 2 * head_dim as u32);
    Variant::new()
        .fragments(units)
        .constant("DF", head_dim as u32 / 16)
        .constant("RF", t.rows)
        .constant("SG", SUBGROUPS)
        .constant("ROUNDS", t.rounds)
        .constant("SCORE_PAD", t.pads[0])
        .constant("PROB_PAD", t.pads[1])
        .constant("SKIP", t.skip.into())
        .constant("WHOLE", (!t.skip).into())
        .constant("LANES", lanes)
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
        all.extend([TOPS, SCALES, HALVES, STATISTICS].map(|kernel| (kernel, halves_variant(head_dim))));
        for kernel in [FORWARD, BY_QUERY, BY_KEY] {
            for (docs, lanes) in [(false, 32), (true, 32), (false, 64)] {
                all.push((kernel, variant(&kernel, head_dim, docs, (MatrixUnits::Coop16, lanes))));
            }
            for docs in [false, true] {
                all.push((kernel, variant(&kernel, head_dim, docs, (MatrixUnits::Coop8, 32))));
            }
        }
    }
    all
}

mod emulated;

//! Token embedding: rows of a table, and the table's gradient in a fixed order.
//!
//! Definition: `torch.nn.functional.embedding` (PyTorch 2.8).
//! Forward copies, so it is exact. Backward adds a row's `n` tokens in f32, one after another in chunks of 32 and between
//! them: `(n / 32 + 64) * 2^-24 * sum |d|`, plus one rounding to the result's dtype.

use super::Team;
use crate::Result;
use crate::gpu::{Gpu, Kernel, Variant};
use crate::num::DType;
use crate::tensor::Tensor;

crate::params! {
    struct Embedding {
        tokens: u32,
        vocab: u32,
        quads: u32,
        shift: u32,
    }
}

const TEXT: &str = include_str!("../../shaders/embedding.wgsl");
const FORWARD: Kernel = Kernel { name: "embedding.forward", text: TEXT, entry: "forward" };
const COUNT: Kernel = Kernel { name: "embedding.count", text: TEXT, entry: "count" };
const PLACE: Kernel = Kernel { name: "embedding.place", text: TEXT, entry: "place" };
const STARTS: Kernel = Kernel { name: "embedding.starts", text: TEXT, entry: "starts" };
const RUNS: Kernel = Kernel { name: "embedding.runs", text: TEXT, entry: "runs" };
const BACKWARD: Kernel = Kernel { name: "embedding.backward", text: TEXT, entry: "backward" };

/// Positions of one token that are summed at once, a multiple of 4.
const CHUNK: usize = 32;
/// Quads of a row that a thread takes at a time, at most, and of the sums of chunks that it reads at once.
const MOST_HELD: usize = 8;
const MOST_SUMS: usize = 16;
/// Positions of a chunk of the sort, and bits of its digits: a thread for each position and digit.
const SORTED_AT_ONCE: usize = 256;
const DIGIT: u32 = 8;

/// `out[t] = table[tokens[t]]`: tokens flat u32 `[T]`, each below V; table `(V, D)`; the result `(T, D)` in its dtype.
///
/// # Errors
/// The result is over the adapter's limits, or what the device reported.
#[track_caller]
pub fn forward(gpu: &Gpu, tokens: &Tensor, table: &Tensor) -> Result<Tensor> {
    assert_eq!(tokens.dtype(), DType::U32, "embedding: tokens {:?} are u32", tokens.shape());
    let out = Tensor::empty(gpu, "embedded tokens", &[tokens.numel(), table.cols()], table.dtype())?;
    let params = params((tokens.numel(), table.rows(), table.quads()));
    let bindings = [tokens.read(), table.read(), out.write()];
    let groups = (out.rows() * out.quads()).div_ceil(256) as u32;
    gpu.dispatch(&FORWARD, &variant("FORWARD").quad("X", table.dtype()), &params, &bindings, groups)?;
    Ok(out)
}

/// The table's gradient `(vocab, D)` in `dtype`: row v is the sum of `d_out[t]` over the tokens `t` that are v, in a fixed
/// order. `d_out` is `(T, D)`.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward(gpu: &Gpu, tokens: &Tensor, d_out: &Tensor, vocab: usize, dtype: DType) -> Result<Tensor> {
    let out = Tensor::empty(gpu, "embedding gradient", &[vocab, d_out.cols()], dtype)?;
    backward_into(gpu, tokens, d_out, &out)?;
    Ok(out)
}

/// [`backward`] into `out` (vocab, D).
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward_into(gpu: &Gpu, tokens: &Tensor, d_out: &Tensor, out: &Tensor) -> Result<()> {
    let (vocab, dtype) = (out.rows(), out.dtype());
    assert_eq!(out.cols(), d_out.cols(), "embedding: columns of the table's gradient and of d_out");
    let (count, quads) = (tokens.numel(), d_out.quads());
    assert_eq!(count, d_out.rows(), "embedding: tokens, rows of d_out {:?}", d_out.shape());
    let software = gpu.caps().software;
    let params = params((count, vocab, quads));
    let Sorted { order, sorted, first } = sort(gpu, tokens, &params)?;
    // One at least, so that there is something to bind.
    let whole = (count / CHUNK).max(1);
    let sums = Tensor::empty(gpu, "sums of runs", &[whole, 4 * quads], DType::F32)?;
    let bindings = [order.read(), sorted.read(), d_out.read(), sums.write()];
    let runs = variant("RUNS").quad("X", d_out.dtype());
    gpu.dispatch(&RUNS, &runs, &params, &bindings, (whole * quads).div_ceil(64) as u32)?;
    let bindings = [order.read(), first.read(), d_out.read(), sums.read(), out.write()];
    let team = Team::of(quads, MOST_HELD, software);
    gpu.dispatch(
        &BACKWARD,
        &backward_variant([d_out.dtype(), dtype], team),
        &params,
        &bindings,
        team.groups(vocab),
    )
}

/// Positions sorted by token.
struct Sorted {
    /// The positions, flat u32 (T).
    order: Tensor,
    /// Their tokens, flat u32 (T).
    sorted: Tensor,
    /// Where each token begins, and the end, flat u32 (V + 1).
    first: Tensor,
}

/// A radix sort: stable passes over eight bits of the tokens at a time, the lowest first.
fn sort(gpu: &Gpu, tokens: &Tensor, params: &Embedding) -> Result<Sorted> {
    let [count, vocab] = [params.tokens, params.vocab].map(|n| n as usize);
    let index = |name: &str, n: usize| Tensor::flat(gpu, name, n, DType::U32);
    let chunks = count.div_ceil(SORTED_AT_ONCE);
    let ranks = index("ranks of tokens", count)?;
    let hits = index("hits of digits", (chunks << DIGIT).max(1))?;
    let mut so_far: Option<(Tensor, Tensor)> = None;
    for shift in (0..digits(vocab)).map(|digit| digit * DIGIT) {
        let params = Embedding { shift, ..*params };
        let keys = so_far.as_ref().map_or(tokens, |(_, sorted)| sorted);
        let bindings = [keys.read(), ranks.write(), hits.write()];
        gpu.dispatch(&COUNT, &variant("COUNT"), &params, &bindings, chunks as u32)?;
        let (order, sorted) = (index("token order", count)?, index("sorted tokens", count)?);
        let mut bindings = vec![keys.read(), ranks.read(), hits.read(), order.write(), sorted.write()];
        bindings.extend(so_far.as_ref().map(|(order, _)| order.read()));
        gpu.dispatch(&PLACE, &place_variant(so_far.is_some()), &params, &bindings, chunks as u32)?;
        so_far = Some((order, sorted));
    }
    let (order, sorted) = so_far.expect("a pass at least");
    let first = index("token starts", vocab + 1)?;
    let bindings = [sorted.read(), first.write()];
    gpu.dispatch(&STARTS, &variant("STARTS"), params, &bindings, (vocab + 1).div_ceil(64) as u32)?;
    Ok(Sorted { order, sorted, first })
}

/// Digits of the tokens below `vocab`.
fn digits(vocab: usize) -> u32 {
    let bits = usize::BITS - vocab.saturating_sub(1).leading_zeros();
    bits.div_ceil(DIGIT).max(1)
}

fn params((tokens, vocab, quads): (usize, usize, usize)) -> Embedding {
    let [tokens, vocab, quads] = [tokens, vocab, quads].map(|n| n as u32);
    Embedding { tokens, vocab, quads, shift: 0 }
}

/// The variant that compiles one of the entry points.
fn variant(which: &str) -> Variant {
    let names = ["FORWARD", "COUNT", "PLACE", "STARTS", "RUNS", "BACKWARD"];
    let all = Variant::new().constant("CHUNK", CHUNK as u32);
    names.into_iter().fold(all, |v, name| v.constant(name, u32::from(name == which)))
}

/// A pass of the sort, which may be the first one.
fn place_variant(again: bool) -> Variant {
    variant("PLACE").constant("AGAIN", u32::from(again))
}

fn backward_variant([x, out]: [DType; 2], team: Team) -> Variant {
    // A thread with one quad is a software adapter's, or has a short row: then there is little to wait for.
    let ahead = if team.held == 1 { 1 } else { (MOST_SUMS / team.held).clamp(1, 4) };
    team.constants(variant("BACKWARD")).constant("AHEAD", ahead as u32).quad("X", x).quad("OUT", out)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    use DType::{BF16, F32};
    let mut all = [(COUNT, "COUNT"), (STARTS, "STARTS")].map(|(k, name)| (k, variant(name))).to_vec();
    all.extend([false, true].map(|again| (PLACE, place_variant(again))));
    for x in [F32, BF16] {
        all.push((FORWARD, variant("FORWARD").quad("X", x)));
        all.push((RUNS, variant("RUNS").quad("X", x)));
        for team in Team::kinds() {
            all.push((BACKWARD, backward_variant([x, x], team)));
        }
    }
    all.push((BACKWARD, backward_variant([BF16, F32], Team::of(64, MOST_HELD, false))));
    all
}

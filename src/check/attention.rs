//! Attention and its gradients against f64, over ragged shapes, masks and magnitudes, in bf16.

use super::gemm::Outcome;
use crate::Result;
use crate::bench::check::Check;
use crate::bench::runner::{self as bench, Work};
use crate::gpu::Gpu;
use crate::num::rng::Stream;
use crate::num::{DType, bf16};
use crate::ops::attention::{self as op, Shape};
use crate::ops::attention_choice::Pass;
use crate::reference::attention as reference;
use crate::reference::compare::{bf16_ulp, within};
use crate::tensor::Tensor;
use std::rc::Rc;

/// What the operands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Values {
    /// Normal numbers.
    Normal,
    /// q, k, v and `d_out` times 2^20, 2^-20, 2^40 and 2^-30.
    Scaled,
    /// Scores of tens, that grow along the keys: every row's maximum moves on and on.
    Growing,
    /// A NaN in a key, an infinity in a value, both of the position in the middle.
    Spoiled,
}

/// Batch, positions, heads, key heads, elements of a head, block, documents: one position, primes, one past a tile,
/// groups of 1 to 4 heads, blocks that cut tiles and ones larger than the sequence, every number of fragments.
type Case = (usize, usize, usize, usize, usize, Option<usize>, bool, Values);
const TABLE: [Case; 23] = [
    (1, 1, 1, 1, 16, None, false, Values::Normal),
    (3, 2, 2, 1, 16, None, false, Values::Normal),
    (2, 17, 4, 1, 16, Some(4), true, Values::Normal),
    (1, 64, 3, 1, 16, None, false, Values::Normal),
    (2, 65, 4, 2, 16, None, true, Values::Normal),
    (3, 65, 2, 1, 16, None, false, Values::Normal),
    (1, 259, 2, 2, 16, Some(100), false, Values::Normal),
    (1, 131, 2, 1, 32, None, false, Values::Normal),
    (2, 97, 2, 2, 32, Some(40), true, Values::Growing),
    (1, 193, 2, 1, 48, Some(64), false, Values::Normal),
    (1, 67, 1, 1, 48, None, true, Values::Scaled),
    (2, 129, 4, 2, 64, None, false, Values::Normal),
    (1, 200, 2, 1, 64, Some(33), false, Values::Growing),
    (1, 128, 2, 2, 80, None, true, Values::Normal),
    (1, 61, 2, 1, 80, Some(1000), false, Values::Normal),
    (1, 70, 2, 1, 96, None, false, Values::Growing),
    (1, 40, 1, 1, 112, Some(7), true, Values::Normal),
    (2, 257, 4, 1, 128, None, false, Values::Normal),
    (1, 96, 2, 2, 128, Some(48), true, Values::Normal),
    (1, 150, 2, 1, 128, None, false, Values::Growing),
    (1, 130, 1, 1, 128, None, false, Values::Scaled),
    (1, 300, 2, 1, 16, None, false, Values::Spoiled),
    (1, 300, 2, 1, 128, None, false, Values::Spoiled),
];

/// Runs the table with the kernel that `gpu` chooses, each case twice: by the public ops, and as a training step does.
///
/// # Errors
/// What the device reported; a wrong result is an [`Outcome`].
pub fn attention(gpu: &Gpu) -> Result<Vec<Outcome>> {
    TABLE.iter().map(|case| Operands::new(*case).judge(gpu)).collect()
}

/// The results' names, in the order in which this file has them.
const NAMES: [&str; 5] = ["out", "lse", "d_q", "d_k", "d_v"];

struct Operands {
    case: Case,
    shape: Shape,
    /// q, k, v, gradient of out: bf16 values.
    values: [Vec<f32>; 4],
    docs: Option<Vec<u32>>,
}

impl Operands {
    fn new(case: Case) -> Operands {
        let (batch, seq, heads, kv_heads, head_dim, block, documents, kind) = case;
        let shape = Shape { batch, seq, heads, kv_heads, head_dim, block };
        let factor = |which: usize, position: usize| match kind {
            Values::Scaled => [20, -20, 40, -30].map(|e| 2f32.powi(e))[which],
            Values::Growing if which == 0 => 8.0,
            Values::Growing if which == 1 => 1.0 + position as f32 / 32.0,
            _ => 1.0,
        };
        let draw = |which: usize, heads: usize| -> Vec<f32> {
            let stream = Stream::new(5, ["q", "k", "v", "d_out"][which]);
            let width = heads * head_dim;
            let value = |i: usize| bf16::round(stream.normal(i as u64) * factor(which, i / width % seq));
            (0..batch * seq * width).map(value).collect()
        };
        let mut values = [draw(0, heads), draw(1, kv_heads), draw(2, kv_heads), draw(3, heads)];
        if kind == Values::Spoiled {
            let middle = seq / 2 * kv_heads * head_dim;
            values[1][middle] = f32::NAN;
            values[2][middle + head_dim - 1] = f32::INFINITY;
        }
        // Documents of 23 positions, cut differently in each sequence.
        let docs = documents.then(|| (0..batch * seq).map(|i| ((i % seq + i / seq) / 23) as u32).collect());
        Operands { case, shape, values, docs }
    }

    fn judge(&self, gpu: &Gpu) -> Result<Outcome> {
        let before = gpu.launches();
        let got = self.on_device(gpu, false)?;
        let kernel = super::launched(gpu, &before, "attention");
        let again = self.on_device(gpu, true)?;
        let bits =
            |all: &[Vec<f32>; 5]| all.clone().map(|v| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        let mut error =
            if self.case.7 == Values::Spoiled { self.unspoiled(&got) } else { self.compare(&got) };
        if error.is_none() && bits(&got) != bits(&again) {
            error = Some("another run, which keeps what forward read, gives other bits".into());
        }
        Ok(Outcome { case: format!("attention {}", self.name()), kernel, error })
    }

    fn name(&self) -> String {
        let (batch, seq, heads, kv_heads, head_dim, block, docs, kind) = self.case;
        let mask = format!("block {block:?}{}", if docs { ", documents" } else { "" });
        format!("{batch} x {seq} x {heads} x {kv_heads} x {head_dim}, {mask}, {kind:?}")
    }

    /// What is not within its bound of the f64 result: half a unit of bf16, and for what f16 and the rounding of `out` do
    /// 2^-10 of the largest entry, 1e-2 of it for `d_q` and `d_k`; `lse` in f32.
    fn compare(&self, got: &[Vec<f32>; 5]) -> Option<String> {
        let (want, terms) = self.expected();
        (0..NAMES.len()).find_map(|i| wrong(i, &got[i], &want[i], terms[i]))
    }
    /// out, lse (row by row), `d_q`, `d_k`, `d_v` by the reference, and a size of the terms of each, where the sums may leave nothing.
    fn expected(&self) -> ([Vec<f64>; 5], [f64; 5]) {
        let Shape { batch, seq, heads, kv_heads, head_dim, block } = self.shape;
        let shape = reference::Shape { batch, seq, heads, kv_heads, head_dim };
        let mask = reference::Mask { block, documents: self.docs.as_deref() };
        let [q, k, v, d_out] =
            [0, 1, 2, 3].map(|i| self.values[i].iter().map(|x| f64::from(*x)).collect::<Vec<f64>>());
        let forward = reference::forward(shape, mask, &q, &k, &v);
        let (d_q, d_k, d_v) = reference::backward(shape, mask, (&q, &k, &v), &d_out);
        let lse = (0..batch * seq * heads)
            .map(|i| forward.lse[(i / (seq * heads) * heads + i % heads) * seq + i / heads % seq])
            .collect();
        let rms = |x: &[f64]| (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64).sqrt();
        let d_score = rms(&v) * rms(&d_out);
        let terms = [rms(&v), 1.0, d_score * rms(&k), d_score * rms(&q), rms(&d_out)];
        ([forward.out, lse, d_q, d_k, d_v], terms)
    }

    /// A number where the position in the middle, which is spoiled, takes part.
    fn unspoiled(&self, got: &[Vec<f32>; 5]) -> Option<String> {
        let Shape { seq, heads, kv_heads, head_dim, .. } = self.shape;
        let per = [heads * head_dim, heads, heads * head_dim, kv_heads * head_dim, kv_heads * head_dim];
        // The key's NaN makes every later score NaN; the gradients of earlier keys come through their softmax.
        for ((name, got), per) in NAMES.iter().zip(got).zip(per) {
            let first = if name.ends_with('k') || name.ends_with('v') { 0 } else { seq / 2 };
            if let Some(at) = got[first * per..].iter().position(|v| !v.is_nan()) {
                return Some(format!("{name}: element {} is a number after a NaN", first * per + at));
            }
        }
        // A number, but for positions of the same tile: nothing times an infinity is none.
        let before = got[0][..per[0]].iter().any(|v| !v.is_finite());
        before.then(|| "out: the first position saw a later one".into())
    }

    fn tensors(&self, gpu: &Gpu) -> Result<Tensors> {
        let Shape { batch, seq, heads, kv_heads, head_dim, .. } = self.shape;
        let tensor = |i: usize, heads: usize| {
            Tensor::from_f32(gpu, "operand", &[batch * seq, heads * head_dim], DType::BF16, &self.values[i])
        };
        let docs = self.docs.as_ref().map(|d| Tensor::from_u32(gpu, "documents", d)).transpose()?;
        let (q, k, v) = (tensor(0, heads)?, tensor(1, kv_heads)?, tensor(2, kv_heads)?);
        Ok(Tensors { q, k, v, d_out: tensor(3, heads)?, docs })
    }

    /// [`NAMES`] on the adapter; with `keep` backward takes what forward has made of q, k and v.
    fn on_device(&self, gpu: &Gpu, keep: bool) -> Result<[Vec<f32>; 5]> {
        let Tensors { q, k, v, d_out, docs } = self.tensors(gpu)?;
        let docs = docs.as_ref();
        let (out, lse, (d_q, d_k, d_v)) = if keep {
            let kept = op::forward_kept(gpu, [&q, &k, &v], self.shape, docs)?;
            let like = |x: &Tensor| Tensor::empty(gpu, "gradient", x.shape(), x.dtype());
            let d = (like(&q)?, like(&k)?, like(&v)?);
            drop((q, k, v));
            op::backward_kept(gpu, &d_out, &kept, [&d.0, &d.1, &d.2], self.shape, docs)?;
            (kept.out, kept.lse, d)
        } else {
            let (out, lse) = op::forward(gpu, &q, &k, &v, self.shape, docs)?;
            let d = op::backward(gpu, &d_out, &q, &k, &v, &out, &lse, self.shape, docs)?;
            (out, lse, d)
        };
        let [out, lse, d_q, d_k, d_v] = [&out, &lse, &d_q, &d_k, &d_v].map(|t| t.to_f32(gpu));
        Ok([out?, lse?, d_q?, d_k?, d_v?])
    }
}

/// Operands on the adapter.
struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    docs: Option<Tensor>,
}

/// What is wrong with result number `i` of [`NAMES`], whose terms are of size `terms`.
fn wrong(i: usize, got: &[f32], want: &[f64], terms: f64) -> Option<String> {
    let largest = want.iter().fold(terms, |a, v| a.max(v.abs()));
    let share = [2f64.powi(-10), 2f64.powi(-15), 1e-2, 1e-2, 2f64.powi(-10)][i];
    let unit = |w: f64| if NAMES[i] == "lse" { 0.0 } else { bf16_ulp(w) / 2.0 };
    let bound: Vec<f64> = want.iter().map(|w| unit(*w) + share * largest).collect();
    let wide: Vec<f64> = got.iter().map(|v| f64::from(*v)).collect();
    within(&wide, want, &bound, &[wide.len()]).err().map(|e| format!("{}: {e}", NAMES[i]))
}

/// The cases of the table with heads of `head_dim` elements and finite values: forward, or backward from the reference's results.
///
/// # Errors
/// Limits or memory of the device.
pub(super) fn cases(gpu: &Gpu, pass: Pass, head_dim: usize) -> Result<Vec<bench::Case>> {
    let fits = |case: &&Case| case.4 == head_dim && case.7 != Values::Spoiled;
    TABLE.iter().filter(fits).map(|case| Rc::new(Operands::new(*case)).case(gpu, pass)).collect()
}

impl Operands {
    fn case(self: Rc<Self>, gpu: &Gpu, pass: Pass) -> Result<bench::Case> {
        let (shape, (want, terms)) = (self.shape, self.expected());
        let Tensors { q, k, v, d_out, docs } = self.tensors(gpu)?;
        let narrow = |values: &[f64]| values.iter().map(|v| *v as f32).collect::<Vec<_>>();
        let out = Tensor::from_f32(gpu, "out", q.shape(), DType::BF16, &narrow(&want[0]))?;
        let lse = Tensor::from_flat_f32(gpu, "lse", &narrow(&want[1]))?;
        let first = if pass == Pass::Forward { 0 } else { 2 };
        let run = move |gpu: &Gpu| match pass {
            Pass::Forward => op::forward(gpu, &q, &k, &v, shape, docs.as_ref()).map(|(a, b)| vec![a, b]),
            Pass::Backward => {
                let all = op::backward(gpu, &d_out, &q, &k, &v, &out, &lse, shape, docs.as_ref());
                all.map(|(a, b, c)| vec![a, b, c])
            }
        };
        let check = move |gpu: &Gpu, results: &[Tensor]| {
            let mut check = Check::default();
            for (i, result) in results.iter().enumerate().map(|(i, t)| (first + i, t)) {
                check.wrong = check.wrong.or(wrong(i, &result.to_f32(gpu)?, &want[i], terms[i]));
            }
            Ok(check)
        };
        Ok(bench::Case {
            op: format!("attention_{}", pass.name()),
            shape: self.name(),
            groups: "ragged".into(),
            dtype: "bf16".into(),
            work: Work::Flops(0.0),
            run: Box::new(run),
            check: Box::new(check),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Case, NAMES, Operands, TABLE, Tensors, Values, op};
    use crate::gpu::{DeviceChoice, Fragments, Gpu, Options};
    use crate::ops::emulation::{Emulation, OF_8, OF_16, OF_16_BY_64};

    #[test]
    fn a_wrong_element_is_found() {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        let operands = Operands::new((2, 19, 2, 1, 16, Some(8), true, Values::Normal));
        let right = operands.on_device(&gpu, true).unwrap();
        assert_eq!(operands.compare(&right), None);
        for result in 0..5 {
            let mut wrong = right.clone();
            wrong[result][7] += 0.1;
            assert!(operands.compare(&wrong).is_some(), "result {result}");
        }
    }

    #[test]
    fn a_number_after_a_nan_is_found() {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        let operands = Operands::new((1, 300, 2, 1, 16, None, false, Values::Spoiled));
        let right = operands.on_device(&gpu, true).unwrap();
        assert_eq!(operands.unspoiled(&right), None);
        let mut wrong = right;
        wrong[0][299 * 32] = 1.0;
        assert!(operands.unspoiled(&wrong).is_some());
    }

    /// Heads and whether there are documents, which is what a kernel is compiled for. Two fragments of rows a subgroup; scores that
    /// grow, so that results are rescaled; the least workgroup memory.
    const QUICK: [(usize, bool); 3] = [(16, false), (32, true), (96, false)];

    fn class(case: &Case) -> (usize, bool) {
        (case.4, case.6)
    }

    fn gpu() -> Gpu {
        let options = Options { poison: true, ..Options::default() };
        Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
    }

    /// The cases of the table that `fits` leaves, on `fragments` in emulation.
    fn emulated(fragments: Fragments, fits: impl Fn((usize, bool)) -> bool) {
        let (_emulation, gpu) = (Emulation::start(fragments), gpu());
        for case in TABLE.iter().filter(|case| fits(class(case))) {
            let outcome = Operands::new(*case).judge(&gpu).unwrap();
            assert_eq!((outcome.kernel.as_str(), outcome.error), ("coop", None), "{}", outcome.case);
        }
    }

    #[test]
    fn emulated_fragments_of_8_serve_heads_of_16() {
        emulated(OF_8, |class| class == QUICK[0]);
    }

    #[test]
    fn emulated_fragments_of_8_serve_heads_of_32() {
        emulated(OF_8, |class| class == QUICK[1]);
    }

    #[test]
    fn emulated_fragments_of_8_serve_heads_of_96() {
        emulated(OF_8, |class| class == QUICK[2]);
    }

    #[test]
    fn emulated_fragments_of_16_by_64_lanes_serve_heads_of_32() {
        emulated(OF_16_BY_64, |class| class == QUICK[1]);
    }

    #[test]
    fn emulated_fragments_of_16_by_64_lanes_serve_heads_of_96() {
        emulated(OF_16_BY_64, |class| class == QUICK[2]);
    }

    /// `cargo test --lib check::attention::tests::emulated -- --ignored`: a minute on one core for each kind of fragments.
    #[test]
    #[ignore = "a minute on a software adapter, nearly all of it compiling"]
    fn emulated_fragments_of_8_serve_all_heads() {
        emulated(OF_8, |class| !QUICK.contains(&class));
    }

    /// As above.
    #[test]
    #[ignore = "as above"]
    fn emulated_fragments_of_16_by_64_lanes_serve_all_heads() {
        emulated(OF_16_BY_64, |class| !QUICK[1..].contains(&class));
    }

    /// As above.
    #[test]
    #[ignore = "as above"]
    fn emulated_fragments_of_16_serve_all_heads() {
        emulated(OF_16, |_| true);
    }

    /// `cargo test --lib results_are_nan_in -- --ignored`: some seconds on one core. That of `check::gemm` is not ignored.
    #[test]
    #[ignore = "four more kernels to compile"]
    fn results_are_nan_in_subgroups_of_another_width() {
        let gpu = gpu();
        for case in TABLE.iter().filter(|case| class(case) == QUICK[1]) {
            let operands = Operands::new(*case);
            let (Tensors { q, k, v, d_out, docs }, shape) = (operands.tensors(&gpu).unwrap(), operands.shape);
            let forward = || op::forward(&gpu, &q, &k, &v, shape, docs.as_ref()).unwrap();
            // Backward has numbers to start from: a driver may choose a width for each kernel.
            let right = Emulation::start(OF_16_BY_64);
            let (out, lse) = forward();
            drop(right);
            let _emulation = Emulation::of_width(OF_16_BY_64, 32);
            let (d_q, d_k, d_v) =
                op::backward(&gpu, &d_out, &q, &k, &v, &out, &lse, shape, docs.as_ref()).unwrap();
            let (out, lse) = forward();
            for (name, result) in NAMES.iter().zip([out, lse, d_q, d_k, d_v]) {
                assert!(result.to_f32(&gpu).unwrap().iter().all(|v| v.is_nan()), "{name} of {case:?}");
            }
        }
    }
}

//! Attention.

use crate::{DTYPES, close, close_to, flat, gpus, largest, same_bits_everywhere, tensor, values};
use moe8::gpu::Gpu;
use moe8::num::DType;
use moe8::ops::attention::{self, Shape};
use moe8::reference::attention as reference;
use moe8::tensor::Tensor;

/// Batch, positions, heads, key heads, elements of a head, block, documents: one position, primes, one past a
/// workgroup, groups of 1 to 4 heads, blocks of 1, smaller and larger than the sequence, every way the inner loops are
/// written out.
type Case = (usize, usize, usize, usize, usize, Option<usize>, bool);
const CASES: [Case; 15] = [
    (1, 1, 1, 1, 4, None, false),
    (3, 2, 2, 1, 16, None, false),
    (2, 7, 4, 2, 20, Some(4), true),
    (2, 17, 4, 1, 16, Some(16), true),
    (1, 17, 2, 2, 16, Some(1), false),
    (1, 64, 3, 1, 16, None, false),
    (1, 65, 2, 2, 16, None, true),
    (2, 65, 4, 2, 4, Some(16), false),
    (1, 65, 2, 1, 64, None, true),
    (1, 64, 1, 1, 64, Some(100), true),
    (2, 17, 2, 1, 128, Some(4), true),
    (1, 65, 1, 1, 128, None, true),
    (1, 7, 3, 3, 44, None, false),
    // Threads with several positions each, the last of them past the end.
    (1, 259, 2, 1, 16, Some(100), true),
    (1, 131, 1, 1, 32, None, false),
];

/// The operands of one case, as values.
struct Operands {
    shape: Shape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_out: Vec<f32>,
    docs: Option<Vec<u32>>,
}

impl Operands {
    fn new((batch, seq, heads, kv_heads, head_dim, block, documents): Case, dtype: DType) -> Operands {
        let shape = Shape { batch, seq, heads, kv_heads, head_dim, block };
        let (many, few) = (batch * seq * heads * head_dim, batch * seq * kv_heads * head_dim);
        // Documents of 5 positions, cut differently in each sequence.
        let docs = documents.then(|| (0..batch * seq).map(|i| ((i % seq + i / seq) / 5) as u32).collect());
        Operands {
            shape,
            q: values("q", many, dtype),
            k: values("k", few, dtype),
            v: values("v", few, dtype),
            d_out: values("d_out", many, dtype),
            docs,
        }
    }

    /// out, lse (row by row), d_q, d_k, d_v by the reference.
    fn expected(&self) -> [Vec<f32>; 5] {
        let Shape { batch, seq, heads, kv_heads, head_dim, block } = self.shape;
        let shape = reference::Shape { batch, seq, heads, kv_heads, head_dim };
        let mask = reference::Mask { block, documents: self.docs.as_deref() };
        let forward = reference::forward(shape, mask, &self.q, &self.k, &self.v);
        let (d_q, d_k, d_v) = reference::backward(shape, mask, (&self.q, &self.k, &self.v), &self.d_out);
        let lse = (0..batch * seq * heads)
            .map(|i| forward.lse[(i / (seq * heads) * heads + i % heads) * seq + i / heads % seq])
            .collect();
        [forward.out, lse, d_q, d_k, d_v]
    }

    /// The same on the adapter.
    fn run(&self, gpu: &Gpu, dtype: DType) -> [Vec<f32>; 5] {
        let Shape { batch, seq, heads, kv_heads, head_dim, .. } = self.shape;
        let many = |v| tensor(gpu, &[batch * seq, heads * head_dim], dtype, v);
        let few = |v| tensor(gpu, &[batch * seq, kv_heads * head_dim], dtype, v);
        let (q, k, v, d_out) = (many(&self.q), few(&self.k), few(&self.v), many(&self.d_out));
        let docs = self.docs.as_ref().map(|d| Tensor::from_u32(gpu, "docs", d).unwrap());
        let docs = docs.as_ref();
        let (out, lse) = attention::forward(gpu, &q, &k, &v, self.shape, docs).unwrap();
        let (d_q, d_k, d_v) =
            attention::backward(gpu, &d_out, &q, &k, &v, &out, &lse, self.shape, docs).unwrap();
        [out, lse, d_q, d_k, d_v].map(|t| flat(gpu, &t))
    }
}

#[test]
fn attention_and_its_gradient() {
    for case in CASES {
        for dtype in DTYPES {
            let operands = Operands::new(case, dtype);
            let want = operands.expected();
            for (path, gpu) in gpus().iter().enumerate() {
                // GPUs' code is written out for the whole head, for which a software adapter's compiler takes minutes.
                if path == 1 && case.4 > 20 {
                    continue;
                }
                let got = operands.run(gpu, dtype);
                let names = ["out", "lse", "d_q", "d_k", "d_v"];
                for ((name, got), want) in names.iter().zip(&got).zip(&want) {
                    // In bf16 `out` is rounded before backward takes sum(d_out * out) of it.
                    let rounded = dtype == DType::BF16 && matches!(*name, "d_q" | "d_k");
                    let tolerance = if rounded { 1e-2 } else { 1e-5 };
                    let kind = if *name == "lse" { DType::F32 } else { dtype };
                    // Of a single key the gradients are differences that leave nothing: the terms are about 1.
                    let error = tolerance * largest(want).max(1.0);
                    close_to(&format!("{name} of {case:?}"), got, want, kind, error);
                }
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let mut operands = Operands::new((1, 33, 2, 1, 16, None, false), DType::F32);
    operands.q.iter_mut().for_each(|v| *v *= 40.0);
    let want = operands.expected();
    for gpu in gpus() {
        for ((got, want), tolerance) in operands.run(gpu, DType::F32).iter().zip(&want).zip([1e-4; 5]) {
            close("large scores", got, want, DType::F32, tolerance);
        }
    }
}

#[test]
fn bits_do_not_depend_on_memory_or_checks() {
    let operands = Operands::new((2, 19, 4, 2, 8, Some(8), true), DType::BF16);
    same_bits_everywhere(|gpu| operands.run(gpu, DType::BF16).to_vec());
}

#[test]
fn heads_that_the_kernels_lack_are_an_error() {
    let gpu = &gpus()[0];
    for head_dim in [6, 132] {
        let x = tensor(gpu, &[1, head_dim], DType::F32, &vec![0.0; head_dim]);
        let shape = Shape { batch: 1, seq: 1, heads: 1, kv_heads: 1, head_dim, block: None };
        let error = attention::forward(gpu, &x, &x, &x, shape, None).unwrap_err().to_string();
        assert!(error.contains(&format!("heads of {head_dim}")) && error.contains("n_heads"), "{error}");
    }
}

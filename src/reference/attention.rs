//! Causal attention with grouped key and value heads: `softmax(q k^T / sqrt(d)) v` over the keys that a query
//! may see.
//!
//! Definition: Vaswani et al., "Attention Is All You Need" (2017); grouped heads as in Ainslie et al., "GQA"
//! (2023): query head h reads key head `h / (H / G)`. Masks as in torchtitan's Llama4 with iRoPE.

use super::{Real, narrow, widen};

/// Sizes: q and out (B, S, H, d), k and v (B, S, G, d), H a multiple of G.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Positions of a sequence.
    pub seq: usize,
    /// Query heads H.
    pub heads: usize,
    /// Key and value heads G.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// Which earlier keys a query sees beside the causal rule (`key <= query`).
#[derive(Clone, Copy, Debug, Default)]
pub struct Mask<'a> {
    /// Only keys in the query's own block of this many positions.
    pub block: Option<usize>,
    /// Only keys with the query's document number: (B, S).
    pub documents: Option<&'a [u32]>,
}

impl Mask<'_> {
    /// Causal only.
    pub const CAUSAL: Mask<'static> = Mask { block: None, documents: None };

    /// Whether position `query` of sequence `batch` (of `seq` positions) sees position `key`.
    pub fn sees(&self, batch: usize, seq: usize, query: usize, key: usize) -> bool {
        key <= query
            && self.block.is_none_or(|size| query / size == key / size)
            && self.documents.is_none_or(|d| d[batch * seq + query] == d[batch * seq + key])
    }
}

/// The document number of every position: how many `eos` tokens stand before it in its sequence. tokens (B,
/// S).
pub fn document_ids(tokens: &[u32], seq: usize, eos: u32) -> Vec<u32> {
    let number = |sequence: &[u32]| {
        let ends = sequence.iter().map(|&t| (t == eos) as u32);
        ends.scan(0, |id, end| Some(std::mem::replace(id, *id + end))).collect::<Vec<_>>()
    };
    tokens.chunks(seq).flat_map(number).collect()
}

/// What the forward pass gives.
#[derive(Clone, Debug)]
pub struct Output<T> {
    /// (B, S, H, d).
    pub out: Vec<T>,
    /// The logarithm of the sum of exponentials of the scaled scores, (B, H, S).
    pub lse: Vec<T>,
}

/// q (B, S, H, d), k and v (B, S, G, d) -> out (B, S, H, d) and the softmax's logarithm.
pub fn forward<T: Real>(shape: Shape, mask: Mask, q: &[T], k: &[T], v: &[T]) -> Output<T> {
    shape.check(q.len(), k.len(), v.len(), q.len());
    let (q, k, v) = (widen(q), widen(k), widen(v));
    let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; shape.batch * shape.heads * shape.seq]);
    shape.each_query(|b, h, i| {
        let at = shape.query(b, i, h);
        let (p, log) = probabilities(shape, mask, &q, &k, (b, h, i));
        for (j, p) in p {
            let value = &v[shape.key(b, j, h)..][..shape.head_dim];
            out[at..][..shape.head_dim].iter_mut().zip(value).for_each(|(o, v)| *o += p * v);
        }
        lse[(b * shape.heads + h) * shape.seq + i] = log;
    });
    Output { out: narrow(&out), lse: narrow(&lse) }
}

/// d_out (B, S, H, d) -> d_q (B, S, H, d), d_k and d_v (B, S, G, d).
///
/// With probabilities p: `d_v_j += p_ij d_out_i`, `d_p_ij = d_out_i . v_j`, `d_s_ij = p_ij (d_p_ij - sum_j
/// p_ij d_p_ij)`.
pub fn backward<T: Real>(
    shape: Shape,
    mask: Mask,
    (q, k, v): (&[T], &[T], &[T]),
    d_out: &[T],
) -> (Vec<T>, Vec<T>, Vec<T>) {
    shape.check(q.len(), k.len(), v.len(), d_out.len());
    let (q, k, v, d_out) = (widen(q), widen(k), widen(v), widen(d_out));
    let (mut d_q, mut d_k, mut d_v) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let scale = 1.0 / (shape.head_dim as f64).sqrt();
    shape.each_query(|b, h, i| {
        let at = shape.query(b, i, h);
        let d_row = &d_out[at..][..shape.head_dim];
        let (p, _) = probabilities(shape, mask, &q, &k, (b, h, i));
        let d_p: Vec<f64> = p.iter().map(|&(j, _)| dot(d_row, &v[shape.key(b, j, h)..])).collect();
        let mean: f64 = p.iter().zip(&d_p).map(|((_, p), d_p)| p * d_p).sum();
        for (&(j, p), d_p) in p.iter().zip(&d_p) {
            let key = shape.key(b, j, h);
            let d_s = p * (d_p - mean) * scale;
            for c in 0..shape.head_dim {
                d_q[at + c] += d_s * k[key + c];
                d_k[key + c] += d_s * q[at + c];
                d_v[key + c] += p * d_row[c];
            }
        }
    });
    (narrow(&d_q), narrow(&d_k), narrow(&d_v))
}

/// The keys that query (b, h, i) sees with their probabilities, and the logarithm of the sum of exponentials.
fn probabilities(
    shape: Shape,
    mask: Mask,
    q: &[f64],
    k: &[f64],
    (b, h, i): (usize, usize, usize),
) -> (Vec<(usize, f64)>, f64) {
    let scale = 1.0 / (shape.head_dim as f64).sqrt();
    let query = &q[shape.query(b, i, h)..][..shape.head_dim];
    let seen = (0..=i).filter(|&j| mask.sees(b, shape.seq, i, j));
    let scores: Vec<(usize, f64)> = seen.map(|j| (j, dot(query, &k[shape.key(b, j, h)..]) * scale)).collect();
    let top = scores.iter().map(|s| s.1).fold(f64::NEG_INFINITY, f64::max);
    let lse = top + scores.iter().map(|s| (s.1 - top).exp()).sum::<f64>().ln();
    (scores.into_iter().map(|(j, s)| (j, (s - lse).exp())).collect(), lse)
}

/// The product of `a` and as many elements of `b`.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Shape {
    /// Where the vector of query head `h` at position `i` starts.
    fn query(&self, b: usize, i: usize, h: usize) -> usize {
        ((b * self.seq + i) * self.heads + h) * self.head_dim
    }

    /// Where the key (or value) vector that query head `h` reads at position `j` starts.
    fn key(&self, b: usize, j: usize, h: usize) -> usize {
        let kv_head = h / (self.heads / self.kv_heads);
        ((b * self.seq + j) * self.kv_heads + kv_head) * self.head_dim
    }

    fn each_query(&self, mut f: impl FnMut(usize, usize, usize)) {
        for b in 0..self.batch {
            for h in 0..self.heads {
                (0..self.seq).for_each(|i| f(b, h, i));
            }
        }
    }

    #[track_caller]
    fn check(&self, q: usize, k: usize, v: usize, out: usize) {
        assert!(
            self.heads.is_multiple_of(self.kv_heads),
            "{self:?}: query heads are no multiple of key heads"
        );
        let positions = self.batch * self.seq * self.head_dim;
        let want = [positions * self.heads, positions * self.kv_heads];
        assert_eq!(
            [q, k, v, out],
            [want[0], want[1], want[1], want[0]],
            "{self:?}: elements of q, k, v, out"
        );
    }
}

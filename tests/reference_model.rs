//! The oracles put together as torchtitan's Llama4 (July 2025), forward only, against upstream's loss, logits and routing.
//!
//! This judges the oracles themselves, each in the place where the model uses it; the GPU model has its own parity tests.

mod common;

use common::fixture_bytes;
use moe8::num::formula;
use moe8::reference::attention::{self, Mask};
use moe8::reference::dispatch::{self, Width};
use moe8::reference::elementwise::add;
use moe8::reference::gemm::{self, Scales};
use moe8::reference::router::{self, ScoreFunc};
use moe8::reference::{cross_entropy, embedding, rmsnorm, rope, swiglu};
use serde_json::Value;

/// A parity case and the sizes of its model.
struct Case {
    json: Value,
    shape: attention::Shape,
    dim: usize,
}

impl Case {
    fn read(tag: &str) -> Self {
        let json: Value = serde_json::from_slice(&fixture_bytes(&format!("{tag}.json"))).unwrap();
        let arg = |name: &str| json["args"][name].as_u64().unwrap() as usize;
        let (dim, heads) = (arg("dim"), arg("n_heads"));
        let shape = attention::Shape {
            batch: json["batch"].as_u64().unwrap() as usize,
            seq: json["seq"].as_u64().unwrap() as usize,
            heads,
            kv_heads: arg("n_kv_heads"),
            head_dim: dim / heads,
        };
        Case { json, shape, dim }
    }

    fn arg(&self, name: &str) -> usize {
        self.json["args"][name].as_u64().unwrap_or_else(|| panic!("{name}")) as usize
    }

    /// The shape of a parameter.
    fn dims(&self, name: &str) -> Vec<usize> {
        let dims = self.json["params"][name].as_array().unwrap_or_else(|| panic!("no parameter {name}"));
        dims.iter().map(|d| d.as_u64().unwrap() as usize).collect()
    }

    /// A parameter, regenerated from its name.
    fn weight(&self, name: &str) -> Vec<f64> {
        let count = self.dims(name).iter().product();
        match formula::parity_std(name) {
            Some(std) => formula::weights(name, count, std).iter().map(|&w| w as f64).collect(),
            None => vec![1.0; count],
        }
    }

    /// x times a weight (out, in), transposed.
    fn linear(&self, x: &[f64], name: &str) -> Vec<f64> {
        let (dims, w) = (self.dims(name), self.weight(name));
        gemm::nt(x, &w, &[(x.len() / dims[1]) as u32], dims[0], dims[1], Scales::NONE)
    }

    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        rmsnorm::forward(x, &self.weight(name), self.json["args"]["norm_eps"].as_f64().unwrap())
    }

    fn attention(&self, x: &[f64], layer: usize) -> Vec<f64> {
        let at = |part: &str| format!("layers.{layer}.attention.{part}.weight");
        let (mut q, mut k) = (self.linear(x, &at("wq")), self.linear(x, &at("wk")));
        let mut mask = Mask::CAUSAL;
        let nope = self.json["args"]["every_n_layers_nope"].as_u64();
        if nope.is_none_or(|n| !(layer as u64).is_multiple_of(n)) {
            let s = self.shape;
            let table = rope::table(s.seq, s.head_dim, self.arg("rope_theta") as f64);
            q = rope::forward(&q, &table, s.heads, s.head_dim);
            k = rope::forward(&k, &table, s.kv_heads, s.head_dim);
            mask.block = nope.map(|_| self.arg("fixed_attn_block_size"));
        }
        let out = attention::forward(self.shape, mask, &q, &k, &self.linear(x, &at("wv"))).out;
        self.linear(&out, &at("wo"))
    }

    fn feed_forward(&self, x: &[f64], layer: usize) -> Vec<f64> {
        let at = |part: &str| format!("layers.{layer}.feed_forward.{part}.weight");
        let gate = swiglu::forward(&self.linear(x, &at("w1")), &self.linear(x, &at("w3")));
        self.linear(&gate, &at("w2"))
    }

    /// Experts whose weights are (E, in, out), July's layout.
    fn experts(&self, x: &[f64], at: &str, ends: &[u32]) -> Vec<f64> {
        let product = |x: &[f64], part: &str| {
            let name = format!("{at}.{part}");
            let dims = self.dims(&name);
            gemm::nn(x, &self.weight(&name), ends, dims[1], dims[2], Scales::NONE)
        };
        product(&swiglu::forward(&product(x, "w1"), &product(x, "w3")), "w2")
    }

    /// The MoE layer with scores before the experts; also its tokens per expert.
    fn moe(&self, x: &[f64], layer: usize) -> (Vec<f64>, Vec<u32>) {
        let at = format!("layers.{layer}.moe");
        let options = router::Options {
            experts: self.arg("num_experts"),
            top_k: self.arg("top_k"),
            score_func: ScoreFunc::Softmax,
            route_norm: false,
            route_scale: 1.0,
        };
        let logits = self.linear(x, &format!("{at}.router.gate.weight"));
        let routing = router::forward(options, &logits, &vec![0.0; options.experts]);
        let plan = dispatch::plan(&routing.chosen, options.experts);
        let width = Width { top_k: options.top_k, dim: self.dim };
        let routed = dispatch::gather(&plan, width, x, Some(&routing.weights));
        let routed = self.experts(&routed, &format!("{at}.experts"), &plan.ends);
        let tokens = (x.len() / self.dim) as u32;
        let shared = self.experts(x, &format!("{at}.shared_expert"), &[tokens]);
        (add(&shared, &dispatch::combine(&plan, width, &routed, None)), plan.counts)
    }

    /// Logits (T, V) and the tokens per expert of each MoE layer.
    fn forward(&self, tokens: &[u32]) -> (Vec<f64>, Vec<(usize, Vec<u32>)>) {
        let mut x = embedding::forward(&self.weight("tok_embeddings.weight"), tokens, self.dim);
        let mut counts = Vec::new();
        for layer in 0..self.arg("n_layers") {
            let normed = self.norm(&x, &format!("layers.{layer}.attention_norm.weight"));
            x = add(&x, &self.attention(&normed, layer));
            let normed = self.norm(&x, &format!("layers.{layer}.ffn_norm.weight"));
            let out = if (layer + 1).is_multiple_of(self.arg("interleave_moe_layer_step")) {
                let (out, count) = self.moe(&normed, layer);
                counts.push((layer, count));
                out
            } else {
                self.feed_forward(&normed, layer)
            };
            x = add(&x, &out);
        }
        (self.linear(&self.norm(&x, "norm.weight"), "output.weight"), counts)
    }
}

#[test]
fn first_step_of_the_tiny_cases() {
    for tag in ["tiny_top1", "tiny_top2", "tiny_irope"] {
        let case = Case::read(tag);
        let vocabulary = case.json["vocab"].as_u64().unwrap() as usize;
        let (tokens, labels) = formula::tokens(tag, 1, case.shape.batch, case.shape.seq, vocabulary as u32);
        let (logits, counts) = case.forward(&tokens);
        for sample in case.json["logit_samples"].as_array().unwrap() {
            let at = |i: usize| sample[i].as_u64().unwrap() as usize;
            let got = logits[(at(0) * case.shape.seq + at(1)) * vocabulary + at(2)];
            let want = sample[3].as_f64().unwrap();
            assert!((got - want).abs() < 1e-5, "{tag} logit {sample}: {got}");
        }
        let step = &case.json["steps"][0];
        let loss = cross_entropy::mean(&cross_entropy::forward(&logits, &labels, vocabulary));
        let want = step["loss"].as_f64().unwrap();
        assert!((loss - want).abs() < 1e-6 * want, "{tag} loss {loss}, upstream {want}");
        assert!(!counts.is_empty());
        for (layer, count) in counts {
            assert_eq!(
                serde_json::json!(count),
                step["tokens_per_expert"][format!("layers.{layer}")],
                "{tag}"
            );
        }
    }
}

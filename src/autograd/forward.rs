//! The forward side of each rule: compute, then record.

use super::rules::Rule;
use super::{Tape, Var};
use crate::Result;
use crate::ops::fp8_linear::{Operand, Recipe};
use crate::ops::quantize::{self, Ready, Wish};
use crate::ops::rmsnorm::Norm;
use crate::ops::{attention, dispatch, elementwise, embedding, fp8_linear, rmsnorm, rope, router, swiglu};
use crate::params::ParamId;
use crate::tensor::Tensor;
use std::rc::Rc;

/// The linears that will read what an op makes. It then leaves what they would make of it, where that is cheaper.
#[derive(Clone, Copy, Debug, Default)]
pub struct Readers<'a> {
    /// Weights and recipes: all that stand in one call of [`Tape::linears`].
    pub linears: &'a [(ParamId, Recipe)],
    /// Their group ends.
    pub offs: Option<&'a Tensor>,
}

impl Tape<'_> {
    /// Rows of `table` (V, D) by token: (T, D).
    ///
    /// # Errors
    /// The device, its memory, or other ranks; so for all ops here.
    pub fn embedding(&mut self, tokens: &Tensor, table: ParamId) -> Result<Var> {
        let w = self.weights.weight(table)?;
        let y = embedding::forward(self.gpu, tokens, &w)?;
        let vocab = w.shape()[0];
        self.push(Rule::Embedding { tokens: tokens.clone(), table, vocab }, &[], y)
    }

    /// Root-mean-square norm over D, for `readers`.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn rmsnorm(&mut self, x: &Var, weight: ParamId, eps: f32, readers: Readers<'_>) -> Result<Var> {
        let wish = self.wish(x.value.rows(), &x.value, readers)?;
        let norm = Norm { x: &x.value, weight: &self.weights.weight(weight)?, sum: None, eps };
        let (y, rstd, ready) = rmsnorm::forward_for(self.gpu, norm, wish)?;
        self.push_ready(Rule::RmsNorm { x: x.value.clone(), rstd, weight }, &[x], (y, ready), readers)
    }

    /// `a + b`, and its norm as [`Tape::rmsnorm`], in one pass.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn add_rmsnorm(
        &mut self,
        a: &Var,
        b: &Var,
        weight: ParamId,
        eps: f32,
        readers: Readers<'_>,
    ) -> Result<(Var, Var)> {
        let wish = self.wish(a.value.rows(), &a.value, readers)?;
        let (terms, w) = ([&a.value, &b.value], self.weights.weight(weight)?);
        let (sum, (y, rstd, ready)) = rmsnorm::forward_of_sum_for(self.gpu, terms, &w, eps, wish)?;
        let sum = self.push(Rule::Add, &[a, b], sum)?;
        let rule = Rule::RmsNorm { x: sum.value.clone(), rstd, weight };
        let y = self.push_ready(rule, &[&sum], (y, ready), readers)?;
        Ok((sum, y))
    }

    /// `x W^T`; rows in groups with one weight each if `offs`.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn linear(&mut self, x: &Var, weight: ParamId, offs: Option<&Tensor>, recipe: Recipe) -> Result<Var> {
        let [y] = self.linears(x, [(weight, recipe)], offs)?;
        Ok(y)
    }

    /// [`Tape::linear`] with several weights on one input, which is quantized once per pass. What forward makes of the
    /// input is dropped; backward makes its own, when the first of the linears asks, and drops it after the last.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn linears<const N: usize>(
        &mut self,
        x: &Var,
        linears: [(ParamId, Recipe); N],
        offs: Option<&Tensor>,
    ) -> Result<[Var; N]> {
        let theirs = |(first, _): &mut (ParamId, Ready)| linears.first().is_some_and(|(w, _)| w == first);
        let ready = x.ready.borrow_mut().take_if(theirs).map(|(_, ready)| ready);
        let Ready { rows, tops } = match ready {
            Some(ready) => ready,
            None if self.recording => self.ready(&x.value, Readers { linears: &linears, offs })?,
            None => Ready::default(),
        };
        let forward = Operand::with(&x.value, offs, Ready { rows, tops: None });
        let backward = Rc::new(Operand::with(&x.value, offs, Ready { rows: None, tops }));
        let mut outputs = Vec::with_capacity(N);
        let weights = linears.iter().map(|(id, _)| self.weights.weight(*id)).collect::<Result<Vec<_>>>()?;
        let mut from = 0;
        while from < N {
            let (ids, recipe, w) = self.run(&linears[from..], &weights[from..], &forward);
            from += ids.len();
            let values = match ids.len() {
                1 => vec![fp8_linear::forward_with(self.gpu, &forward, &w, recipe)?],
                n => {
                    let y = fp8_linear::forward_stacked(self.gpu, &forward, &w, recipe)?;
                    (0..n).map(|p| y.unstack(p)).collect()
                }
            };
            let rule = Rule::Linears { input: backward.clone(), weights: ids, recipe };
            outputs.extend(self.push_all(rule, &[x], values)?);
        }
        Ok(outputs.try_into().expect("one output per weight"))
    }

    /// The first of `linears`, and those after it that can be computed with it as one stack: their weights, recipe, and (stacked) weight.
    fn run(
        &self,
        linears: &[(ParamId, Recipe)],
        weights: &[Tensor],
        input: &Operand,
    ) -> (Vec<ParamId>, Recipe, Tensor) {
        let recipe = linears[0].1;
        let same = linears.iter().take_while(|(_, other)| *other == recipe).count();
        let stack = |n: usize| {
            let w = Tensor::stacked(&weights[..n].iter().collect::<Vec<_>>())?;
            fp8_linear::can_stack(self.gpu, input, &w, recipe).then_some((n, w))
        };
        let (n, w) = (2..=same).rev().find_map(stack).unwrap_or_else(|| (1, weights[0].clone()));
        (linears[..n].iter().map(|(id, _)| *id).collect(), recipe, w)
    }

    /// Causal attention of q (T, heads * head_dim), k and v; with `rope`, a [table](rope::table), q and k are turned by their position.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn attention(
        &mut self,
        (q, k, v): (&Var, &Var, &Var),
        shape: attention::Shape,
        docs: Option<&Tensor>,
        rope: Option<&Tensor>,
    ) -> Result<Var> {
        let mut turned = [q.value.clone(), k.value.clone()];
        if let Some(table) = rope {
            turned = rope::forward_pair(self.gpu, turned.each_ref(), table, shape.seq, shape.head_dim)?;
        }
        let kept = attention::forward_kept(self.gpu, [&turned[0], &turned[1], &v.value], shape, docs)?;
        let out = kept.out.clone();
        let rule = Rule::Attention { kept: Box::new(kept), shape, docs: docs.cloned(), rope: rope.cloned() };
        self.push(rule, &[q, k, v], out)
    }

    /// What `readers` will read of an input like `x` in `rows` rows, for the op that makes it.
    fn wish<'a>(&self, rows: usize, x: &Tensor, readers: Readers<'a>) -> Result<Option<Wish<'a>>> {
        let sizes = |&(weight, recipe): &(ParamId, Recipe)| {
            let shape = self.weights.weight(weight)?.shape().to_vec();
            Ok((shape[shape.len() - 2], recipe))
        };
        let readers_of = readers.linears.iter().map(sizes).collect::<Result<Vec<_>>>()?;
        Ok(fp8_linear::wish_of_input(self.gpu, (rows, x), &readers_of, readers.offs, self.recording))
    }

    /// What `readers` read of `x` along its rows, with what they will read in backward, where that saves a reading.
    fn ready(&self, x: &Tensor, readers: Readers<'_>) -> Result<Ready> {
        match self.wish(x.rows(), x, readers)? {
            Some(wish) => quantize::ready(self.gpu, x, wish),
            None => Ok(Ready::default()),
        }
    }

    /// [`Tape::push`] of a value whose maker has left a part of its quantization for `readers`.
    fn push_ready(
        &mut self,
        rule: Rule,
        inputs: &[&Var],
        (value, ready): (Tensor, Ready),
        readers: Readers<'_>,
    ) -> Result<Var> {
        let var = self.push(rule, inputs, value)?;
        var.ready.replace(readers.linears.first().map(|(weight, _)| (*weight, ready)));
        Ok(var)
    }

    /// `silu(gate) * up`, for `readers`.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn swiglu(&mut self, gate: &Var, up: &Var, readers: Readers<'_>) -> Result<Var> {
        let wish = self.wish(gate.value.rows(), &gate.value, readers)?;
        let made = swiglu::forward_for(self.gpu, &gate.value, &up.value, wish)?;
        let rule = Rule::SwiGlu { gate: gate.value.clone(), up: up.value.clone() };
        self.push_ready(rule, &[gate, up], made, readers)
    }

    /// `a + b`.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn add(&mut self, a: &Var, b: &Var) -> Result<Var> {
        let y = elementwise::add(self.gpu, &a.value, &b.value)?;
        self.push(Rule::Add, &[a, b], y)
    }

    /// Selects experts: the weights as a variable, and the selected ids.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn router(&mut self, logits: &Var, bias: &Tensor, spec: router::Spec) -> Result<(Var, Tensor)> {
        let routing = router::forward(self.gpu, &logits.value, bias, spec)?;
        let (ids, weights) = (routing.ids.clone(), routing.weights.clone());
        let dtype = logits.value.dtype();
        Ok((self.push(Rule::Router { routing, spec, dtype }, &[logits], weights)?, ids))
    }

    /// Where each token's rows go.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn plan(&self, ids: &Tensor, experts: usize, top_k: usize) -> Result<dispatch::Plan> {
        dispatch::plan(self.gpu, ids, experts, top_k)
    }

    /// Rows of `x` in expert order, times their weights if given, for `readers`.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn gather(
        &mut self,
        x: &Var,
        plan: &dispatch::Plan,
        weights: Option<&Var>,
        readers: Readers<'_>,
    ) -> Result<Var> {
        let scores = weights.map(|w| w.value.clone());
        let wish = self.wish(plan.order.numel(), &x.value, readers)?;
        let made = dispatch::gather_for(self.gpu, &x.value, plan, scores.as_ref(), wish)?;
        let rule = Rule::Gather { x: x.value.clone(), plan: plan.clone(), weights: scores };
        let inputs: Vec<&Var> = std::iter::once(x).chain(weights).collect();
        self.push_ready(rule, &inputs, made, readers)
    }

    /// Each token's rows, times their weights if given, summed and added to `base`.
    ///
    /// # Errors
    /// As [`Tape::embedding`].
    pub fn combine(
        &mut self,
        rows: &Var,
        plan: &dispatch::Plan,
        weights: Option<&Var>,
        base: Option<&Var>,
    ) -> Result<Var> {
        let scores = weights.map(|w| w.value.clone());
        let y = dispatch::combine(self.gpu, &rows.value, plan, scores.as_ref(), base.map(|b| &b.value))?;
        let base_given = base.is_some();
        let rule =
            Rule::Combine { rows: rows.value.clone(), plan: plan.clone(), weights: scores, base: base_given };
        let inputs: Vec<&Var> = std::iter::once(rows).chain(weights).chain(base).collect();
        self.push(rule, &inputs, y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{DeviceChoice, Gpu, Options};
    use crate::num::DType;
    use crate::params::Weights;

    /// Weights of these shapes, by number.
    struct Shapes<'a>(&'a Gpu, &'a [&'a [usize]]);

    impl Weights for Shapes<'_> {
        fn weight(&self, id: ParamId) -> Result<Tensor> {
            Tensor::empty(self.0, "weight", self.1[id.0], DType::BF16)
        }

        fn gradient(&self, _: ParamId, _: Tensor) -> Result<()> {
            Ok(())
        }

        fn leave(&self, _: usize) -> Result<()> {
            Ok(())
        }
    }

    /// As in an MoE layer, whose router reads the norm before the shared expert does.
    #[test]
    fn what_a_norm_leaves_waits_for_the_linears_that_it_is_for() {
        let options = Options { treat_as_hardware: true, ..Options::default() };
        let gpu = Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter").planner();
        let weights = Shapes(&gpu, &[&[64], &[5, 64], &[72, 64], &[72, 64]]);
        let mut tape = Tape::new(&gpu, &weights);
        let x = tape.leaf(Tensor::empty(&gpu, "x", &[70, 64], DType::BF16).unwrap());
        let linears = [2, 3].map(|i| (ParamId(i), Recipe::Rowwise));
        let y = tape.rmsnorm(&x, ParamId(0), 1e-5, Readers { linears: &linears, offs: None }).unwrap();
        let quantized = || gpu.launches().get("quantize_rows.rows").copied().unwrap_or(0);
        tape.linear(&y, ParamId(1), None, Recipe::Rowwise).unwrap();
        assert_eq!(quantized(), 2, "the router's weight, and its input for itself");
        tape.linears(&y, linears, None).unwrap();
        assert_eq!(quantized(), 4, "two weights, and no input");
        assert!(y.ready.borrow().is_none());
    }

    /// q, k and v on matrix units: one product forward, one for the weights' gradients, and one that adds up the input's.
    #[test]
    fn linears_whose_weights_lie_together_share_launches() {
        let opened = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        let coop = Some(crate::gpu::MatrixUnits::Coop16);
        let caps = crate::gpu::Caps { software: false, subgroup_max: 32, coop, ..opened.caps() };
        let gpu = opened.planner_with(caps);
        struct Side<'a>(&'a Gpu, Tensor, bool);
        impl Weights for Side<'_> {
            fn weight(&self, id: ParamId) -> Result<Tensor> {
                let apart = || Tensor::empty(self.0, "weight", &self.1.shape()[1..], DType::BF16);
                if self.2 { Ok(self.1.unstack(id.0)) } else { apart() }
            }

            fn gradient(&self, _: ParamId, _: Tensor) -> Result<()> {
                Ok(())
            }

            fn leave(&self, _: usize) -> Result<()> {
                Ok(())
            }
        }
        let [apart, together] = [false, true].map(|together| {
            let w = Tensor::empty(&gpu, "weights", &[3, 256, 256], DType::BF16).unwrap();
            let weights = Side(&gpu, w, together);
            let mut tape = Tape::new(&gpu, &weights);
            let x = tape.leaf(Tensor::empty(&gpu, "x", &[1024, 256], DType::BF16).unwrap());
            let products = || gpu.launches().get("gemm_coop.main").copied().unwrap_or(0);
            let before = products();
            let [q, k, v] = tape.linears(&x, [0, 1, 2].map(|i| (ParamId(i), Recipe::Rowwise)), None).unwrap();
            let forward = products() - before;
            let shape =
                attention::Shape { batch: 1, seq: 1024, heads: 16, kv_heads: 16, head_dim: 16, block: None };
            let out = tape.attention((&q, &k, &v), shape, None, None).unwrap();
            let seed = Tensor::empty(&gpu, "seed", &[1024, 256], DType::BF16).unwrap();
            tape.backward(&out, Some(seed), &[]).unwrap();
            [forward, products() - before - forward]
        });
        assert_eq!((apart, together), ([3, 6], [1, 2]), "products forward and backward");
    }
}

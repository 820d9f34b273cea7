//! The table of rules: what each op keeps, and how its output's gradient becomes its inputs'.

use crate::Result;
use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::fp8_linear::{InputGradient, Operand, Recipe};
use crate::ops::quantize::{Ready, Wish};
use crate::ops::{attention, dispatch, elementwise, embedding, fp8_linear, rmsnorm, rope, router, swiglu};
use crate::params::{ParamId, Weights};
use crate::tensor::Tensor;
use std::rc::Rc;

/// One op with what its rule needs.
pub(super) enum Rule {
    /// The forward pass entered a block here.
    Enter { block: usize },
    /// tokens -> rows of a table.
    Embedding { tokens: Tensor, table: ParamId, vocab: usize },
    /// x -> x / rms(x) * weight.
    RmsNorm { x: Tensor, rstd: Tensor, weight: ParamId },
    /// x -> x W^T of each weight, grouped if x has group ends; linears of one input share it with what their backward makes of it.
    Linears { input: Rc<Operand>, weights: Vec<ParamId>, recipe: Recipe },
    /// q, k, v -> softmax(q k^T) v, q and k turned by position first if there is a table.
    Attention {
        kept: Box<attention::Kept>,
        shape: attention::Shape,
        docs: Option<Tensor>,
        rope: Option<Tensor>,
    },
    /// gate, up -> silu(gate) * up.
    SwiGlu { gate: Tensor, up: Tensor },
    /// a, b -> a + b.
    Add,
    /// logits -> weights of the selected experts.
    Router { routing: router::Routing, spec: router::Spec, dtype: DType },
    /// x, weights? -> rows in expert order.
    Gather { x: Tensor, plan: dispatch::Plan, weights: Option<Tensor> },
    /// rows, weights?, base? -> rows summed per token.
    Combine { rows: Tensor, plan: dispatch::Plan, weights: Option<Tensor>, base: bool },
    /// h -> loss; both gradients were computed with the loss.
    Head { d_h: Tensor, d_w: Tensor, weight: ParamId },
}

/// A gradient, and what its maker has left of its quantization.
#[derive(Clone)]
pub(super) struct Flow {
    pub value: Tensor,
    pub ready: Ready,
}

impl From<Tensor> for Flow {
    fn from(value: Tensor) -> Flow {
        Flow { value, ready: Ready::default() }
    }
}

impl Rule {
    /// The op's name, for messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Rule::Enter { .. } => "enter",
            Rule::Embedding { .. } => "embedding",
            Rule::RmsNorm { .. } => "rmsnorm",
            Rule::Linears { input, .. } if input.is_grouped() => "grouped linear",
            Rule::Linears { .. } => "linear",
            Rule::Attention { .. } => "attention",
            Rule::SwiGlu { .. } => "swiglu",
            Rule::Add => "add",
            Rule::Router { .. } => "router",
            Rule::Gather { .. } => "gather",
            Rule::Combine { .. } => "combine",
            Rule::Head { .. } => "cross entropy",
        }
    }

    /// Whether the rule adds the first input's gradient to what has come so far from other rules, in its own pass.
    pub(super) fn adds(&self) -> bool {
        matches!(self, Rule::RmsNorm { .. } | Rule::Linears { .. } | Rule::Gather { .. })
    }

    /// The number of the input whose gradient the rule can quantize as it makes it.
    pub(super) fn quantizes(&self) -> Option<usize> {
        matches!(self, Rule::Combine { .. }).then_some(0)
    }

    /// What the rule will read of its output's gradient, `width` wide, if it is a linear.
    fn wish(&self, gpu: &Gpu, width: usize) -> Option<Wish<'_>> {
        match self {
            Rule::Linears { input, weights, recipe } if weights.len() == 1 => {
                input.wish_of_gradient(gpu, width, *recipe)
            }
            _ => None,
        }
    }

    /// Gradients of the inputs, in their order, from those of the outputs that have one; `None` for an input that has none. `so_far`
    /// is for rules that add, `reader` is the rule that will read the gradient of the input that this one [quantizes](Rule::quantizes).
    pub(super) fn backward(
        self,
        gpu: &Gpu,
        weights: &dyn Weights,
        grads: Vec<Option<Flow>>,
        so_far: Option<Tensor>,
        reader: Option<&Rule>,
    ) -> Result<Vec<Option<Flow>>> {
        match self {
            Rule::Enter { .. } => unreachable!("the tape leaves blocks by itself"),
            Rule::Head { d_h, d_w, weight } => {
                weights.gradient(weight, d_w)?;
                Ok(flows([d_h]))
            }
            Rule::Linears { input, weights: ids, recipe } => {
                let d_x = linears(gpu, weights, grads, (&input, &ids, recipe), so_far)?;
                Ok(vec![d_x.map(Flow::from)])
            }
            Rule::Embedding { tokens, table, vocab } => {
                lookup(gpu, weights, &only(grads), (&tokens, table, vocab)).map(|()| vec![])
            }
            Rule::RmsNorm { x, rstd, weight } => {
                norm(gpu, weights, &only(grads), (&x, &rstd, weight), so_far.as_ref()).map(|d_x| flows([d_x]))
            }
            Rule::Attention { kept, shape, docs, rope } => {
                attention(gpu, &only(grads), &kept, shape, docs.as_ref(), rope.as_ref()).map(flows)
            }
            Rule::SwiGlu { gate, up } => {
                let (d_gate, d_up) = swiglu::backward(gpu, &only(grads), &gate, &up)?;
                Ok(flows([d_gate, d_up]))
            }
            Rule::Add => {
                let g = only(grads);
                Ok(flows([g.clone(), g]))
            }
            Rule::Router { routing, spec, dtype } => {
                router::backward(gpu, &only(grads), &routing, spec, dtype).map(|d| flows([d]))
            }
            Rule::Gather { x, plan, weights: scores } => {
                gather(gpu, &only(grads), (&x, &plan, scores.as_ref()), so_far.as_ref())
            }
            Rule::Combine { rows, plan, weights: scores, base } => {
                let wish = reader.and_then(|rule| rule.wish(gpu, rows.cols()));
                combine(gpu, only(grads), (&rows, &plan, scores.as_ref()), base, wish)
            }
        }
    }
}

/// The gradient of a rule's one output.
fn only(mut grads: Vec<Option<Flow>>) -> Tensor {
    grads.remove(0).expect("only the loss starts without a gradient").value
}

/// Gradients of all inputs, of which nothing is quantized.
fn flows<const N: usize>(gradients: [Tensor; N]) -> Vec<Option<Flow>> {
    gradients.map(|g| Some(Flow::from(g))).into()
}

/// The gradient of the rows that tokens took from a table goes to the table.
fn lookup(
    gpu: &Gpu,
    weights: &dyn Weights,
    g: &Tensor,
    (tokens, table, vocab): (&Tensor, ParamId, usize),
) -> Result<()> {
    let d_table = home(gpu, weights, table, &[vocab, g.cols()], g.dtype())?;
    embedding::backward_into(gpu, tokens, g, &d_table)?;
    weights.gradient(table, d_table)
}

/// The gradient of a norm's input, added to what came so far; that of its weight goes to `weights`.
fn norm(
    gpu: &Gpu,
    weights: &dyn Weights,
    g: &Tensor,
    (x, rstd, weight): (&Tensor, &Tensor, ParamId),
    so_far: Option<&Tensor>,
) -> Result<Tensor> {
    let w = weights.weight(weight)?;
    let d_w = home(gpu, weights, weight, w.shape(), w.dtype())?;
    let d_x = rmsnorm::backward_into(gpu, g, x, &w, rstd, so_far, &d_w)?;
    weights.gradient(weight, d_w)?;
    Ok(d_x)
}

/// Gradients of the rows that were gathered, added to what came so far, and of the routing weights, if there are any.
fn gather(
    gpu: &Gpu,
    g: &Tensor,
    (x, plan, scores): (&Tensor, &dispatch::Plan, Option<&Tensor>),
    so_far: Option<&Tensor>,
) -> Result<Vec<Option<Flow>>> {
    let (d_x, d_scores) = dispatch::gather_backward(gpu, g, x, plan, scores, so_far)?;
    let mut flows = flows([d_x]);
    flows.extend(scores.map(|_| d_scores.map(Flow::from)));
    Ok(flows)
}

/// Gradients of the rows that were summed, quantized as their reader wishes, of the routing weights, and of what they were added to.
fn combine(
    gpu: &Gpu,
    g: Tensor,
    (rows, plan, scores): (&Tensor, &dispatch::Plan, Option<&Tensor>),
    base: bool,
    wish: Option<Wish<'_>>,
) -> Result<Vec<Option<Flow>>> {
    let (value, ready, d_scores) = dispatch::combine_backward_for(gpu, &g, rows, plan, scores, wish)?;
    let mut flows = vec![Some(Flow { value, ready })];
    flows.extend(scores.map(|_| d_scores.map(Flow::from)));
    flows.extend(base.then(|| Some(g.into())));
    Ok(flows)
}

/// Where the gradient of a parameter is written: its home, or a new tensor.
fn home(gpu: &Gpu, weights: &dyn Weights, id: ParamId, shape: &[usize], dtype: DType) -> Result<Tensor> {
    match weights.gradient_home(&[id])? {
        Some(home) => {
            assert_eq!((home.shape(), home.dtype()), (shape, dtype), "home of a gradient");
            Ok(home)
        }
        None => Tensor::empty(gpu, "gradient of a parameter", shape, dtype),
    }
}

/// Gradients of q, k and v: one stack where they have one shape, else of k and v, as linears behind them take them best.
fn attention(
    gpu: &Gpu,
    d_out: &Tensor,
    kept: &attention::Kept,
    shape: attention::Shape,
    docs: Option<&Tensor>,
    rope: Option<&Tensor>,
) -> Result<[Tensor; 3]> {
    let (rows, dtype) = (d_out.rows(), d_out.dtype());
    let [of_q, of_k] = [shape.heads, shape.kv_heads].map(|heads| [rows, heads * shape.head_dim]);
    let (d_q, [d_k, d_v]) = if of_q == of_k {
        let [d_q, d_k, d_v] = Tensor::empty_stack(gpu, "attention d_q, d_k, d_v", &of_q, dtype)?;
        (d_q, [d_k, d_v])
    } else {
        let d_q = Tensor::empty(gpu, "attention d_q", &of_q, dtype)?;
        (d_q, Tensor::empty_stack(gpu, "attention d_k, d_v", &of_k, dtype)?)
    };
    let Some(table) = rope else {
        attention::backward_kept(gpu, d_out, kept, [&d_q, &d_k, &d_v], shape, docs)?;
        return Ok([d_q, d_k, d_v]);
    };
    let [turned_q, turned_k] = rope::empty_pair(gpu, [&d_q, &d_k])?;
    attention::backward_kept(gpu, d_out, kept, [&turned_q, &turned_k, &d_v], shape, docs)?;
    rope::backward_pair_into(gpu, [&turned_q, &turned_k], [&d_q, &d_k], table, shape.seq, shape.head_dim)?;
    Ok([d_q, d_k, d_v])
}

/// The gradient of the input of linears; those of their weights go to `weights`. Gradients that came as one stack go on as one.
fn linears(
    gpu: &Gpu,
    weights: &dyn Weights,
    grads: Vec<Option<Flow>>,
    (input, ids, recipe): (&Operand, &[ParamId], Recipe),
    so_far: Option<Tensor>,
) -> Result<Option<Tensor>> {
    if let Some((d_out, w)) = stacks(weights, ids, &grads)? {
        let home = weights.gradient_home(ids)?;
        let (d_x, d_w) = onto(gpu, so_far, |d_x| {
            fp8_linear::backward_stacked(gpu, &d_out, input, &w, recipe, d_x, home.as_ref())
        })?;
        for (p, id) in ids.iter().enumerate() {
            weights.gradient(*id, d_w.unstack(p))?;
        }
        return Ok(d_x);
    }
    let mut sum = so_far;
    // The last first, as if each were a rule of its own.
    for (id, flow) in ids.iter().zip(grads).rev() {
        let Some(Flow { value, ready }) = flow else { continue };
        let (w, home) = (weights.weight(*id)?, weights.gradient_home(&[*id])?);
        let (d_x, d_w) = onto(gpu, sum, |d_x| {
            fp8_linear::backward_of(gpu, (&value, ready), input, &w, recipe, d_x, home.as_ref())
        })?;
        weights.gradient(*id, d_w)?;
        sum = d_x;
    }
    Ok(sum)
}

/// The gradients of the outputs of linears, and their weights, if they are several and both are stacks.
fn stacks(
    weights: &dyn Weights,
    ids: &[ParamId],
    grads: &[Option<Flow>],
) -> Result<Option<(Tensor, Tensor)>> {
    let arrived: Vec<&Tensor> = grads.iter().flatten().map(|flow| &flow.value).collect();
    if ids.len() < 2 || arrived.len() < ids.len() {
        return Ok(None);
    }
    let w = ids.iter().map(|id| weights.weight(*id)).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::stacked(&arrived).zip(Tensor::stacked(&w.iter().collect::<Vec<_>>())))
}

/// Both gradients of linears, their input's added to what came so far: in place, unless that is another variable's too.
fn onto(
    gpu: &Gpu,
    so_far: Option<Tensor>,
    backward: impl FnOnce(InputGradient<'_>) -> Result<(Option<Tensor>, Tensor)>,
) -> Result<(Option<Tensor>, Tensor)> {
    match so_far {
        None => backward(InputGradient::New),
        Some(sum) if !sum.is_shared() => backward(InputGradient::Onto(&sum)),
        Some(sum) => {
            let (d_x, d_w) = backward(InputGradient::New)?;
            Ok((d_x.map(|d_x| elementwise::add(gpu, &sum, &d_x)).transpose()?, d_w))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::DeviceChoice;
    use crate::num::rng::Stream;
    use std::cell::RefCell;

    /// P weights, and what came for each.
    struct Stack {
        w: Tensor,
        home: Option<Tensor>,
        got: RefCell<Vec<(ParamId, Tensor)>>,
    }

    impl Weights for Stack {
        fn weight(&self, id: ParamId) -> Result<Tensor> {
            Ok(self.w.unstack(id.0))
        }

        fn gradient_home(&self, ids: &[ParamId]) -> Result<Option<Tensor>> {
            let homes: Vec<Tensor> =
                self.home.iter().flat_map(|home| ids.iter().map(|id| home.unstack(id.0))).collect();
            Ok(match homes.as_slice() {
                [one] => Some(one.clone()),
                many => Tensor::stacked(&many.iter().collect::<Vec<_>>()),
            })
        }

        fn gradient(&self, id: ParamId, gradient: Tensor) -> Result<()> {
            self.got.borrow_mut().push((id, gradient));
            Ok(())
        }

        fn leave(&self, _: usize) -> Result<()> {
            Ok(())
        }
    }

    /// Gradients that lie side by side give what they give apart, also onto a sum, with a place for the weights' gradients, and
    /// where one of them is missing.
    #[test]
    fn gradients_in_a_stack_are_those_apart() {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        // Scales of N or K values begin where any adapter can bind them: at multiples of 256 bytes.
        let (p, m, n, k) = (3, 64, 64, 128);
        let make = |name: &str, shape: &[usize]| {
            let stream = Stream::new(1, name);
            let values: Vec<f32> =
                (0..shape.iter().product::<usize>() as u64).map(|i| stream.normal(i)).collect();
            Tensor::from_f32(&gpu, name, shape, DType::BF16, &values).unwrap()
        };
        // A shared expert's weight is (1, N, K), without groups.
        let shapes = [vec![p, n, k], vec![p, 1, n, k]];
        let (x, d) = (make("x", &[m, k]), make("d", &[p, m, n]));
        let apart: Vec<Tensor> = (0..p)
            .map(|i| {
                let values = d.unstack(i).to_f32(&gpu).unwrap();
                Tensor::from_f32(&gpu, "apart", &[m, n], DType::BF16, &values).unwrap()
            })
            .collect();
        let ids = [0, 1, 2].map(ParamId);
        for recipe in [Recipe::HighPrecision, Recipe::Rowwise] {
            for (sum, place, missing) in [(false, false, false), (true, true, false), (true, false, true)] {
                let run = |flows: Vec<Tensor>| {
                    let shape = &shapes[usize::from(place)];
                    let home = place.then(|| make("home", shape));
                    let weights = Stack { w: make("w", shape), home, got: RefCell::default() };
                    let mut grads: Vec<Option<Flow>> = flows.into_iter().map(|t| Some(t.into())).collect();
                    if missing {
                        grads[1] = None;
                    }
                    let so_far = sum.then(|| make("sum", &[m, k]));
                    let input = Operand::new(&x, None);
                    let d_x = linears(&gpu, &weights, grads, (&input, &ids, recipe), so_far).unwrap();
                    let mut got = weights.got.into_inner();
                    got.sort_by_key(|(id, _)| *id);
                    let d_w: Vec<(ParamId, Vec<f32>)> =
                        got.into_iter().map(|(id, t)| (id, t.to_f32(&gpu).unwrap())).collect();
                    (d_x.unwrap().to_f32(&gpu).unwrap(), d_w)
                };
                let one = run((0..p).map(|i| d.unstack(i)).collect());
                assert!(one == run(apart.clone()), "{recipe:?} {sum} {place} {missing}");
                assert_eq!(one.1.len(), if missing { 2 } else { 3 });
            }
        }
    }
}

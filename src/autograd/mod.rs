//! The tape and its one table of rules.
//!
//! Forward code calls the methods of [`Tape`]; each computes its op and, when recording, appends a node with what
//! its rule will need. [`Tape::backward`] walks the nodes in reverse and drops each one after use, so memory falls
//! as the walk goes up. Parameters are not variables: a rule asks [`Weights`] for them and hands it their gradient.

mod forward;
mod head;
mod rules;

pub use forward::Readers;

use crate::gpu::Gpu;
use crate::ops::elementwise;
use crate::ops::quantize::Ready;
use crate::params::{ParamId, Weights};
use crate::tensor::Tensor;
use crate::{Error, Result};
use rules::{Flow, Rule};
use std::cell::RefCell;
use std::rc::Rc;

/// A value in the forward pass.
#[derive(Clone, Debug)]
pub struct Var {
    id: usize,
    value: Tensor,
    /// What its op has left of its quantization for the linears that it was told of, and the first of their weights. They take it.
    ready: Rc<RefCell<Option<(ParamId, Ready)>>>,
}

impl Var {
    /// The tensor.
    pub fn value(&self) -> &Tensor {
        &self.value
    }
}

/// One recorded op.
struct Node {
    rule: Rule,
    inputs: Vec<usize>,
    /// One, but for linears of stacked weights.
    outputs: Vec<usize>,
}

/// Records a forward pass and differentiates it.
pub struct Tape<'a> {
    gpu: &'a Gpu,
    weights: &'a dyn Weights,
    nodes: Vec<Node>,
    vars: usize,
    recording: bool,
    /// The training step, for messages.
    step: Option<usize>,
}

impl<'a> Tape<'a> {
    /// A tape that records for [`Tape::backward`].
    pub fn new(gpu: &'a Gpu, weights: &'a dyn Weights) -> Tape<'a> {
        Tape { gpu, weights, nodes: Vec::new(), vars: 0, recording: true, step: None }
    }

    /// The same for a training step, counted from 1, which its errors then name.
    pub fn at_step(self, step: usize) -> Tape<'a> {
        Tape { step: Some(step), ..self }
    }

    /// A tape that only computes.
    pub fn evaluating(gpu: &'a Gpu, weights: &'a dyn Weights) -> Tape<'a> {
        Tape { recording: false, ..Tape::new(gpu, weights) }
    }

    /// Whether gradients will be wanted.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// A variable without a rule: its gradient can be asked for, nothing flows further.
    pub fn leaf(&mut self, value: Tensor) -> Var {
        self.vars += 1;
        Var { id: self.vars - 1, value, ready: Rc::default() }
    }

    fn push(&mut self, rule: Rule, inputs: &[&Var], value: Tensor) -> Result<Var> {
        Ok(self.push_all(rule, inputs, vec![value])?.remove(0))
    }

    /// [`Tape::push`] of a rule with several results.
    fn push_all(&mut self, rule: Rule, inputs: &[&Var], values: Vec<Tensor>) -> Result<Vec<Var>> {
        let outputs = self.results(rule.name(), values)?;
        if self.recording {
            let inputs = inputs.iter().map(|v| v.id).collect();
            self.nodes.push(Node { rule, inputs, outputs: outputs.iter().map(|v| v.id).collect() });
        }
        Ok(outputs)
    }

    /// Variables of what `op` gave.
    fn results(&mut self, op: &str, values: Vec<Tensor>) -> Result<Vec<Var>> {
        if self.gpu.options().check_nan {
            values.iter().try_for_each(|value| self.check_finite(op, value))?;
        }
        Ok(values.into_iter().map(|value| self.leaf(value)).collect())
    }

    /// Reads an op's result back and names the first value that is no number.
    fn check_finite(&self, op: &str, value: &Tensor) -> Result<()> {
        let values = value.to_f32(self.gpu)?;
        let Some(at) = values.iter().position(|v| !v.is_finite()) else { return Ok(()) };
        let (row, column) = (at / value.cols().max(1), at % value.cols().max(1));
        let step = self.step.map_or(String::new(), |step| format!("step {step}: "));
        Err(Error::user(
            format!(
                "{step}op {} ({op}) gave {} at row {row}, column {column} of {:?}",
                self.vars,
                values[at],
                value.shape()
            ),
            "lower optimizer.lr, check the data, or compare with training.mixed_precision_param = \"float32\"",
        ))
    }

    /// Says that the forward pass enters a block; backward leaves it here on its way up.
    pub fn enter_block(&mut self, block: usize) {
        if self.recording {
            self.nodes.push(Node { rule: Rule::Enter { block }, inputs: Vec::new(), outputs: Vec::new() });
        }
    }

    /// Says that the forward pass has left a block.
    ///
    /// # Errors
    /// What [`Weights::leave`] says.
    pub fn leave_block(&mut self, block: usize) -> Result<()> {
        self.weights.leave(block)
    }

    /// Runs the rules in reverse from `output`, whose gradient is `seed` (`None` where its rule already holds the
    /// gradient, as the loss does), and returns the gradients of `wanted`.
    ///
    /// # Errors
    /// The device, its memory, or other ranks.
    pub fn backward(
        mut self,
        output: &Var,
        seed: Option<Tensor>,
        wanted: &[&Var],
    ) -> Result<Vec<Option<Tensor>>> {
        let mut grads: Vec<Option<Flow>> = vec![None; self.vars];
        let mut started = seed.is_none().then_some(output.id);
        grads[output.id] = seed.map(Flow::from);
        while let Some(node) = self.nodes.pop() {
            if let Rule::Enter { block } = node.rule {
                self.weights.leave(block)?;
                continue;
            }
            let mut take = |id: &usize| {
                let keep = wanted.iter().any(|v| v.id == *id);
                if keep { grads[*id].clone() } else { grads[*id].take() }
            };
            let arrived: Vec<Option<Flow>> = node.outputs.iter().map(&mut take).collect();
            if arrived.iter().all(Option::is_none) && !node.outputs.iter().any(|id| started == Some(*id)) {
                continue;
            }
            started = started.filter(|id| !node.outputs.contains(id));
            let so_far = if node.rule.adds() { grads[node.inputs[0]].take() } else { None };
            let so_far = so_far.map(|flow| flow.value);
            let reader = self.maker(node.rule.quantizes().and_then(|which| node.inputs.get(which)));
            let flows = node.rule.backward(self.gpu, self.weights, arrived, so_far, reader)?;
            assert_eq!(flows.len(), node.inputs.len(), "a rule gives one gradient per input");
            for (input, flow) in node.inputs.iter().zip(flows) {
                let Some(flow) = flow else { continue };
                grads[*input] = Some(match grads[*input].take() {
                    None => flow,
                    Some(sum) => elementwise::add(self.gpu, &sum.value, &flow.value)?.into(),
                });
            }
        }
        Ok(wanted.iter().map(|v| grads[v.id].take().map(|flow| flow.value)).collect())
    }

    /// The rule that made a variable.
    fn maker(&self, id: Option<&usize>) -> Option<&Rule> {
        let id = id?;
        self.nodes.iter().rev().find(|node| node.outputs.contains(id)).map(|node| &node.rule)
    }
}

//! One rank's training state, and one step of it.

use super::data;
use crate::autograd::Tape;
use crate::comm::Communicator;
use crate::gpu::{Download, Gpu};
use crate::nn::{self, Llama4, Seed, initial_value};
use crate::num::DType;
use crate::ops::{clip, expert_bias};
use crate::optim::{AdamW, Hyper, Schedule};
use crate::parallel::{Fsdp, Policy};
use crate::params::ParamId;
use crate::tensor::Tensor;
use crate::{Error, Result};
use std::sync::Arc;

/// What the step needs of the configuration.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Compute and all-gather dtype.
    pub param_dtype: DType,
    /// Gradients on the wire.
    pub reduce_dtype: DType,
    /// Free gathered weights between forward and backward.
    pub reshard: bool,
    /// Peak learning rate.
    pub lr: f64,
    /// AdamW's other numbers.
    pub hyper: Hyper,
    /// Factors on the learning rate.
    pub schedule: Schedule,
    /// Largest gradient norm.
    pub max_norm: f32,
    /// Step of the expert-bias update.
    pub load_balance: Option<f32>,
    /// Forward passes per step.
    pub accumulation: usize,
}

/// The model, its sharded parameters and the optimizer on one rank.
pub struct Trainer {
    gpu: Gpu,
    comm: Arc<dyn Communicator>,
    model: Llama4,
    /// The sharded parameters.
    pub fsdp: Fsdp,
    optimizer: AdamW,
    recipe: Recipe,
    steps: usize,
}

/// A step whose numbers are on their way.
pub struct Pending {
    download: Download,
    passes: usize,
    layers: Vec<(usize, usize)>,
    lr: f64,
}

/// A step's numbers on this rank; the loss is the mean over its own tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct StepStats {
    /// Mean cross entropy in nats over all ranks' tokens.
    pub loss: f64,
    /// The largest loss of a rank.
    pub max_loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens per expert over all ranks, by layer number.
    pub counts: Vec<(usize, Vec<u32>)>,
}

impl Trainer {
    /// Builds the model with all parameters zero; [`Trainer::initialize`] or [`Fsdp::set`] gives them values.
    ///
    /// # Errors
    /// Limits or memory of the device.
    pub fn new(
        gpu: &Gpu,
        comm: Arc<dyn Communicator>,
        args: &crate::config::ModelArgs,
        converters: &nn::Converters,
        recipe: Recipe,
    ) -> Result<Trainer> {
        let (model, table) = Llama4::build(gpu, args, converters)?;
        let policy = Policy {
            param_dtype: recipe.param_dtype,
            reduce_dtype: recipe.reduce_dtype,
            reshard: recipe.reshard,
            accumulates: recipe.accumulation > 1,
            wrapped: model.wrapped(&table),
        };
        let fsdp = Fsdp::new(gpu, comm.clone(), table, policy)?;
        let optimizer = AdamW::new(gpu, fsdp.layout(), recipe.hyper)?;
        Ok(Trainer { gpu: gpu.clone(), comm, model, fsdp, optimizer, recipe, steps: 0 })
    }

    /// Upstream's initial distributions, the same for any number of ranks.
    ///
    /// # Errors
    /// What the device reported.
    pub fn initialize(&self, seed: Seed) -> Result<()> {
        for (id, spec) in self.fsdp.table().iter() {
            self.fsdp.set(id, &*initial_value(spec, seed))?;
        }
        Ok(())
    }

    /// The model.
    pub fn model(&self) -> &Llama4 {
        &self.model
    }

    /// Row-major values of a whole parameter.
    ///
    /// # Errors
    /// Other ranks, or what the device reported.
    pub fn weights(&self, id: ParamId) -> Result<Vec<f32>> {
        self.fsdp.fetch(&self.fsdp.master, id)
    }

    /// Values of the expert bias (E) of MoE layer `layer`.
    ///
    /// # Errors
    /// What the device reported.
    ///
    /// # Panics
    /// When `layer` is no MoE layer.
    pub fn bias(&self, layer: usize) -> Result<Vec<f32>> {
        self.bias_tensor(layer).to_f32(&self.gpu)
    }

    /// Replaces the expert bias (E) of MoE layer `layer`; the same on every rank.
    ///
    /// # Errors
    /// What the device reported.
    ///
    /// # Panics
    /// When `layer` is no MoE layer, or has another number of experts.
    pub fn set_bias(&self, layer: usize, values: &[f32]) -> Result<()> {
        let bias = self.bias_tensor(layer);
        assert_eq!(values.len(), bias.numel(), "values for the bias {:?} of layer {layer}", bias.shape());
        let (buffer, offset) = bias.memory();
        self.gpu.upload(buffer, offset, bytemuck::cast_slice(values))
    }

    fn bias_tensor(&self, layer: usize) -> &Tensor {
        let biases = self.model.biases();
        biases.iter().find(|(i, _)| *i == layer).unwrap_or_else(|| panic!("layer {layer} has no experts")).1
    }

    /// Puts a batch on the device: one upload.
    ///
    /// # Errors
    /// Out of device memory.
    pub fn upload(&self, batch: &data::Batch) -> Result<nn::Batch> {
        let tokens = batch.batch * batch.seq;
        let room = tokens.next_multiple_of(64);
        let mut words = vec![0u32; room * if self.model.needs_docs() { 3 } else { 2 }];
        words[..tokens].copy_from_slice(&batch.inputs);
        words[room..room + tokens].copy_from_slice(&batch.labels);
        if self.model.needs_docs() {
            let docs = documents(&batch.inputs, batch.seq, self.model.args().eos_id as u32);
            words[2 * room..2 * room + tokens].copy_from_slice(&docs);
        }
        let all = Tensor::from_u32(&self.gpu, "batch", &words)?;
        Ok(nn::Batch {
            tokens: all.slice_flat(0, tokens),
            labels: all.slice_flat(room, room + tokens),
            docs: self.model.needs_docs().then(|| all.slice_flat(2 * room, 2 * room + tokens)),
            batch: batch.batch,
            seq: batch.seq,
        })
    }

    /// Forward and backward of one step's batches: losses, and tokens per expert summed over them.
    fn gradients(&self, batches: &[data::Batch]) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let (mut losses, mut totals) = (Vec::new(), Vec::<Tensor>::new());
        for (pass, batch) in batches.iter().enumerate() {
            let batch = self.upload(batch)?;
            self.fsdp.start(pass > 0);
            let mut tape = Tape::new(&self.gpu, &self.fsdp).at_step(self.steps + 1);
            let forward = self.model.loss(&mut tape, &batch, 1.0 / batches.len() as f32)?;
            self.fsdp.start_backward();
            tape.backward(&forward.loss, None, &[])?;
            losses.push(forward.loss.value().clone());
            if pass == 0 {
                totals = forward.counts;
            } else {
                for (total, counts) in totals.iter().zip(&forward.counts) {
                    expert_bias::accumulate(&self.gpu, total, counts)?;
                }
            }
        }
        Ok((losses, totals))
    }

    /// Logits (T, V) of a batch, row-major; whole, so for small models.
    ///
    /// # Errors
    /// The device, its memory, or other ranks.
    pub fn logits(&self, batch: &data::Batch) -> Result<Vec<f32>> {
        let batch = self.upload(batch)?;
        self.fsdp.start(false);
        let mut tape = Tape::evaluating(&self.gpu, &self.fsdp);
        self.model.logits(&mut tape, &batch)?.to_f32(&self.gpu)
    }

    /// The gradients of one batch, before clipping, as whole row-major parameters in the table's order.
    ///
    /// # Errors
    /// As [`Trainer::logits`].
    pub fn batch_gradients(&self, batch: &data::Batch) -> Result<Vec<Vec<f32>>> {
        self.gradients(std::slice::from_ref(batch))?;
        self.fsdp.table().iter().map(|(id, _)| self.fsdp.fetch(&self.fsdp.grads, id)).collect()
    }

    /// One optimizer step over `batches` (one per forward pass); submits, and does not wait.
    ///
    /// # Errors
    /// The device, its memory, or other ranks.
    ///
    /// # Panics
    /// On several batches where [`Recipe::accumulation`] says one.
    pub fn step(&mut self, batches: &[data::Batch]) -> Result<Pending> {
        let (losses, counts) = self.gradients(batches)?;
        let (norm, coefficient) = self.clip()?;
        if self.gpu.options().check_nan {
            self.check_finite(&norm)?;
        }
        let counts = self.fsdp.sum_counts(counts)?;
        if let Some(coeff) = self.recipe.load_balance {
            for ((_, bias), counts) in self.model.biases().iter().zip(&counts) {
                expert_bias::update(&self.gpu, bias, counts, coeff)?;
            }
        }
        let lr = self.recipe.lr * self.recipe.schedule.factor(self.steps);
        self.fsdp.update(|shards| self.optimizer.step(&self.gpu, shards, &coefficient, lr as f32))?;
        self.steps += 1;
        let pending = self.collect(&losses, &norm, &counts, lr)?;
        self.gpu.flush()?;
        Ok(pending)
    }

    /// Reads the gradients' norm back and, where it is no number, names the first gradient of this rank that has none.
    fn check_finite(&self, norm: &Tensor) -> Result<()> {
        let norm = norm.to_f32(&self.gpu)?[0];
        if norm.is_finite() {
            return Ok(());
        }
        let mut what = "no gradient of this rank has one: their squares are too large".to_owned();
        for (id, spec) in self.fsdp.table().iter() {
            let shard = self.fsdp.grads.shard(self.fsdp.layout().place(id)).to_f32(&self.gpu)?;
            if let Some(value) = shard.into_iter().find(|v| !v.is_finite()) {
                what = format!("the first gradient that has a {value} is that of {}", spec.name);
                break;
            }
        }
        Err(Error::user(
            format!("step {}: the gradients' norm is {norm}; {what}", self.steps + 1),
            "lower optimizer.lr, check the data, or compare with training.mixed_precision_param = \"float32\"",
        ))
    }

    fn clip(&self) -> Result<(Tensor, Tensor)> {
        let segments = self.fsdp.grads.segments();
        let squares = clip::sum_squares(&self.gpu, &segments.iter().collect::<Vec<_>>())?;
        let squares = self.fsdp.sum_scalar(squares)?;
        clip::norm_and_coefficient(&self.gpu, &squares, self.recipe.max_norm)
    }

    /// Copies a step's numbers side by side, so that one download brings them all.
    fn collect(&self, losses: &[Tensor], norm: &Tensor, counts: &[Tensor], lr: f64) -> Result<Pending> {
        let parts: Vec<&Tensor> = losses.iter().chain([norm]).chain(counts).collect();
        let all = Tensor::side_by_side(&self.gpu, "step numbers", &parts)?;
        let layers = self.model.biases().iter().map(|(layer, bias)| (*layer, bias.numel())).collect();
        let (buffer, at) = all.memory();
        let download = self.gpu.download_later(buffer, at, all.bytes());
        Ok(Pending { download, passes: losses.len(), layers, lr })
    }

    /// Waits for a step's numbers and averages the loss over ranks; every rank must call it for the same steps.
    ///
    /// # Errors
    /// What the device reported, or other ranks.
    pub fn read(&self, pending: Pending) -> Result<StepStats> {
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&pending.download.wait()?);
        let float = |i: usize| f64::from(f32::from_bits(words[i]));
        let local = (0..pending.passes).map(float).sum::<f64>() / pending.passes as f64;
        let mut every = vec![0f64; self.comm.size()];
        self.comm.all_gather(bytemuck::bytes_of(&local), bytemuck::cast_slice_mut(&mut every))?;
        let mut at = pending.passes + 1;
        let counts = pending
            .layers
            .iter()
            .map(|(layer, experts)| {
                at += experts;
                (*layer, words[at - experts..at].to_vec())
            })
            .collect();
        Ok(StepStats {
            loss: every.iter().sum::<f64>() / every.len() as f64,
            max_loss: every.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            grad_norm: float(pending.passes),
            lr: pending.lr,
            counts,
        })
    }

    /// Forward passes per step.
    pub fn accumulation(&self) -> usize {
        self.recipe.accumulation
    }
}

/// Number of each position's document: an end-of-text token still belongs to the document that it ends.
fn documents(tokens: &[u32], seq: usize, eos: u32) -> Vec<u32> {
    let mut docs = Vec::with_capacity(tokens.len());
    for sequence in tokens.chunks(seq) {
        let mut doc = 0;
        for token in sequence {
            docs.push(doc);
            doc += u32::from(*token == eos);
        }
    }
    docs
}

#[cfg(test)]
mod tests {
    use super::documents;

    #[test]
    fn documents_end_with_their_eos() {
        assert_eq!(documents(&[5, 0, 5, 5, 0, 0, 1, 1], 4, 0), [0, 0, 1, 1, 0, 1, 2, 2]);
    }
}

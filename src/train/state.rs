//! A trainer's model as the tensors of a weight file: every parameter, and the experts' routing biases.
//!
//! Upstream keeps the biases as buffers, `layers.N.moe.expert_bias` (E), which its files hold unless load balancing was
//! off; so a file may lack them, and they are then zero.

use super::trainer::Trainer;
use super::weights::{self, FileDtype, ParamSpec};
use crate::Result;
use crate::params::ParamId;
use std::collections::BTreeMap;
use std::path::Path;

/// What a tensor of the file is here.
#[derive(Clone, Copy)]
enum Place {
    Parameter(ParamId),
    /// Bias of the MoE layer with this number.
    Bias(usize),
}

/// The tensors of the model's file in order, and where each belongs.
fn places(trainer: &Trainer) -> Vec<(ParamSpec, Place)> {
    let parameters = trainer.fsdp.table().iter().map(|(id, s)| (ParamSpec::from(s), Place::Parameter(id)));
    let biases = trainer.model().biases();
    let biases = biases.iter().map(|(layer, bias)| {
        let name = format!("layers.{layer}.moe.expert_bias");
        (ParamSpec::new(name, bias.shape()).or_absent(), Place::Bias(*layer))
    });
    parameters.chain(biases).collect()
}

/// Sets every parameter from a safetensors file, and the expert biases that it holds; the same on every rank.
///
/// # Errors
/// As [`weights::load`].
pub fn load(trainer: &Trainer, path: &Path) -> Result<()> {
    let (specs, places): (Vec<_>, Vec<_>) = places(trainer).into_iter().unzip();
    let by_name: BTreeMap<&str, Place> = specs.iter().map(|s| s.name.as_str()).zip(places).collect();
    weights::load(path, &specs, &mut |name, values| match by_name[name] {
        Place::Parameter(id) => trainer.fsdp.set(id, &|i| values[i]),
        Place::Bias(layer) => trainer.set_bias(layer, values),
    })
}

/// Writes every parameter and expert bias to a safetensors file, whole or not at all; returns the number of tensors.
///
/// # Errors
/// As [`weights::save`]; other ranks, or what the device reported.
pub fn save(trainer: &Trainer, path: &Path, dtype: FileDtype) -> Result<usize> {
    let (specs, places): (Vec<_>, Vec<_>) = places(trainer).into_iter().unzip();
    let by_name: BTreeMap<&str, Place> = specs.iter().map(|s| s.name.as_str()).zip(places).collect();
    weights::save(path, &specs, dtype, &BTreeMap::new(), &mut |spec| match by_name[spec.name.as_str()] {
        Place::Parameter(id) => trainer.weights(id),
        Place::Bias(layer) => trainer.bias(layer),
    })?;
    Ok(specs.len())
}

//! The parameter table over flat segments.
//!
//! A [`Table`] lists every parameter once: name, shape, block, how it starts. A [`Layout`] places each rank's shard
//! of each parameter in a few *segments* (buffers no larger than the adapter's binding limit), so that the
//! optimizer, the norm and zeroing are one loop over segments, whatever the model.
//!
//! Sharding rule (PyTorch FSDP2, `Shard(0)`): dimension 0 is cut into equal chunks, the last ones padded with zeros.
//! The unit of a matrix is one slice of dimension 0; of a vector, one quad.

mod layout;
mod table;

pub use layout::{Layout, Place, Shards, Store};
pub use table::{Init, ParamId, Spec, Table};

use crate::Result;
use crate::tensor::Tensor;

/// Where a model finds its weights and leaves its gradients; sharding hides behind it.
pub trait Weights {
    /// The whole parameter in the compute dtype, gathered first if it has to be.
    ///
    /// # Errors
    /// Other ranks, the device, or its memory.
    fn weight(&self, id: ParamId) -> Result<Tensor>;

    /// Memory in which the gradient of `ids` may be written instead of a new tensor, in the compute dtype, before it is handed
    /// to [`Weights::gradient`] as ever: the parameter's shape, or for several ids (P, shape...), in their order. `None` where
    /// there is none, or where several parameters differ in shape or do not lie side by side.
    ///
    /// # Errors
    /// As [`Weights::weight`].
    fn gradient_home(&self, _ids: &[ParamId]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Takes the gradient of the local loss, in the compute dtype; once per parameter and backward pass. What was written into
    /// its [home](Weights::gradient_home) comes here too: that tensor, or its rows for one of several ids.
    ///
    /// # Errors
    /// As [`Weights::weight`].
    fn gradient(&self, id: ParamId, gradient: Tensor) -> Result<()>;

    /// Says that the forward (or backward) pass has left `block`, whose gathered weights may go.
    ///
    /// # Errors
    /// As [`Weights::weight`].
    fn leave(&self, block: usize) -> Result<()>;
}

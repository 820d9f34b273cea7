//! What happens to a parameter on either side of its all-gather.
//!
//! Definition: torchao `prototype/moe_training/tensor.py`, `fsdp_pre_all_gather` and `fsdp_post_all_gather`, as of
//! PR #2455 (2025-07-02): the downcast to the policy's dtype comes *before* the gather, so the wire carries that dtype;
//! fp8 comes after it, inside the grouped GEMM, once per direction. The cast is element-wise, so it commutes with
//! the gather bit for bit.
//!
//! One rank's gather moves nothing, so all that stands between the optimizer's write of an f32 weight and the parameter in bf16 is
//! that cast, of each value alone. There the optimizer may write its result (see `Policy::keeps_low`): the same bits in the memory
//! that [`post_all_gather`] made a parameter of, and no gather for the hooks to stand on either side of. What is gathered after
//! all (the first time, and after weights were set) goes through both, as on many ranks.

use crate::gpu::Gpu;
use crate::num::DType;
use crate::ops::elementwise;
use crate::tensor::Tensor;
use crate::{Error, Result};

/// A gathered parameter and how its grouped GEMM computes; the flag survives every later gather.
#[derive(Clone, Debug)]
pub struct Unsharded {
    /// The values in the compute dtype.
    pub data: Tensor,
    /// Whether the parameter is wrapped: its grouped GEMM runs in fp8.
    pub wrapped: bool,
}

/// The shard as it goes on the wire: cast to `param_dtype` on the device, written to `payload`.
///
/// # Errors
/// What the device reported.
pub fn pre_all_gather(gpu: &Gpu, shard: &Tensor, payload: &Tensor) -> Result<()> {
    elementwise::cast_into(gpu, shard, payload)
}

/// Takes what was gathered. The first time (`out` is `None`) it becomes a new parameter; later it must have been
/// gathered straight into `out`'s memory, and nothing is copied.
///
/// # Errors
/// `out` is of the other kind (wrapped or not), does not share memory with `gathered`, or has another dtype.
pub fn post_all_gather(
    name: &str,
    gathered: Tensor,
    wrapped: bool,
    param_dtype: DType,
    out: Option<&Unsharded>,
) -> Result<Unsharded> {
    let broken = |what: String| {
        Error::comm(format!("all-gather of {name}: {what}"), "this is a defect of moe8: report it")
    };
    if gathered.dtype() != param_dtype {
        return Err(broken(format!("gathered {}, the policy says {param_dtype}", gathered.dtype())));
    }
    let Some(out) = out else { return Ok(Unsharded { data: gathered, wrapped }) };
    if out.wrapped != wrapped {
        return Err(broken(format!("wrapped is {wrapped}, at step 0 it was {}", out.wrapped)));
    }
    if out.data.dtype() != param_dtype {
        return Err(broken(format!(
            "the unsharded parameter is {}, the policy says {param_dtype}",
            out.data.dtype()
        )));
    }
    let ((a, at), (b, bt)) = (gathered.memory(), out.data.memory());
    if !std::sync::Arc::ptr_eq(a, b) || at != bt {
        return Err(broken("it was not gathered into the unsharded parameter's memory".into()));
    }
    Ok(out.clone())
}

//! Grouped GEMM through workgroup memory: the candidate of [`super::gemm`] for GPUs without matrix units, and for f32 operands on all
//! GPUs: f32 arithmetic on f32, bf16 or fp8.
//!
//! Same definition and tolerance as the register tiles; only the order of the sums differs.

use super::gemm::Flags;
use super::gemm_choice::Form;
use crate::gpu::{Kernel, Variant};
use crate::num::DType;

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/gemm_params.wgsl"),
    include_str!("../../shaders/lib/gemm_operands.wgsl"),
    include_str!("../../shaders/lib/gemm_store.wgsl"),
    include_str!("../../shaders/gemm_tiled.wgsl")
);
const MAIN: Kernel = Kernel { name: "gemm_tiled.main", text: TEXT, entry: "main" };

/// Edge of the tile that one workgroup computes.
pub(super) const TILE: usize = 128;

/// Whether the kernel can multiply such operands: their quads must be alike, for the threads that load them are.
pub(super) fn can_run(a: DType, b: DType) -> bool {
    a.quad_bytes() == b.quad_bytes() && a != DType::F16
}

/// The kernel of a form and its variant for operands and result of these dtypes; bindings and parameters are those of the
/// register tiles.
pub(super) fn kernel(form: Form, kinds: [DType; 3], flags: Flags, software: bool) -> (Kernel, Variant) {
    let [a, b] = form.along().map(u32::from);
    let variant = Variant::new()
        .constant("A_ALONG", a)
        .constant("B_ALONG", b)
        .constant("WRITTEN", (!software).into())
        .constant("LOOPED", software.into())
        .constant("BLOCKS", if software { 1 } else { 4 })
        .constant("GROUPED", flags.grouped.into())
        .constant("SCALED", flags.scaled.into())
        .constant("ACCUMULATE", flags.accumulate.into())
        .quad("A", kinds[0])
        .quad("B", kinds[1])
        .quad("OUT", kinds[2]);
    (MAIN, variant)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    use DType::{BF16, E4M3, E5M2, F32};
    // All are variants of MAIN.
    let mut all = Vec::new();
    for form in Form::ALL {
        for (a, b) in [(F32, F32), (BF16, BF16), (E4M3, E4M3), (E5M2, E4M3)] {
            for bits in 0..8u8 {
                let [grouped, scaled, accumulate] = [1, 2, 4].map(|bit| bits & bit != 0);
                let out = if scaled { BF16 } else { F32 };
                let flags = Flags { grouped, scaled, accumulate, summed: false };
                all.push(kernel(form, [a, b, out], flags, accumulate));
            }
        }
    }
    all
}

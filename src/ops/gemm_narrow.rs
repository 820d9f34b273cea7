//! Grouped GEMM with one narrow size, as a router's: the candidate of [`super::gemm`] for GPUs where the number of experts is
//! what a form makes (nt: N, tn: M) or contracts (nn: K). Bound by memory: each operand is read once.
//!
//! Same definition and tolerance as the register tiles; only the order of the sums differs.

use super::gemm::Flags;
use super::gemm_choice::{Form, Product};
use crate::gpu::{Kernel, Variant};
use crate::num::DType;

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/gemm_params.wgsl"),
    include_str!("../../shaders/lib/gemm_operands.wgsl"),
    include_str!("../../shaders/lib/gemm_store.wgsl"),
    include_str!("../../shaders/gemm_narrow.wgsl")
);
const NT: Kernel = Kernel { name: "gemm_narrow.nt", text: TEXT, entry: "nt" };
const NN: Kernel = Kernel { name: "gemm_narrow.nn", text: TEXT, entry: "nn" };
const TN: Kernel = Kernel { name: "gemm_narrow.tn", text: TEXT, entry: "tn" };

/// The widest narrow size: a thread holds it in registers.
const WIDEST: usize = 16;

/// The size of a product that the form wants narrow.
fn narrow(form: Form, [m, n, k]: [usize; 3]) -> usize {
    match form {
        Form::Nt => n,
        Form::Nn => k,
        Form::Tn => m,
    }
}

/// Whether a product of these sizes is narrow where its form wants it.
pub(super) fn is_narrow(form: Form, sizes: [usize; 3]) -> bool {
    (1..=WIDEST).contains(&narrow(form, sizes))
}

/// Whether the kernel can compute a product.
pub(super) fn can_run(product: &Product) -> bool {
    !product.operands.contains(&DType::F16) && is_narrow(product.form, product.sizes)
}

/// Rows that a thread of `nt` sums at once: few enough for its registers.
fn rows(quads: usize) -> usize {
    if quads <= 2 { 4 } else { 2 }
}

/// Rows and columns of the result that a workgroup computes.
pub(super) fn tile(form: Form, sizes: [usize; 3]) -> [usize; 2] {
    let size = narrow(form, sizes);
    match form {
        Form::Nt => [4 * rows(size.div_ceil(4)), WIDEST],
        Form::Nn => [32, 256],
        Form::Tn => [WIDEST, 256],
    }
}

/// The kernel of a form and its variant for a product of these sizes; bindings and parameters are those of the register
/// tiles.
pub(super) fn kernel(form: Form, kinds: [DType; 3], sizes: [usize; 3], flags: Flags) -> (Kernel, Variant) {
    let quads = narrow(form, sizes).div_ceil(4);
    let variant = Variant::new()
        .constant("QUADS", quads as u32)
        .constant("ROWS", rows(quads) as u32)
        .constant("GROUPED", flags.grouped.into())
        .constant("SCALED", flags.scaled.into())
        .constant("ACCUMULATE", flags.accumulate.into())
        .quad("A", kinds[0])
        .quad("B", kinds[1])
        .quad("OUT", kinds[2]);
    let kernel = match form {
        Form::Nt => NT,
        Form::Nn => NN,
        Form::Tn => TN,
    };
    (kernel, variant)
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    use DType::{BF16, E4M3, E5M2, F32};
    // All are variants of NT, NN and TN.
    let mut all = Vec::new();
    for form in Form::ALL {
        for ((a, b), size) in
            [(F32, F32), (BF16, BF16), (E4M3, E4M3), (E5M2, E4M3)].into_iter().zip([3, 8, 12, 16])
        {
            for bits in 0..8u8 {
                let [grouped, scaled, accumulate] = [1, 2, 4].map(|bit| bits & bit != 0);
                let out = if scaled { BF16 } else { F32 };
                let flags = Flags { grouped, scaled, accumulate, summed: false };
                all.push(kernel(form, [a, b, out], [size; 3], flags));
            }
        }
    }
    all
}

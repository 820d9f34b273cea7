//! Grouped GEMM on matrix units: the candidate next to the register tiles of [`super::gemm`], for e4m3 codes on adapters
//! with products of 16x16x16 of f16 and f32 sums.
//!
//! Every e4m3 value is an f16 value and a product of two of them is exact in f32, so the result differs from the other
//! kernel's in the order of its sums only: same definition, same tolerance. A code that is NaN counts as 480: the
//! quantizer marks what it poisons in the de-scale, which comes after the sum.

use super::gemm::{Dims, Flags};
use crate::gpu::{Caps, Kernel, MatrixUnits, Variant};
use crate::num::DType;

const TEXT: &str = concat!(
    include_str!("../../shaders/lib/groups.wgsl"),
    include_str!("../../shaders/lib/coop.wgsl"),
    include_str!("../../shaders/gemm_coop.wgsl")
);
const MAIN: Kernel = Kernel { name: "gemm_coop.main", text: TEXT, entry: "main" };

/// Edge of the tile that one workgroup computes.
pub(super) const TILE: usize = 128;

/// The form of a product, as [`super::gemm`] names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Nt,
    Nn,
    Tn,
}

impl Form {
    fn of(entry: &str) -> Form {
        match entry {
            "nt" => Form::Nt,
            "nn" => Form::Nn,
            _ => Form::Tn,
        }
    }

    /// Whether the rows of A, and of B, run along the contraction.
    fn along(self) -> [bool; 2] {
        [self != Form::Tn, self == Form::Nt]
    }
}

/// Whether the kernel can compute a product of these operands here.
pub(super) fn can_run(caps: &Caps, a: DType, b: DType) -> bool {
    caps.coop == Some(MatrixUnits::Coop16) && (a, b) == (DType::E4M3, DType::E4M3)
}

/// Whether it is also the better choice: its tiles are 128 x 128 and its slices 64 deep.
pub(super) fn pays(dims: Dims) -> bool {
    dims.m >= 16 && dims.n >= 16 && dims.k >= 16
}

struct Shape {
    form: Form,
    wide: bool,
    tail: bool,
    lanes: u32,
}

fn variant(shape: &Shape, out: DType, flags: Flags) -> Variant {
    let [a, b] = shape.form.along().map(u32::from);
    let wide = u32::from(shape.wide);
    let threads = 4 * shape.lanes;
    // 128 rows of 40 halves, or 32 rows of 136, in units of eight.
    let size = |along: u32| if along == 1 { 640 } else { 544 };
    Variant::new()
        .constant("A_ALONG", a)
        .constant("A_ACROSS", 1 - a)
        .constant("B_ALONG", b)
        .constant("B_ACROSS", 1 - b)
        .constant("WIDE", wide)
        .constant("NARROW", 1 - wide)
        .constant("TAIL", shape.tail.into())
        .constant("GROUPED", flags.grouped.into())
        .constant("SCALED", flags.scaled.into())
        .constant("ACCUMULATE", flags.accumulate.into())
        .constant("SPLIT", flags.split.into())
        .constant("LANES", shape.lanes)
        .constant("THREADS", threads)
        .constant("ALONG_LOADS", 512 / threads)
        .constant("ACROSS_LOADS", 256 / threads)
        .constant("STORE_STEPS", 64 / shape.lanes)
        .constant("TA", size(a))
        .constant("TB", size(b))
        .quad("OUT", out)
}

/// The kernel of the form `entry` and its variant; bindings and parameters are those of the register-tile kernel.
pub(super) fn kernel(entry: &str, dims: Dims, out: DType, flags: Flags, lanes: u32) -> (Kernel, Variant) {
    let form = Form::of(entry);
    let [a_along, b_along] = form.along();
    let a_cols = if a_along { dims.k } else { dims.m };
    let b_cols = if b_along { dims.k } else { dims.n };
    let whole = |cols: usize| cols.div_ceil(4).is_multiple_of(4);
    let wide = whole(a_cols) && whole(b_cols);
    let tail = form != Form::Tn && !dims.k.is_multiple_of(64);
    (MAIN, variant(&Shape { form, wide, tail, lanes }, out, flags))
}

/// Every variant, for validation without a GPU.
pub(super) fn kernels() -> Vec<(Kernel, Variant)> {
    let mut all = Vec::new();
    for form in [Form::Nt, Form::Nn, Form::Tn] {
        for (wide, tail) in [(true, false), (true, true), (false, true)] {
            let tail = tail && form != Form::Tn;
            for bits in 0..16u8 {
                let [grouped, scaled, accumulate, split] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
                if split && (form != Form::Tn || scaled || accumulate) {
                    continue;
                }
                let (out, lanes) = if grouped { (DType::F32, 32) } else { (DType::BF16, 64) };
                let flags = Flags { grouped, scaled, accumulate, split };
                all.push((MAIN, variant(&Shape { form, wide, tail, lanes }, out, flags)));
            }
        }
    }
    all
}

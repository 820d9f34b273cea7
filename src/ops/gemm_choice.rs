//! Which kernel computes a product: the table of candidates, and the rules of choice by adapter, operands and shape.

use super::choice::{Call, Candidate, operands};
use super::panels::{BLOCK, Order};
use super::{gemm_coop, gemm_narrow, gemm_tiled};
use crate::gpu::{GemmKernel, Gpu};
use crate::num::DType;

/// The form of a product: which operand's rows run along the contraction (`n`) or across it (`t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `out(M, N) = A(M, K) W[g](N, K)^T`: forward.
    Nt,
    /// `out(M, N) = A(M, K) W[g](K, N)`: the input's gradient.
    Nn,
    /// `out[g](M, N) = A_g(R_g, M)^T B_g(R_g, N)`: the weight's gradient.
    Tn,
}

impl Form {
    /// All three.
    pub const ALL: [Form; 3] = [Form::Nt, Form::Nn, Form::Tn];

    /// Its name, which is that of its entry point.
    pub fn name(self) -> &'static str {
        match self {
            Form::Nt => "nt",
            Form::Nn => "nn",
            Form::Tn => "tn",
        }
    }

    pub(super) fn of(entry: &str) -> Form {
        match entry {
            "nt" => Form::Nt,
            "nn" => Form::Nn,
            _ => Form::Tn,
        }
    }

    /// Whether the rows of A, and of B, run along the contraction.
    pub(super) fn along(self) -> [bool; 2] {
        [self != Form::Tn, self == Form::Nt]
    }
}

/// A product, as far as the choice depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// The form.
    pub form: Form,
    /// Dtype of A and of B.
    pub operands: [DType; 2],
    /// M, N, K (tn: K is the rows of all groups).
    pub sizes: [usize; 3],
    /// Groups of rows; none: one of all rows, without offsets.
    pub groups: Option<usize>,
}

fn narrow_can_run(_: &Gpu, product: &Product) -> Result<(), &'static str> {
    if gemm_narrow::can_run(product) { Ok(()) } else { Err("no size that is narrow") }
}

/// One group's rows of matrix units would be mostly empty; a software adapter has no use for teams of threads.
fn narrow_pays(gpu: &Gpu, _: &Product) -> Result<(), &'static str> {
    if gpu.caps().software { Err("a software adapter") } else { Ok(()) }
}

fn coop_can_run(gpu: &Gpu, product: &Product) -> Result<(), &'static str> {
    let (caps, [a, b]) = (gpu.caps(), product.operands);
    #[cfg(test)]
    if super::emulation::fragments().is_some() && gemm_coop::can_run(&caps, a, b) {
        return Ok(());
    }
    match () {
        () if gpu.options().no_coop => Err("--no-coop"),
        () if caps.coop.is_none() => Err("no matrix units that moe8 can use"),
        () if a == DType::BF16 && !caps.subnormal_halves => Err("the driver loses small halves"),
        () if !gemm_coop::can_run(&caps, a, b) => Err("no kernel for these operands on the matrix units"),
        () if product.panel_bytes() > caps.max_binding.min(caps.max_buffer) => {
            Err("an operand in panels is over the largest binding")
        }
        () => Ok(()),
    }
}

/// Its tiles are 128 x 128 or 64 x 64, and 64 steps of the contraction deep.
fn coop_pays(_: &Gpu, product: &Product) -> Result<(), &'static str> {
    if product.sizes.iter().all(|&size| size >= 16) { Ok(()) } else { Err("too small for its tiles") }
}

fn tiled_can_run(_: &Gpu, product: &Product) -> Result<(), &'static str> {
    let [a, b] = product.operands;
    if gemm_tiled::can_run(a, b) { Ok(()) } else { Err("operands of two sizes") }
}

/// Workgroup memory costs a software adapter more than it saves.
fn tiled_pays(gpu: &Gpu, product: &Product) -> Result<(), &'static str> {
    match product.sizes.iter().all(|&size| size >= 16) {
        _ if gpu.caps().software => Err("a software adapter"),
        false => Err("too small for tiles of 128 x 128"),
        true => Ok(()),
    }
}

/// Sizes that are tuned apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The size that the narrow kernel wants narrow is.
    Narrow,
    /// Some size is below 64.
    Thin,
    /// Fewer than 2^31 multiply-adds.
    Small,
    /// The others.
    Large,
}

impl Size {
    /// All four.
    pub const ALL: [Size; 4] = [Size::Narrow, Size::Thin, Size::Small, Size::Large];

    /// Of a product.
    pub fn of(product: &Product) -> Size {
        let sizes = product.sizes;
        if gemm_narrow::is_narrow(product.form, sizes) {
            return Size::Narrow;
        }
        let work = sizes.iter().fold(1usize, |work, size| work.saturating_mul(*size));
        match sizes.iter().any(|&size| size < 64) {
            true => Size::Thin,
            false if work < 1 << 31 => Size::Small,
            false => Size::Large,
        }
    }

    /// M, N, K of a product of this size.
    pub fn example(self, form: Form) -> [usize; 3] {
        match (self, form) {
            (Size::Narrow, Form::Nt) => [4096, 8, 4096],
            (Size::Narrow, Form::Nn) => [4096, 4096, 8],
            (Size::Narrow, Form::Tn) => [8, 4096, 4096],
            (Size::Thin, _) => [32; 3],
            (Size::Small, _) => [256; 3],
            (Size::Large, _) => [4096; 3],
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Size::Narrow => "narrow",
            Size::Thin => "thin",
            Size::Small => "small",
            Size::Large => "large",
        }
    }
}

impl Product {
    /// Bytes of the larger operand in panels.
    fn panel_bytes(&self) -> u64 {
        let [m, n, k] = self.sizes;
        let weights = self.groups.unwrap_or(1);
        let (a, b) = match self.form {
            // Every group of rows may end in a block that is not full.
            Form::Tn if self.groups.is_some() => ((k / BLOCK + weights) * m, (k / BLOCK + weights) * n),
            Form::Tn => (k.div_ceil(BLOCK) * m, k.div_ceil(BLOCK) * n),
            Form::Nt | Form::Nn => (k.div_ceil(BLOCK) * m, weights * k.div_ceil(BLOCK) * n),
        };
        // bf16 becomes halves.
        (a.max(b) * BLOCK * self.operands[0].size()) as u64
    }
}

impl Call for Product {
    type Kernel = GemmKernel;

    const TABLE: &'static [Candidate<Product>] = &[
        Candidate { kernel: GemmKernel::Narrow, can_run: narrow_can_run, pays: narrow_pays },
        Candidate { kernel: GemmKernel::Coop, can_run: coop_can_run, pays: coop_pays },
        Candidate { kernel: GemmKernel::Tiled, can_run: tiled_can_run, pays: tiled_pays },
        Candidate { kernel: GemmKernel::Scalar, can_run: |_, _| Ok(()), pays: |_, _| Ok(()) },
    ];

    fn name(kernel: GemmKernel) -> &'static str {
        kernel.name()
    }

    fn named(gpu: &Gpu) -> Option<GemmKernel> {
        #[cfg(test)]
        if super::emulation::fragments().is_some() {
            return Some(GemmKernel::Coop);
        }
        gpu.options().kernel
    }

    fn op(&self) -> String {
        format!("gemm {} {}", self.form.name(), operands(self.operands[0]))
    }

    fn size(&self) -> &'static str {
        Size::of(self).name()
    }
}

/// How a kernel reads its operands.
pub(crate) fn order(kernel: GemmKernel) -> Order {
    if kernel == GemmKernel::Coop { Order::Panels } else { Order::Rows }
}

#[cfg(test)]
mod tests {
    use super::{Form, Product, Size};
    use crate::num::DType;

    #[test]
    fn sizes_fall_into_classes() {
        for (form, sizes, class) in [
            (Form::Nt, [4096, 16, 4096], Size::Narrow),
            (Form::Nt, [16, 4096, 4096], Size::Thin),
            (Form::Nn, [4096, 4096, 1], Size::Narrow),
            (Form::Tn, [16, 1, 4096], Size::Narrow),
            (Form::Tn, [17, 4096, 4096], Size::Thin),
            (Form::Nt, [4096, 0, 4096], Size::Thin),
            (Form::Nt, [4096, 63, 4096], Size::Thin),
            (Form::Nt, [64; 3], Size::Small),
            (Form::Nt, [2048, 1024, 1023], Size::Small),
            (Form::Nt, [2048, 1024, 1024], Size::Large),
            (Form::Nt, [usize::MAX; 3], Size::Large),
        ] {
            let product = Product { form, operands: [DType::F32; 2], sizes, groups: None };
            assert_eq!(Size::of(&product), class, "{product:?}");
        }
        for form in Form::ALL {
            for size in Size::ALL {
                let product =
                    Product { form, operands: [DType::F32; 2], sizes: size.example(form), groups: None };
                assert_eq!(Size::of(&product), size, "{product:?}");
            }
        }
    }
}

//! Which kernel computes a product: the table of candidates, and the rules of choice by adapter, operands and shape.

use super::panels::Order;
use super::{gemm_coop, gemm_narrow, gemm_tiled};
use crate::gpu::{Caps, GemmKernel, Gpu};
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

/// A product, as far as the choice depends on it: M, N, K (tn: K is the rows of all groups).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// The form.
    pub form: Form,
    /// Dtype of A and of B.
    pub operands: [DType; 2],
    /// M, N, K.
    pub sizes: [usize; 3],
}

/// A kernel and what it asks for.
struct Candidate {
    kernel: GemmKernel,
    /// Whether it can compute such a product on such an adapter; if not, why.
    can_run: fn(&Caps, &Product) -> Result<(), &'static str>,
    /// Whether it is a good choice there, by rule; if not, why.
    pays: fn(&Caps, &Product) -> Result<(), &'static str>,
}

/// All candidates, by preference: the first that can run and pays is taken.
const CANDIDATES: [Candidate; 4] = [
    Candidate { kernel: GemmKernel::Narrow, can_run: narrow_can_run, pays: narrow_pays },
    Candidate { kernel: GemmKernel::Coop, can_run: coop_can_run, pays: coop_pays },
    Candidate { kernel: GemmKernel::Tiled, can_run: tiled_can_run, pays: tiled_pays },
    Candidate { kernel: GemmKernel::Scalar, can_run: |_, _| Ok(()), pays: |_, _| Ok(()) },
];

fn narrow_can_run(_: &Caps, product: &Product) -> Result<(), &'static str> {
    if gemm_narrow::can_run(product) { Ok(()) } else { Err("no size that is narrow") }
}

/// One group's rows of matrix units would be mostly empty; a software adapter has no use for teams of threads.
fn narrow_pays(caps: &Caps, _: &Product) -> Result<(), &'static str> {
    if caps.software { Err("a software adapter") } else { Ok(()) }
}

fn coop_can_run(caps: &Caps, product: &Product) -> Result<(), &'static str> {
    let [a, b] = product.operands;
    match () {
        () if caps.coop.is_none() => Err("no matrix units that moe8 can use"),
        () if !gemm_coop::can_run(caps, a, b) => Err("no kernel for these operands on the matrix units"),
        () => Ok(()),
    }
}

/// Its tiles are 128 x 128 and its slices 64 deep.
fn coop_pays(_: &Caps, product: &Product) -> Result<(), &'static str> {
    if product.sizes.iter().all(|&size| size >= 16) {
        Ok(())
    } else {
        Err("too small for tiles of 128 x 128")
    }
}

fn tiled_can_run(_: &Caps, product: &Product) -> Result<(), &'static str> {
    let [a, b] = product.operands;
    if gemm_tiled::can_run(a, b) { Ok(()) } else { Err("operands of two sizes") }
}

/// Workgroup memory costs a software adapter more than it saves.
fn tiled_pays(caps: &Caps, product: &Product) -> Result<(), &'static str> {
    match product.sizes.iter().all(|&size| size >= 16) {
        _ if caps.software => Err("a software adapter"),
        false => Err("too small for tiles of 128 x 128"),
        true => Ok(()),
    }
}

/// What kinds of operands are tuned apart.
pub const OPERANDS: [&str; 3] = ["f32", "bf16", "fp8"];

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
    fn example(self, form: Form) -> [usize; 3] {
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

/// The name under which a kernel is rejected for a form and operands.
pub fn op_name(form: Form, operands: &str) -> String {
    format!("gemm {} {operands}", form.name())
}

/// The name under which the fastest kernel is kept.
pub fn class_name(form: Form, operands: &str, size: Size) -> String {
    format!("{} {}", op_name(form, operands), size.name())
}

impl Product {
    /// Its operands as one of [`OPERANDS`], if they are tuned.
    fn operands(&self) -> Option<&'static str> {
        match self.operands[0] {
            DType::F32 => Some("f32"),
            DType::BF16 => Some("bf16"),
            DType::E4M3 | DType::E5M2 => Some("fp8"),
            DType::F16 | DType::U32 => None,
        }
    }
}

/// Why a kernel was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// `--kernel` names it, or names one that cannot compute this product.
    Named,
    /// `moe8 tune` found it the fastest.
    Tuned,
    /// It is the first of the table that can run and pays.
    Rule,
}

/// The kernel for a product on this adapter, and why: what `--kernel` names, if it can run; else what was found the fastest;
/// else by rule.
pub(super) fn choose(gpu: &Gpu, product: &Product) -> (GemmKernel, Why) {
    decide(gpu, product, |_, _| ())
}

/// [`choose`]; `passed` hears of every candidate that was not taken, and why.
fn decide(gpu: &Gpu, product: &Product, mut passed: impl FnMut(GemmKernel, &str)) -> (GemmKernel, Why) {
    let (options, caps) = (gpu.options(), gpu.caps());
    if options.kernel.is_none()
        && let Some(kernel) = tuned(gpu, product)
    {
        return (kernel, Why::Tuned);
    }
    for candidate in &CANDIDATES {
        let kernel = candidate.kernel;
        if let Err(why) = (candidate.can_run)(&caps, product) {
            passed(kernel, if options.no_coop && kernel == GemmKernel::Coop { "--no-coop" } else { why });
        } else if options.kernel == Some(kernel) {
            return (kernel, Why::Named);
        } else if options.kernel.is_some() {
            passed(kernel, "not what --kernel names");
        } else if let Some(why) = rejection(gpu, product, kernel) {
            passed(kernel, why);
        } else if let Err(why) = (candidate.pays)(&caps, product) {
            passed(kernel, why);
        } else {
            return (kernel, Why::Rule);
        }
    }
    (GemmKernel::Scalar, Why::Named)
}

/// The kernel that was found the fastest for such products, if it can run as the adapter was opened.
fn tuned(gpu: &Gpu, product: &Product) -> Option<GemmKernel> {
    let (decisions, operands) = (gpu.decisions(), product.operands()?);
    if decisions.is_empty() {
        return None;
    }
    let fastest = decisions.fastest(&class_name(product.form, operands, Size::of(product)))?;
    let candidate = CANDIDATES.iter().find(|c| c.kernel.name() == fastest.kernel)?;
    let fits = (candidate.can_run)(&gpu.caps(), product).is_ok();
    let kernel = Some(candidate.kernel).filter(|_| fits)?;
    rejection(gpu, product, kernel).is_none().then_some(kernel)
}

/// Why a kernel is not to be used here, if so. The register tiles are the last resort.
fn rejection<'a>(gpu: &'a Gpu, product: &Product, kernel: GemmKernel) -> Option<&'a str> {
    let decisions = gpu.decisions();
    if decisions.is_empty() || kernel == GemmKernel::Scalar {
        return None;
    }
    decisions.rejection(&op_name(product.form, product.operands()?), kernel)
}

/// The kernels that can compute a product on this adapter, and are not rejected there.
pub fn candidates(gpu: &Gpu, product: &Product) -> Vec<GemmKernel> {
    let can_run = |c: &&Candidate| (c.can_run)(&gpu.caps(), product).is_ok();
    let kernels = CANDIDATES.iter().filter(can_run).map(|c| c.kernel);
    kernels.filter(|kernel| rejection(gpu, product, *kernel).is_none()).collect()
}

/// The kernel for a product on this adapter, and why in words.
pub fn choice(gpu: &Gpu, product: &Product) -> (GemmKernel, String) {
    let mut passed = Vec::new();
    let (kernel, why) = decide(gpu, product, |kernel, why| passed.push(format!("{}: {why}", kernel.name())));
    let fastest = || {
        let class = class_name(product.form, product.operands()?, Size::of(product));
        let fastest = gpu.decisions().fastest(&class)?;
        Some(format!("tuned: {:.1}x faster than {}", fastest.times, fastest.than.as_ref()?))
    };
    let words = match why {
        Why::Named if gpu.options().kernel == Some(kernel) => format!("--kernel {}", kernel.name()),
        Why::Tuned => fastest().unwrap_or_else(|| "tuned: no other can run".into()),
        Why::Rule if passed.is_empty() => "by capability".into(),
        _ => format!("by capability; not {}", passed.join("; not ")),
    };
    (kernel, words)
}

/// How the kernel for a product reads its operands.
pub(crate) fn order(gpu: &Gpu, product: &Product) -> Order {
    if choose(gpu, product).0 == GemmKernel::Coop { Order::Panels } else { Order::Rows }
}

/// The kernel chosen for each class of products, and why: `gemm form operands size: kernel (reason)`. Forms that do not differ
/// share a line.
pub fn explain(gpu: &Gpu) -> Vec<String> {
    use DType::{BF16, E4M3, F32};
    let mut lines = Vec::new();
    for (operand, name) in [F32, BF16, E4M3].into_iter().zip(OPERANDS) {
        for size in Size::ALL {
            let of = |form| choice(gpu, &Product { form, operands: [operand; 2], sizes: size.example(form) });
            let all: Vec<_> = Form::ALL.into_iter().map(|form| (form, of(form))).collect();
            let mut told = Vec::new();
            for (_, choice) in &all {
                if told.contains(&choice) {
                    continue;
                }
                let forms: Vec<_> = all.iter().filter(|(_, c)| c == choice).map(|(f, _)| f.name()).collect();
                let (kernel, why) = choice;
                let forms = forms.join(" ");
                lines.push(format!("gemm {forms} {name} {}: {} ({why})", size.name(), kernel.name()));
                told.push(choice);
            }
        }
    }
    lines
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
            let product = Product { form, operands: [DType::F32; 2], sizes };
            assert_eq!(Size::of(&product), class, "{product:?}");
        }
        for form in Form::ALL {
            for size in Size::ALL {
                let product = Product { form, operands: [DType::F32; 2], sizes: size.example(form) };
                assert_eq!(Size::of(&product), size, "{product:?}");
            }
        }
    }
}

//! Which kernel computes a product: the table of candidates, and the rules of choice by adapter, operands and shape.

use super::panels::Order;
use super::{gemm_coop, gemm_tiled};
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
const CANDIDATES: [Candidate; 3] = [
    Candidate { kernel: GemmKernel::Coop, can_run: coop_can_run, pays: coop_pays },
    Candidate { kernel: GemmKernel::Tiled, can_run: tiled_can_run, pays: tiled_pays },
    Candidate { kernel: GemmKernel::Scalar, can_run: |_, _| Ok(()), pays: |_, _| Ok(()) },
];

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

/// Why a kernel was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// `--kernel` names it, or names one that cannot compute this product.
    Named,
    /// It is the first of the table that can run and pays.
    Rule,
}

/// The kernel for a product on this adapter, and why: what `--kernel` names, if it can run; else by rule.
pub(super) fn choose(gpu: &Gpu, product: &Product) -> (GemmKernel, Why) {
    decide(gpu, product, |_, _| ())
}

/// [`choose`]; `passed` hears of every candidate that was not taken, and why.
fn decide(
    gpu: &Gpu,
    product: &Product,
    mut passed: impl FnMut(GemmKernel, &'static str),
) -> (GemmKernel, Why) {
    let (options, caps) = (gpu.options(), gpu.caps());
    for candidate in &CANDIDATES {
        let kernel = candidate.kernel;
        if let Err(why) = (candidate.can_run)(&caps, product) {
            passed(kernel, if options.no_coop && kernel == GemmKernel::Coop { "--no-coop" } else { why });
        } else if options.kernel == Some(kernel) {
            return (kernel, Why::Named);
        } else if options.kernel.is_some() {
            passed(kernel, "not what --kernel names");
        } else if let Err(why) = (candidate.pays)(&caps, product) {
            passed(kernel, why);
        } else {
            return (kernel, Why::Rule);
        }
    }
    (GemmKernel::Scalar, Why::Named)
}

/// The kernel for a product on this adapter, and why in words.
pub fn choice(gpu: &Gpu, product: &Product) -> (GemmKernel, String) {
    let mut passed = Vec::new();
    let (kernel, why) = decide(gpu, product, |kernel, why| passed.push(format!("{}: {why}", kernel.name())));
    let words = match why {
        Why::Named if gpu.options().kernel == Some(kernel) => format!("--kernel {}", kernel.name()),
        Why::Rule if passed.is_empty() => "by capability".into(),
        _ => format!("by capability; not {}", passed.join("; not ")),
    };
    (kernel, words)
}

/// How the kernel for a product reads its operands.
pub(crate) fn order(gpu: &Gpu, product: &Product) -> Order {
    if choose(gpu, product).0 == GemmKernel::Coop { Order::Panels } else { Order::Rows }
}

/// The kernel chosen for each class of products, and why: `gemm operands, shape: kernel (reason)`.
pub fn explain(gpu: &Gpu) -> Vec<String> {
    use DType::{BF16, E4M3, E5M2, F32};
    let classes = [("large", 4096), ("below 16 in a dimension", 8)];
    let line = |operands: [DType; 2], (class, edge): (&str, usize)| {
        let (kernel, why) = choice(gpu, &Product { form: Form::Nt, operands, sizes: [edge; 3] });
        format!("gemm {} x {}, {class}: {} ({why})", operands[0], operands[1], kernel.name())
    };
    let operands = [[F32, F32], [BF16, BF16], [E4M3, E4M3], [E5M2, E4M3]];
    operands.into_iter().flat_map(|o| classes.map(|class| line(o, class))).collect()
}

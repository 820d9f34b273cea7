//! What `moe8 tune` tries: a kernel on a class of calls of an op that has several.

use super::attention;
use crate::Result;
use crate::bench::attention::Attention as AttentionBench;
use crate::bench::data::Split;
use crate::bench::gemm::{Linear, Pass};
use crate::bench::memory::quantizers;
use crate::bench::runner::{Case, Runner, Settings};
use crate::bench::step::Precision;
use crate::gpu::{GemmKernel, Gpu, Options, QuantizeKernel};
use crate::num::DType;
use crate::ops::attention::Shape;
use crate::ops::attention_choice::{self, Attention};
use crate::ops::choice::{Call, candidates};
use crate::ops::gemm_choice::{Form, Product, Size};
use crate::ops::quantize_choice::{Axes, Quantization};
use crate::tensor::Tensor;
use std::time::Duration;

/// A kernel of any op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnyKernel {
    /// Of products and attention.
    Matrix(GemmKernel),
    /// Of quantizers.
    Quantizer(QuantizeKernel),
}

impl AnyKernel {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            AnyKernel::Matrix(kernel) => kernel.name(),
            AnyKernel::Quantizer(kernel) => kernel.name(),
        }
    }

    /// `options` that demand it.
    pub fn demanded(self, options: Options) -> Options {
        match self {
            AnyKernel::Matrix(kernel) => Options { kernel: Some(kernel), ..options },
            AnyKernel::Quantizer(kernel) => Options { quantizer: Some(kernel), ..options },
        }
    }
}

/// A class of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A product of a linear layer.
    Product {
        /// The operands.
        precision: Precision,
        /// Which of the three.
        pass: Pass,
        /// Its size.
        size: Size,
    },
    /// Attention of bf16 operands.
    Attention {
        /// Forward or backward.
        pass: attention_choice::Pass,
        /// Elements of a head: 16, 32, 64 or 128.
        head_dim: usize,
    },
    /// Quantization of bf16 to e4m3.
    Quantization {
        /// Along what.
        axes: Axes,
        /// Rows of at most 512 columns.
        narrow: bool,
    },
}

/// A kernel and the class of calls that it is tried on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// The kernel.
    pub kernel: AnyKernel,
    /// The class.
    pub subject: Subject,
}

impl Trial {
    /// Every kernel on every class.
    pub fn all() -> Vec<Trial> {
        let mut all = Vec::new();
        for kernel in GemmKernel::ALL.map(AnyKernel::Matrix) {
            for precision in Precision::ALL {
                for size in Size::ALL {
                    let subject = |pass| Subject::Product { precision, pass, size };
                    all.extend(Pass::ALL.map(|pass| Trial { kernel, subject: subject(pass) }));
                }
            }
            let of_attention = matches!(kernel, AnyKernel::Matrix(GemmKernel::Scalar | GemmKernel::Coop));
            for head_dim in [16, 32, 64, 128].into_iter().filter(|_| of_attention) {
                let subject = |pass| Subject::Attention { pass, head_dim };
                all.extend(attention_choice::Pass::ALL.map(|pass| Trial { kernel, subject: subject(pass) }));
            }
        }
        for kernel in QuantizeKernel::ALL.map(AnyKernel::Quantizer) {
            for narrow in [true, false] {
                let subject = |axes| Subject::Quantization { axes, narrow };
                all.extend(Axes::ALL.map(|axes| Trial { kernel, subject: subject(axes) }));
            }
        }
        all
    }

    /// What the kernel is rejected for.
    pub fn op(&self) -> String {
        self.subject.op_and_class().0
    }

    /// What the fastest kernel is kept for.
    pub fn class(&self) -> String {
        self.subject.op_and_class().1
    }

    /// Whether the kernel may be tried on `gpu`.
    pub(super) fn can_run(&self, gpu: &Gpu) -> Result<bool> {
        Ok(match (self.subject, self.kernel) {
            (Subject::Product { precision, pass, size }, AnyKernel::Matrix(kernel)) => {
                candidates(gpu, &product(precision, pass, size)).contains(&kernel)
            }
            (Subject::Attention { pass, head_dim }, AnyKernel::Matrix(kernel)) => {
                candidates(gpu, &call(pass, head_dim)).contains(&kernel)
            }
            (Subject::Quantization { axes, narrow }, AnyKernel::Quantizer(kernel)) => {
                let x = Tensor::empty(&gpu.planner(), "x", &[1, width(narrow)], DType::BF16)?;
                candidates(gpu, &Quantization::of(gpu, &x, axes)).contains(&kernel)
            }
            _ => false,
        })
    }

    /// Milliseconds, or what is wrong with a result.
    pub(super) fn run(
        &self,
        gpu: &Gpu,
        spoil: &dyn Fn(&Trial, Case) -> Case,
    ) -> Result<std::result::Result<f64, String>> {
        let software = gpu.caps().software;
        let (small, timed) = match self.subject {
            Subject::Product { precision, pass, size } => products(gpu, precision, pass, size)?,
            Subject::Attention { pass, head_dim } => {
                let shape = if software { [1, 64, 4, 2, head_dim] } else { [2, 2048, 16, 4, head_dim] };
                let bench = AttentionBench::new(gpu, shape, DType::BF16)?;
                let timed = match pass {
                    attention_choice::Pass::Forward => bench.forward(),
                    attention_choice::Pass::Backward => bench.backward(gpu)?,
                };
                (attention::cases(gpu, pass, head_dim)?, timed)
            }
            Subject::Quantization { axes, narrow } => quantizations(gpu, axes, narrow)?,
        };
        let small: Vec<Case> = small.into_iter().map(|case| spoil(self, case)).collect();
        let timed = spoil(self, timed);
        let planner = gpu.planner();
        small.iter().chain([&timed]).try_for_each(|case| (case.run)(&planner).map(drop))?;
        gpu.prepare(&planner)?;
        for case in &small {
            let results = (case.run)(gpu)?;
            if let Some(wrong) = (case.check)(gpu, &results)?.wrong {
                return Ok(Err(format!("a wrong result ({} groups, {}): {wrong}", case.groups, case.shape)));
            }
        }
        let row = Runner::with(gpu, settings(gpu)).measure_case(&timed)?;
        Ok(row.min_ms.ok_or_else(|| format!("a wrong result: {}", row.failed.unwrap_or_default())))
    }
}

impl Subject {
    fn op_and_class(&self) -> (String, String) {
        fn of(call: &impl Call) -> (String, String) {
            (call.op(), call.class())
        }
        match *self {
            Subject::Product { precision, pass, size } => of(&product(precision, pass, size)),
            Subject::Attention { pass, head_dim } => of(&call(pass, head_dim)),
            Subject::Quantization { axes, narrow } => of(&Quantization::of_width(width(narrow), axes)),
        }
    }
}

/// A product of its class.
fn product(precision: Precision, pass: Pass, size: Size) -> Product {
    let operand = match precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::BF16,
        Precision::Fp8 => DType::E4M3,
    };
    let form = match pass {
        Pass::Forward => Form::Nt,
        Pass::Input => Form::Nn,
        Pass::Weight => Form::Tn,
    };
    Product { form, operands: [operand; 2], sizes: size.example(form), groups: None }
}

/// Attention of its class.
fn call(pass: attention_choice::Pass, head_dim: usize) -> Attention {
    let shape = Shape { batch: 1, seq: 2048, heads: 16, kv_heads: 4, head_dim, block: None };
    Attention { pass, dtype: DType::BF16, shape }
}

/// Columns of a tensor of its class: whole units of eight.
fn width(narrow: bool) -> usize {
    if narrow { 256 } else { 4096 }
}

/// Small ragged groups, and the case to be timed.
fn products(gpu: &Gpu, precision: Precision, pass: Pass, size: Size) -> Result<(Vec<Case>, Case)> {
    // M, K, N of a layer whose three products are all of this size.
    let shape = match (size, gpu.caps().software) {
        (Size::Narrow, false) => [4096, 4096, 8],
        (Size::Thin, false) => [4096, 1024, 32],
        (Size::Small, false) => [2048, 512, 512],
        (Size::Large, false) => [4096, 4096, 4096],
        (Size::Narrow, true) => [256, 128, 8],
        (Size::Thin, true) => [256, 128, 32],
        (Size::Small, true) => [128, 64, 96],
        // Smaller than the class: what counts there is seconds.
        (Size::Large, true) => [384, 256, 256],
    };
    let width = if size == Size::Narrow { 9 } else { 68 };
    let small = Linear::new(gpu, [197, 100, width], Some(&ragged()), precision)?;
    let timed = Linear::new(gpu, shape, None, precision)?;
    Ok((vec![small.product(gpu, pass)?], timed.product(gpu, pass)?))
}

fn ragged() -> Split {
    Split { name: "ragged".into(), sizes: vec![130, 0, 1, 66] }
}

/// Small ragged groups and weights, and the case to be timed.
fn quantizations(gpu: &Gpu, axes: Axes, narrow: bool) -> Result<(Vec<Case>, Case)> {
    let names = match axes {
        Axes::Rows => &["quantize_rowwise"][..],
        Axes::Columns => &["quantize_colwise", "quantize_weight_colwise"],
        Axes::Both => &["quantize_both", "quantize_weight_both"],
    };
    let wanted = |case: &Case| names.contains(&case.op.as_str());
    // One unit past a whole number of lanes.
    let small = if narrow { 264 } else { 1032 };
    let mut ragged = quantizers(gpu, (197, small), [3, 21, small], &ragged())?;
    ragged.retain(wanted);
    // A weight is ragged in its own way.
    ragged.iter_mut().for_each(|case| case.groups = "ragged".into());
    let rows = if gpu.caps().software { 64 } else { 4096 };
    let timed = quantizers(gpu, (rows, width(narrow)), [2, 8, width(narrow)], &Split::uniform(rows, 8))?;
    let timed = timed.into_iter().find(wanted).expect("each axis has a case");
    Ok((ragged, timed))
}

/// Shorter than a benchmark's: kernels that differ by a few percent may be taken for each other. The fastest repetition counts.
fn settings(gpu: &Gpu) -> Settings {
    let ms = Duration::from_millis;
    // The host has just made the operands, and a GPU that has idled runs slowly for a while.
    let warm_up = if gpu.caps().software { ms(5) } else { ms(500) };
    Settings { warm_up, warm_up_again: warm_up, repetitions: 3, window: ms(15), ..Settings::of(gpu) }
}

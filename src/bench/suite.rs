//! Which cases belong to an op, and their default shapes.

use super::attention::Attention;
use super::data::{Split, parse_shape};
use super::gemm::{Linear, Pass};
use super::recorded::Recorded;
use super::row::Row;
use super::runner::{Case, Runner, Settings};
use super::step::{self, Precision};
use super::{activations, fused, memory, moe, tables};
use crate::config::Config;
use crate::gpu::Gpu;
use crate::num::DType;
use crate::{Error, Result};
use std::path::PathBuf;

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Memory bandwidth.
    Copy,
    /// The three quantizers.
    Quantize,
    /// Dense GEMMs.
    Gemm,
    /// Grouped GEMMs.
    Grouped,
    /// Attention.
    Attention,
    /// The differentiable linear op.
    Linear,
    /// An MoE layer.
    Moe,
    /// RMSNorm, forward and backward.
    RmsNorm,
    /// Rotary position embedding.
    Rope,
    /// SwiGLU, forward and backward.
    SwiGlu,
    /// Rows to experts and back, with gradients.
    Dispatch,
    /// Cross entropy with its gradient.
    CrossEntropy,
    /// Token embedding, forward and backward.
    Embedding,
    /// One AdamW update.
    AdamW,
    /// Sums and casts.
    Elementwise,
    /// A training step.
    Step,
}

impl Op {
    /// All, in the order of the standard suite.
    pub const ALL: [Op; 16] = [
        Op::Copy,
        Op::Quantize,
        Op::RmsNorm,
        Op::Rope,
        Op::SwiGlu,
        Op::Dispatch,
        Op::CrossEntropy,
        Op::Embedding,
        Op::AdamW,
        Op::Elementwise,
        Op::Gemm,
        Op::Grouped,
        Op::Attention,
        Op::Linear,
        Op::Moe,
        Op::Step,
    ];

    /// Whether its cases are bound by memory: their rates are compared with a copy's.
    fn is_bound_by_memory(self) -> bool {
        use Op::{AdamW, CrossEntropy, Dispatch, Elementwise, Embedding, Quantize, RmsNorm, Rope, SwiGlu};
        let all = [Quantize, RmsNorm, Rope, SwiGlu, Dispatch, CrossEntropy, Embedding, AdamW, Elementwise];
        all.contains(&self)
    }

    /// What the numbers of `--shape` are.
    pub fn form(self) -> &'static str {
        match self {
            Op::Copy => "BYTES",
            Op::Quantize => "MxK",
            Op::Gemm => "MxKxN",
            Op::Grouped | Op::Linear => "MxKxNxE",
            Op::Attention => "BxSxHxKVxD",
            Op::Moe => "TxDxFxE",
            Op::RmsNorm | Op::Elementwise => "TxD",
            Op::Rope => "BxSxHxD",
            Op::SwiGlu => "TxF",
            Op::Dispatch => "TxDxExK",
            Op::CrossEntropy => "TxV",
            Op::Embedding => "TxDxV",
            Op::AdamW => "N",
            Op::Step => "BxS",
        }
    }

    /// Precisions that it can be measured in, other than its only one.
    pub fn precisions(self) -> &'static [Precision] {
        match self {
            Op::Copy | Op::Quantize => &[],
            Op::Gemm | Op::Grouped | Op::Linear | Op::Moe | Op::Step => &Precision::ALL,
            _ => &Precision::ALL[..2],
        }
    }

    /// Whether its rows fall into groups that can be chosen.
    pub fn has_groups(self) -> bool {
        matches!(self, Op::Quantize | Op::Grouped | Op::Linear)
    }

    /// Shapes when none is asked for: real models' on a GPU, seconds of work on a software adapter.
    fn shapes(self, software: bool) -> &'static [&'static str] {
        match (self, software) {
            (Op::Copy, _) => &[],
            (Op::Quantize, true) => &["512x512"],
            (Op::Quantize, false) => &["16384x5120"],
            (Op::Gemm, true) => &["256x256x256"],
            (Op::Gemm, false) => &["4096x4096x4096", "8192x8192x8192"],
            (Op::Grouped, true) => &["256x128x128x4"],
            (Op::Grouped, false) => {
                &["16384x4096x4096x8", "16384x5120x8192x8", "16384x8192x5120x8", "32768x7168x2048x8"]
            }
            (Op::Attention, true) => &["1x128x4x2x32"],
            (Op::Attention, false) => &["1x8192x16x4x128", "8x2048x16x16x16"],
            (Op::Linear, true) => &["256x128x128x4"],
            (Op::Linear, false) => &["16384x256x512x8", "16384x5120x8192x8"],
            (Op::Moe, true) => &["256x64x128x4"],
            (Op::Moe, false) => &["16384x256x512x8", "16384x2048x4096x8"],
            (Op::RmsNorm | Op::SwiGlu | Op::Elementwise, true) => &["512x512"],
            (Op::RmsNorm | Op::Elementwise, false) => &["16384x5120", "16384x256"],
            (Op::SwiGlu, false) => &["16384x8192", "16384x512"],
            (Op::Rope, true) => &["2x128x4x32"],
            (Op::Rope, false) => &["8x2048x40x128", "8x2048x16x16"],
            (Op::Dispatch, true) => &["512x128x4x2"],
            (Op::Dispatch, false) => &["16384x5120x8x1", "16384x2048x64x4", "16384x256x8x1"],
            (Op::CrossEntropy, true) => &["256x1000"],
            (Op::CrossEntropy, false) => &["4096x32768", "512x202048", "16384x2256"],
            (Op::Embedding, true) => &["512x64x1000"],
            (Op::Embedding, false) => &["16384x5120x32768", "16384x256x2256"],
            (Op::AdamW, true) => &["262144"],
            (Op::AdamW, false) => &["33554432"],
            (Op::Step, true) => &["2x64"],
            (Op::Step, false) => &["8x2048"],
        }
    }
}

/// Groups and weights of the quantizers' cases, where no file of groups says how many.
const EXPERTS: usize = 8;

/// How rows fall into groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Groups {
    /// Equal.
    Uniform,
    /// Halving.
    Ragged,
    /// Equal, then halving.
    Both,
    /// As recorded.
    Recorded(Recorded),
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Which ops.
    pub ops: Vec<Op>,
    /// Shapes, in the form of the op; none is the op's own.
    pub shapes: Vec<String>,
    /// Groups of grouped ops.
    pub groups: Groups,
    /// Precisions; empty is those that suit the op.
    pub precisions: Vec<Precision>,
    /// Configuration file of a training step; none is the debug model.
    pub config: Option<PathBuf>,
    /// Keys of the configuration of a training step.
    pub overrides: Vec<String>,
    /// Say which kernels are chosen, and why.
    pub explain: bool,
}

/// Measures a plan; rows in its order.
///
/// # Errors
/// A shape that the op cannot have, the device, or its memory. A wrong result is no error here but a row.
pub fn run(gpu: &Gpu, plan: &Plan) -> Result<Vec<Row>> {
    run_with(gpu, plan, Settings::of(gpu))
}

/// [`run`] with other settings.
///
/// # Errors
/// As [`run`].
pub fn run_with(gpu: &Gpu, plan: &Plan, settings: Settings) -> Result<Vec<Row>> {
    let mut runner = Runner::with(gpu, settings).explaining(plan.explain);
    for op in &plan.ops {
        let defaults = op.shapes(gpu.caps().software).iter().map(ToString::to_string);
        let shapes = if plan.shapes.is_empty() { defaults.collect() } else { plan.shapes.clone() };
        if *op == Op::Copy && shapes.is_empty() {
            runner.case(&memory::copy(gpu, copy_bytes(&runner))?)?;
        }
        if *op == Op::Step && plan.config.is_some() && plan.shapes.is_empty() {
            steps(&mut runner, plan, None)?;
            continue;
        }
        for shape in shapes {
            op_at(&mut runner, plan, *op, &shape).map_err(|e| name_shape(e, *op))?;
        }
    }
    let has = |ops: &[Op]| plan.ops.iter().any(|o| ops.contains(o));
    let by_memory = plan.ops.iter().any(|o| o.is_bound_by_memory());
    let copy = match by_memory && !has(&[Op::Copy]) {
        true => runner.measure_case(&memory::copy(gpu, copy_bytes(&runner))?)?.gbps.map(|g| g * 1e9),
        false => None,
    };
    let needs_gemm = has(&[Op::Attention, Op::Linear, Op::Moe, Op::Step]) && !has(&[Op::Gemm, Op::Grouped]);
    let gemm = if needs_gemm { peak(&mut runner)? } else { None };
    Ok(runner.finish(copy, gemm))
}

/// An error about sizes says what to do as a benchmark's user can: training keys are not among it, but for steps.
fn name_shape(error: Error, op: Op) -> Error {
    let shape = format!("--shape {}", op.form());
    match error {
        Error::User { what, hint } if hint.contains("training.") || hint.contains("model.") => {
            let hint = match op {
                Op::Step => format!("{hint}; or choose other sizes with {shape}"),
                _ => format!(
                    "choose other sizes with {shape}, or another adapter with --device (see `moe8 devices`)"
                ),
            };
            Error::user(what, hint)
        }
        other => other,
    }
}

/// As much as one binding holds, up to what the settings say.
fn copy_bytes(runner: &Runner) -> usize {
    let caps = runner.gpu().caps();
    let limit = usize::try_from(caps.max_binding.min(caps.max_buffer)).unwrap_or(usize::MAX);
    limit.min(runner.settings().most_copied)
}

/// Operations per second of a dense GEMM in bf16, the yardstick of runs that measure none.
fn peak(runner: &mut Runner) -> Result<Option<f64>> {
    let gpu = runner.gpu().clone();
    let linear = Linear::new(&gpu, [runner.settings().product; 3], None, Precision::Bf16)?;
    Ok(runner.measure_case(&linear.product(&gpu, Pass::Forward)?)?.tflops.map(|t| t * 1e12))
}

/// Exactly `N` numbers.
fn numbers<const N: usize>(op: Op, shape: &str) -> Result<[usize; N]> {
    let all = parse_shape(shape, op.form())?;
    Ok(all.try_into().expect("as many as the form has"))
}

/// Measures one op at one shape.
fn op_at(runner: &mut Runner, plan: &Plan, op: Op, shape: &str) -> Result<()> {
    let gpu = runner.gpu().clone();
    match op {
        Op::Copy => runner.case(&memory::copy(&gpu, count(shape, "bytes")?)?),
        Op::Quantize => quantizers(runner, plan, numbers(op, shape)?),
        Op::Gemm => plan.precisions(&Precision::ALL).into_iter().try_for_each(|precision| {
            let linear = Linear::new(&gpu, numbers(op, shape)?, None, precision)?;
            products(runner, &linear, precision)
        }),
        Op::Grouped | Op::Linear => grouped(runner, plan, op, numbers(op, shape)?),
        Op::Attention => plan.precisions(&[Precision::Bf16]).into_iter().try_for_each(|precision| {
            let attention = Attention::new(&gpu, numbers(op, shape)?, dtype(precision))?;
            runner.case(&attention.forward())?;
            runner.case(&attention.backward(&gpu)?)
        }),
        Op::Moe => plan
            .precisions(&[Precision::Bf16, Precision::Fp8])
            .into_iter()
            .try_for_each(|precision| runner.case(&moe::case(&gpu, numbers(op, shape)?, precision)?)),
        Op::AdamW => plan
            .precisions(&[Precision::F32, Precision::Bf16])
            .into_iter()
            .try_for_each(|p| runner.case(&tables::update(&gpu, count(shape, "parameters")?, dtype(p))?)),
        op if op.is_bound_by_memory() => plan.precisions(&[Precision::Bf16]).into_iter().try_for_each(|p| {
            let cases = by_memory(&gpu, op, shape, dtype(p))?;
            cases.iter().try_for_each(|case| runner.case(case))
        }),
        _ => steps(runner, plan, Some(shape)),
    }
}

impl Plan {
    /// Whether the shapes that were asked for have the rows and groups that are replayed.
    ///
    /// # Errors
    /// A shape that contradicts them, or is not of the op's form.
    pub fn check_groups(&self) -> Result<()> {
        let Groups::Recorded(recorded) = &self.groups else { return Ok(()) };
        for op in self.ops.iter().filter(|op| op.has_groups()) {
            let mut shapes = self.shapes.iter();
            shapes.try_for_each(|shape| recorded.check_shape(&parse_shape(shape, op.form())?))?;
        }
        Ok(())
    }

    /// The configuration of a training step; without a shape its sizes are the file's.
    ///
    /// # Errors
    /// A shape, file, key or value that the user got wrong.
    pub fn step(&self, precision: Precision, shape: Option<&str>) -> Result<Config> {
        let sizes = shape.map(|shape| numbers(Op::Step, shape)).transpose()?;
        step::config(precision, self.config.as_deref(), sizes.map(|[b, s]| (b, s)), &self.overrides)
    }

    /// What a step's row is called: with the configuration's name, if there is one.
    fn step_name(&self) -> String {
        let stem = self.config.as_ref().and_then(|file| file.file_stem());
        stem.map_or("step".into(), |stem| format!("step {}", stem.to_string_lossy()))
    }

    /// The precisions that were asked for, else those that suit the op.
    fn precisions(&self, defaults: &[Precision]) -> Vec<Precision> {
        if self.precisions.is_empty() { defaults.to_vec() } else { self.precisions.clone() }
    }
}

fn quantizers(runner: &mut Runner, plan: &Plan, [m, k]: [usize; 2]) -> Result<()> {
    let gpu = runner.gpu().clone();
    for (i, split) in splits(plan, m, EXPERTS.min(m)).iter().enumerate() {
        // A file of groups sets experts and rows; weights have as many elements as the rows that meet them.
        let experts = split.sizes.len();
        let weight = [experts, split.rows().div_ceil(experts), k];
        let cases = memory::quantizers(&gpu, (split.rows(), k), weight, split)?;
        // Only columns know of groups.
        let new = cases.iter().filter(|case| i == 0 || case.groups == split.name);
        new.into_iter().try_for_each(|case| runner.case(case))?;
    }
    Ok(())
}

fn grouped(runner: &mut Runner, plan: &Plan, op: Op, [m, k, n, e]: [usize; 4]) -> Result<()> {
    let gpu = runner.gpu().clone();
    let precisions = plan.precisions(&[Precision::Bf16, Precision::Fp8]);
    for split in splits(plan, m, e) {
        let first = Linear::new(&gpu, [split.rows(), k, n], Some(&split), precisions[0])?;
        for &precision in &precisions {
            let linear = first.in_precision(precision);
            match op {
                Op::Linear => runner.case(&linear.op())?,
                _ => products(runner, &linear, precision)?,
            }
        }
    }
    Ok(())
}

/// Training steps in the plan's precisions; those of a file leave out f32 unless it is asked for.
fn steps(runner: &mut Runner, plan: &Plan, shape: Option<&str>) -> Result<()> {
    let defaults = if plan.config.is_some() { &Precision::ALL[1..] } else { &Precision::ALL[..] };
    plan.precisions(defaults).into_iter().try_for_each(|precision| {
        let config = plan.step(precision, shape)?;
        step::measure(runner, &config, &plan.step_name(), precision)
    })
}

/// Of activations under a precision.
fn dtype(precision: Precision) -> DType {
    if precision == Precision::F32 { DType::F32 } else { DType::BF16 }
}

/// The cases of an op beside the products and quantizers.
fn by_memory(gpu: &Gpu, op: Op, shape: &str, dtype: DType) -> Result<Vec<Case>> {
    match op {
        Op::RmsNorm => {
            let mut all = activations::norms(gpu, numbers(op, shape)?, dtype)?;
            if dtype == DType::BF16 {
                all.push(fused::norm(gpu, numbers(op, shape)?)?);
            }
            Ok(all)
        }
        Op::Rope => Ok(vec![activations::rotation(gpu, numbers(op, shape)?, dtype)?]),
        Op::SwiGlu => {
            let mut all = activations::gates(gpu, numbers(op, shape)?, dtype)?;
            if dtype == DType::BF16 {
                all.push(fused::gate(gpu, numbers(op, shape)?)?);
            }
            Ok(all)
        }
        Op::Dispatch => tables::routes(gpu, numbers(op, shape)?, dtype),
        Op::CrossEntropy => Ok(vec![activations::loss(gpu, numbers(op, shape)?, dtype)?]),
        Op::Embedding => tables::embeddings(gpu, numbers(op, shape)?, dtype),
        _ => activations::elements(gpu, numbers(op, shape)?, dtype),
    }
}

/// A number of bytes or parameters may be larger than a dimension.
fn count(text: &str, of: &str) -> Result<usize> {
    let count = text.trim().parse().ok().filter(|n| (1..=1 << 40).contains(n));
    count
        .ok_or_else(|| Error::user(format!("--shape {text}: not a number of {of}"), "write it as 1073741824"))
}

/// All three products; in f32, which no target needs, the first alone.
fn products(runner: &mut Runner, linear: &std::rc::Rc<Linear>, precision: Precision) -> Result<()> {
    let gpu = runner.gpu().clone();
    let passes = if precision == Precision::F32 { &Pass::ALL[..1] } else { &Pass::ALL[..] };
    for pass in passes {
        runner.case(&linear.product(&gpu, *pass)?)?;
        if let Some(case) = linear.product_of_halves(&gpu, *pass)? {
            runner.case(&case)?;
        }
    }
    Ok(())
}

fn splits(plan: &Plan, rows: usize, groups: usize) -> Vec<Split> {
    match &plan.groups {
        Groups::Uniform => vec![Split::uniform(rows, groups)],
        Groups::Ragged => vec![Split::ragged(rows, groups)],
        Groups::Both => vec![Split::uniform(rows, groups), Split::ragged(rows, groups)],
        Groups::Recorded(all) => all.layers.clone(),
    }
}

//! `moe8 bench`: measure kernels and steps.

use super::RunOptions;
use super::args::{BenchArgs, BenchOp};
use super::strangers::{Asked, refuse};
use crate::atomic::{WRITE_HINT, check_target, write_atomically};
use crate::bench::profile;
use crate::bench::recorded::Recorded;
use crate::bench::row::{self, Row};
use crate::bench::step::{self, Precision};
use crate::bench::suite::{self, Groups, Op, Plan};
use crate::gpu::{Choice, Gpu};
use crate::{Error, Result};
use clap::ValueEnum as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Steps that a profile adds up.
const PROFILED_STEPS: usize = 5;
/// Where a suite's rows go unless another file is named.
const SUITE_FILE: &str = "bench.json";

/// Measures what `args` ask for and prints it on standard output.
///
/// # Errors
/// An adapter that was not asked for, its limits, a result that is wrong, a file that cannot be written.
pub fn run(args: &BenchArgs, opts: &RunOptions, overrides: &[String]) -> Result<()> {
    let plan = plan(args, overrides)?;
    let output = args.output.clone().or_else(|| args.suite.as_ref().map(|_| PathBuf::from(SUITE_FILE)));
    if let Some(path) = &output {
        check_target(path)?;
    }
    let gpu = open(args, opts)?;
    if let Groups::Recorded(recorded) = &plan.groups {
        log::info!("{}", recorded.describe());
    }
    if args.profile {
        return profile(&gpu, args, &plan, output.as_deref());
    }
    let rows = suite::run(&gpu, &plan)?;
    print(&match (args.json, args.csv) {
        (true, _) => rows.iter().map(|r| r.json() + "\n").collect(),
        (_, true) => row::csv(&rows),
        _ => row::markdown(&rows),
    });
    if let Some(path) = output {
        save(&path, &rows.iter().map(Row::json).collect::<Vec<_>>())?;
    }
    verdict(&rows)
}

/// A closed pipe is no reason to fail.
fn print(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

fn save(path: &Path, rows: &[String]) -> Result<()> {
    let text = row::file(rows);
    write_atomically(path, |out| out.write_all(text.as_bytes()).map_err(|e| Error::io(path, e, WRITE_HINT)))?;
    log::info!("wrote {} rows to {}", rows.len(), path.display());
    Ok(())
}

/// An error if a row is wrong.
fn verdict(rows: &[Row]) -> Result<()> {
    let wrong: Vec<&Row> = rows.iter().filter(|r| r.failed.is_some()).collect();
    let Some(first) = wrong.first() else { return Ok(()) };
    let why = first.failed.as_deref().unwrap_or_default();
    Err(Error::user(
        format!("{} of {} results are wrong; {} {}: {why}", wrong.len(), rows.len(), first.op, first.shape),
        "run again with --safe-shaders; if that helps, the driver and a kernel disagree: please report both",
    ))
}

/// Opens the adapter; a software one only if that was asked for.
fn open(args: &BenchArgs, opts: &RunOptions) -> Result<Gpu> {
    let options = opts.run_options();
    let gpu_options = crate::gpu::Options { profile: args.profile, ..options.gpu };
    let gpu = Gpu::open_with(&options.device, gpu_options)?;
    if gpu.caps().software && !args.allow_software {
        return Err(Error::user(
            format!("{} is a software adapter: its times say nothing about a GPU", gpu.name()),
            "choose a GPU with --device (see `moe8 devices`), or add --allow-software",
        ));
    }
    Ok(gpu)
}

/// What `args` ask for.
///
/// # Errors
/// Nothing that is named, options that do not go together or that the named ops do not have, a file of groups that is none.
pub fn plan(args: &BenchArgs, overrides: &[String]) -> Result<Plan> {
    let ops = match (args.op.as_slice(), &args.suite) {
        ([], Some(_)) => Op::ALL.to_vec(),
        (named @ [_, ..], None) => named.iter().copied().map(library).collect(),
        ([], None) => {
            let what = "nothing is named that is to be measured";
            return Err(Error::user(what, "such as `moe8 bench grouped`, or `moe8 bench --suite standard`"));
        }
        ([op, ..], Some(suite)) => {
            let op = op.to_possible_value().map_or(String::new(), |value| value.get_name().to_string());
            return Err(Error::user(
                format!("--suite {suite} measures everything, and {op} is named beside it"),
                format!("leave out {op}, or leave out --suite"),
            ));
        }
    };
    if ops.len() > 1 && !args.shape.is_empty() {
        return Err(Error::user(
            "a shape is of one op: a suite has its own",
            "leave out --shape, or name one op",
        ));
    }
    if args.profile && ops != [Op::Step] {
        return Err(Error::user("--profile is for training steps", "write `moe8 bench step --profile`"));
    }
    refuse_strangers(args, &ops, overrides)?;
    let groups = match args.groups.as_deref() {
        None => Groups::Both,
        Some("uniform") => Groups::Uniform,
        Some("ragged") => Groups::Ragged,
        Some(file) => Groups::Recorded(Recorded::read(Path::new(file))?),
    };
    let named = Precision::ALL.into_iter().filter(|p| Some(p.name()) == args.precision.as_deref());
    let plan = Plan {
        ops,
        shapes: args.shape.clone(),
        groups,
        precisions: named.collect(),
        config: args.run.config.clone(),
        overrides: overrides.to_vec(),
        explain: args.run.explain,
    };
    plan.check_groups()?;
    Ok(plan)
}

/// Options that none of `ops` has are errors: nothing passes in silence.
fn refuse_strangers(args: &BenchArgs, ops: &[Op], overrides: &[String]) -> Result<()> {
    let step = |op: &Op| *op == Op::Step;
    let precision = |op: &Op| {
        op.precisions().iter().any(|p| args.precision.as_deref().is_none_or(|name| name == p.name()))
    };
    let of_groups = "the rows of quantize, grouped and op fall into groups";
    let of_precision = "gemm, grouped, op, moe and step have f32, bf16 and fp8; copy and quantize one precision only; \
                        the others f32 and bf16";
    let of_config =
        "a configuration and its keys are for `moe8 bench step`; other sizes are chosen with --shape";
    let named = args.precision.as_ref().map(|p| format!("--precision {p}"));
    let key = overrides.first().cloned();
    let looks_at = "it looks at the ops of a model: those of step and moe";
    let model = ops.iter().any(|op| step(op) || *op == Op::Moe);
    let ranks = args.run.ranks.is_some_and(|n| n != 1);
    let asked = [
        Asked::new(args.groups.is_some(), "--groups", ops.iter().any(|op| op.has_groups()), of_groups),
        Asked { given: named, fits: ops.iter().any(precision), hint: of_precision },
        Asked::new(args.run.config.is_some(), "--config", ops.iter().any(step), of_config),
        Asked { given: key, fits: ops.iter().any(step), hint: of_config },
        Asked::new(ranks, "--ranks", false, "a benchmark has one rank"),
        Asked::new(args.run.check_nan, "--check-nan", model, looks_at),
    ];
    refuse(asked, "what is measured here")
}

fn library(op: BenchOp) -> Op {
    match op {
        BenchOp::Copy => Op::Copy,
        BenchOp::Quantize => Op::Quantize,
        BenchOp::Gemm => Op::Gemm,
        BenchOp::Grouped => Op::Grouped,
        BenchOp::Attention => Op::Attention,
        BenchOp::Op => Op::Linear,
        BenchOp::Moe => Op::Moe,
        BenchOp::RmsNorm => Op::RmsNorm,
        BenchOp::Rope => Op::Rope,
        BenchOp::SwiGlu => Op::SwiGlu,
        BenchOp::Dispatch => Op::Dispatch,
        BenchOp::CrossEntropy => Op::CrossEntropy,
        BenchOp::Embedding => Op::Embedding,
        BenchOp::AdamW => Op::AdamW,
        BenchOp::Elementwise => Op::Elementwise,
        BenchOp::Step => Op::Step,
    }
}

/// Prints where the time of a step goes, and keeps it in `output`.
fn profile(gpu: &Gpu, args: &BenchArgs, plan: &Plan, output: Option<&Path>) -> Result<()> {
    let default = if gpu.caps().software { "2x64" } else { "8x2048" };
    let shape = args.shape.first().map(String::as_str).or(plan.config.is_none().then_some(default));
    let precision = plan.precisions.first().copied().unwrap_or(Precision::Fp8);
    let config = plan.step(precision, shape)?;
    if plan.explain {
        let choices = step::planned(gpu, &config)?.choices();
        Choice::lines(choices).iter().for_each(|line| log::info!("{line}"));
    }
    let profile = profile::profile(gpu, &config, PROFILED_STEPS)?;
    let lines = profile.lines();
    let objects: Vec<String> = lines.iter().map(profile::Line::json).collect();
    let (batch, seq) = (config.training.local_batch_size, config.training.seq_len);
    print(&match (args.json, args.csv) {
        (true, _) => objects.iter().map(|line| format!("{line}\n")).collect(),
        (_, true) => profile::csv(&lines),
        _ => format!(
            "{} ({}): step in {}, {batch} x {seq} tokens\n{}\n",
            gpu.name(),
            gpu.driver(),
            precision.name(),
            profile.table()
        ),
    });
    output.map_or(Ok(()), |path| save(path, &objects))
}

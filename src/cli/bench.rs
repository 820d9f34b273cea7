//! `moe8 bench`: measure kernels and steps.

use super::RunOptions;
use super::args::BenchArgs;
use crate::bench::step;
use crate::gpu::Gpu;
use crate::{Error, Result};
use std::io::Write as _;

/// Steps that a profile adds up.
const PROFILED_STEPS: usize = 5;

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

/// Measures what `args` ask for and prints it on standard output.
///
/// # Errors
/// An adapter that was not asked for, its limits, a result that is wrong.
pub fn run(args: &BenchArgs, opts: &RunOptions, overrides: &[String]) -> Result<()> {
    let gpu = open(args, opts)?;
    let sizes = if gpu.caps().software { (2, 64) } else { (8, 2048) };
    let precisions: Vec<_> = match args.precision.as_deref() {
        None => vec![step::Precision::Fp8],
        Some(name) => step::Precision::ALL.into_iter().filter(|p| p.name() == name).collect(),
    };
    let mut out = std::io::stdout().lock();
    for precision in precisions {
        let config = step::config(precision, sizes, overrides)?;
        let profile = step::profile(&gpu, &config, PROFILED_STEPS)?;
        let (batch, seq) = (config.training.local_batch_size, config.training.seq_len);
        // A closed pipe is no reason to fail.
        let _ = writeln!(
            out,
            "{} ({}): step in {}, {batch} x {seq} tokens\n{}",
            gpu.name(),
            gpu.driver(),
            precision.name(),
            profile.table()
        );
    }
    Ok(())
}

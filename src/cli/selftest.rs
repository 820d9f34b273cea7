//! `moe8 selftest`: every matrix kernel that the adapter can run against f64, or their speed.

use super::RunOptions;
use super::args::{SelftestArgs, SelftestTable};
use crate::check;
use crate::gpu::{GemmKernel, Gpu, Options};
use crate::{Error, Result};
use std::io::Write;

/// Runs the tables of ragged products and of attention with each kernel, unchecked and checked shaders, in poisoned memory;
/// with `--time` measures large products instead.
///
/// # Errors
/// A wrong result, or what the device reported.
pub fn run(args: &SelftestArgs, opts: &RunOptions) -> Result<()> {
    let run = opts.run_options();
    let open = |options| Gpu::open_with(&run.device, options);
    let gpu = open(run.gpu.clone())?;
    say(&format!("{}, driver {}, matrix units {}", gpu.name(), gpu.driver(), gpu.caps().matrix_units()));
    if args.time {
        return check::time(&gpu, |t| {
            say(&format!("{:<44} {:<7} {:8.3} ms {:7.1} TFLOP/s", t.case, t.kernel, t.median_ms, t.tflops));
        });
    }
    let can_run = |k: &GemmKernel| *k != GemmKernel::Coop || gpu.caps().coop.is_some();
    let kernels = GemmKernel::ALL.into_iter().filter(can_run);
    let tables = [SelftestTable::Gemm, SelftestTable::Attention];
    // These are kernels of products alone.
    let products_only = |kernel| matches!(kernel, GemmKernel::Tiled | GemmKernel::Narrow);
    let wanted = |kernel: GemmKernel, table: SelftestTable| {
        args.only.is_none_or(|only| only == table)
            && !(products_only(kernel) && table == SelftestTable::Attention)
    };
    let (mut wrong, mut all) = (0, 0);
    for kernel in kernels.filter(|k| run.gpu.kernel.is_none_or(|only| only == *k)) {
        for safe_shaders in [false, true] {
            let gpu = open(Options {
                kernel: Some(kernel),
                safe_shaders,
                poison: true,
                quiet: true,
                ..run.gpu.clone()
            })?;
            for table in tables.into_iter().filter(|t| wanted(kernel, *t)) {
                let outcomes = match table {
                    SelftestTable::Gemm => check::gemm(&gpu)?,
                    SelftestTable::Attention => check::attention(&gpu)?,
                };
                for outcome in outcomes {
                    let verdict = outcome.error.as_ref().map_or("ok".to_string(), |e| format!("WRONG: {e}"));
                    let checks = if safe_shaders { "checked" } else { "unchecked" };
                    say(&format!("{} {checks}: {}: {verdict}", outcome.kernel, outcome.case));
                    all += 1;
                    wrong += usize::from(outcome.error.is_some());
                }
            }
        }
    }
    if wrong > 0 {
        return Err(Error::gpu(
            format!("{wrong} of {all} results are wrong on {}", gpu.name()),
            "use --no-coop if only `coop` is wrong; report this with the lines above",
        ));
    }
    if all == 0 {
        return Err(Error::user(
            "nothing to test: the named kernel is not one of this table",
            "leave out --only or --kernel, or name another kernel",
        ));
    }
    say(&format!("{all} results agree with the reference"));
    Ok(())
}

/// A line on standard output; a closed pipe is no reason to fail.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

//! `moe8 tune`: find the fastest kernels of the adapter, and keep what was found for later runs.

use super::RunOptions;
use crate::check::{AnyKernel, Progress, Trial, tune};
use crate::gpu::{Decisions, FOLDER_HINT, Gpu, Options, no_folder};
use crate::{Error, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal as _, Write as _};

/// Tries every kernel of ops with several on every class of calls.
///
/// # Errors
/// No cache folder to keep the findings in, or an adapter that does not open.
pub fn run(opts: &RunOptions) -> Result<()> {
    let run = opts.run_options();
    let Some(folder) = &run.gpu.cache else {
        return Err(Error::user(
            "there is no folder to keep what is found in",
            "set MOE8_CACHE to one (it is empty or `off`, or there is no cache folder)",
        ));
    };
    if let Some(why) = no_folder(folder) {
        return Err(Error::user(format!("{why}, and what is found is kept there"), FOLDER_HINT));
    }
    // What is kept is for runs with all kernels: wishes for some count in those runs.
    let bare = Options { cache: None, kernel: None, quantizer: None, no_coop: false, ..run.gpu.clone() };
    let gpu = Gpu::open_with(&run.device, bare.clone())?;
    let mut decisions = Decisions::load(folder, gpu.name(), gpu.driver());
    decisions.warn();
    say(&format!("{}, driver {}, matrix units {}", gpu.name(), gpu.driver(), gpu.caps().matrix_units()));
    let kept = decisions.timings().values().map(std::collections::BTreeMap::len).sum::<usize>();
    if kept > 0 {
        say(&format!("{kept} times of an interrupted tuning are kept"));
    }
    drop(gpu);
    let open = |kernel: AnyKernel| Gpu::open_with(&run.device, kernel.demanded(bare.clone()));
    let bar = bar();
    let mut show = |p: Progress<'_>| {
        bar.set_length(p.of as u64);
        bar.set_position(p.done as u64);
        bar.set_message(p.now.to_string());
        if let Some(result) = p.result {
            let line = format!("[{:>3}/{}] {result}", p.done, p.of);
            bar.suspend(|| say(&line));
        }
    };
    let tuned = tune(&Trial::all(), &open, &mut decisions, &|_, case| case, &mut show);
    bar.finish_and_clear();
    tuned?;
    decisions.warn();
    say(&format!("kept in {}", decisions.path().display()));
    Ok(())
}

/// What is being tried, and the time to go; on a terminal only.
fn bar() -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style =
        ProgressStyle::with_template("{bar:30} {pos}/{len}, {eta} to go: {msg}").expect("a fixed template");
    ProgressBar::with_draw_target(Some(1), target).with_style(style)
}

/// A line on standard output; a closed pipe is no reason to fail.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

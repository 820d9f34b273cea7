//! `moe8 tune`: find the fastest kernels of the adapter, and keep what was found for later runs.

use super::RunOptions;
use crate::check::{Trial, tune};
use crate::gpu::{Decisions, Gpu, Options};
use crate::{Error, Result};
use std::io::Write;

/// Tries every matrix kernel on every class of products.
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
    // What is kept is for runs with all kernels: wishes for some count in those runs.
    let bare = Options { cache: None, kernel: None, no_coop: false, ..run.gpu.clone() };
    let gpu = Gpu::open_with(&run.device, bare.clone())?;
    let mut decisions = Decisions::load(folder, gpu.name(), gpu.driver());
    say(&format!("{}, driver {}, matrix units {:?}", gpu.name(), gpu.driver(), gpu.caps().coop));
    drop(gpu);
    let open = |kernel| Gpu::open_with(&run.device, Options { kernel: Some(kernel), ..bare.clone() });
    tune(&Trial::all(), &open, &mut decisions, &|_, case| case, &mut say)?;
    for rejected in decisions.rejected() {
        say(&format!("{}: {} is never used: {}", rejected.op, rejected.kernel, rejected.why));
    }
    say(&format!("kept in {}", decisions.path().display()));
    Ok(())
}

/// A line on standard output; a closed pipe is no reason to fail.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

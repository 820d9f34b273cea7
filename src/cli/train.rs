//! `moe8 train`: train a model.

use super::RunOptions;
use crate::Result;
use crate::config::Config;
use crate::train::run;

/// Trains as `config` says.
///
/// # Errors
/// Everything a user can cause; see [`run::run`].
pub fn run(config: &Config, opts: &RunOptions) -> Result<()> {
    if config.job.print_args {
        for line in config.to_toml().lines() {
            log::info!("{line}");
        }
    }
    run::run(config, &opts.run_options())
}

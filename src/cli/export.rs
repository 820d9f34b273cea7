//! `moe8 export`: write a model's weights to `opts.output`.

use super::RunOptions;
use crate::config::Config;
use crate::{Error, Result};

/// Not there yet: always an error.
pub fn run(_config: &Config, _opts: &RunOptions) -> Result<()> {
    Err(Error::user("`moe8 export` is not in this version yet", "`moe8 config` works"))
}

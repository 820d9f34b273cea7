//! `moe8 compare`: two files of `moe8 bench` side by side.

use super::args::CompareArgs;
use crate::Result;
use crate::bench::{results, row};
use std::io::Write as _;

/// Prints both files' rows with their ratios.
///
/// # Errors
/// A file that is not there, or not of `moe8 bench`.
pub fn run(args: &CompareArgs) -> Result<()> {
    let text = row::compare(&results::read(&args.a)?, &results::read(&args.b)?);
    // A closed pipe is no reason to fail.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(())
}

//! The `moe8` program; everything is in [`moe8::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    moe8::cli::run()
}

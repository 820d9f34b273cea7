//! `moe8 devices`: list the adapters.

use super::RunOptions;
use crate::gpu::{AdapterLine, DeviceChoice, list_adapters, none_found};
use crate::train::report::size;
use crate::{Error, Result};
use std::io::Write;

/// Prints every adapter with what matters for a choice, and which one would be used and why.
///
/// # Errors
/// No adapter at all.
pub fn run(opts: &RunOptions) -> Result<()> {
    let all = list_adapters();
    if all.is_empty() {
        return Err(none_found());
    }
    let choice = opts.run_options().device;
    let chosen = choice.pick(&all);
    let mut out = std::io::stdout().lock();
    for (i, line) in all.iter().enumerate() {
        // A closed pipe is no reason to fail.
        let _ = writeln!(out, "{} {i}: {}", if chosen == Some(i) { '*' } else { ' ' }, describe(line));
    }
    let Some(_) = chosen else {
        return Err(Error::user(
            format!("no adapter fits {choice}"),
            "--device and MOE8_DEVICE take a number of this list or part of a name",
        ));
    };
    let _ = writeln!(out, "{}", reason(&choice));
    Ok(())
}

fn describe(line: &AdapterLine) -> String {
    let caps = &line.caps;
    let rejected =
        line.rejected.as_ref().map_or(String::new(), |why| format!("\n     cannot be used: {why}"));
    format!(
        "{}\n     type {}, {}, driver {}\n     largest binding {} ({} bytes), largest buffer {}, workgroup memory {}, \
         workgroup size {}\n     matrix units {}{rejected}",
        line.name,
        line.kind,
        line.backend,
        line.driver,
        size(caps.max_binding),
        caps.max_binding,
        size(caps.max_buffer),
        size(u64::from(caps.workgroup_memory)),
        caps.workgroup_size,
        caps.matrix_units(),
    )
}

fn reason(choice: &DeviceChoice) -> String {
    match choice {
        DeviceChoice::Auto => {
            "* is used: the first usable by type (discrete, integrated, virtual, software); --device or MOE8_DEVICE \
             choose another"
                .into()
        }
        _ => format!("* is used: {choice} was asked for"),
    }
}

//! Where log lines go: plain lines, information on standard output, warnings and errors on standard error.

use std::io::Write as _;

use log::{Level, LevelFilter, Metadata, Record};

struct Lines;

impl log::Log for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Of other crates (wgpu is talkative) only what needs attention.
        metadata.target().starts_with("moe8") || metadata.level() <= Level::Error
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        // A closed pipe is no reason to stop.
        let _ = match record.level() {
            Level::Error => writeln!(std::io::stderr(), "error: {}", record.args()),
            Level::Warn => writeln!(std::io::stderr(), "warning: {}", record.args()),
            _ => writeln!(std::io::stdout(), "{}", record.args()),
        };
    }

    fn flush(&self) {
        let _ = std::io::stdout().flush();
    }
}

/// Sends the `log` crate's records here; a second call, or another logger before it, changes nothing.
pub fn install() {
    if log::set_logger(&Lines).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

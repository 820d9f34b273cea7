//! The log on standard error, in upstream's form: `[moe8] 2025-07-01 08:10:10,715 - root - INFO - ...`.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::ProgressBar;
use log::{Level, LevelFilter, Log, Metadata, Record};

/// The one logger of the process.
static LOGGER: Logger = Logger {
    setup: Mutex::new(Setup { level: LevelFilter::Info, prefix: String::new(), bar: None, installed: false }),
};

struct Logger {
    setup: Mutex<Setup>,
}

struct Setup {
    level: LevelFilter,
    prefix: String,
    bar: Option<ProgressBar>,
    /// Whether this logger is the process's.
    installed: bool,
}

/// Starts logging: moe8's own messages from `level` on, other libraries' from warnings on. `prefix` is put
/// before every line (`[rank1]:`, say, when several ranks show theirs). A later call changes both.
///
/// When the program has a logger already, that one stays.
pub fn init(level: LevelFilter, prefix: &str) {
    let mut setup = lock();
    setup.level = level;
    setup.prefix = prefix.to_string();
    setup.installed |= log::set_logger(&LOGGER).is_ok();
    if setup.installed {
        log::set_max_level(level);
    }
}

/// Keeps log lines above `bar` while it is drawn; `None` when it is done.
pub fn set_progress_bar(bar: Option<ProgressBar>) {
    lock().bar = bar;
}

/// Whether log lines may be coloured: standard error is a terminal and `NO_COLOR` (no-color.org) is not set.
pub fn colors() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

fn lock() -> std::sync::MutexGuard<'static, Setup> {
    // A panic while a line was written does not make the set-up wrong.
    LOGGER.setup.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Setup {
    fn shows(&self, metadata: &Metadata) -> bool {
        let limit = if is_ours(metadata.target()) { self.level } else { self.level.min(LevelFilter::Warn) };
        metadata.level() <= limit
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        lock().shows(metadata)
    }

    fn log(&self, record: &Record) {
        let setup = lock();
        if !setup.shows(record.metadata()) {
            return;
        }
        let line = line(
            &setup.prefix,
            SystemTime::now(),
            record.level(),
            record.target(),
            &record.args().to_string(),
        );
        // Nobody is left to tell when standard error is closed.
        let write = || drop(std::io::stderr().lock().write_all(line.as_bytes()));
        match &setup.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    fn flush(&self) {}
}

fn is_ours(target: &str) -> bool {
    target == "moe8" || target.starts_with("moe8::")
}

/// A whole line with Python's level names; `root` is upstream's name for its own logger.
fn line(prefix: &str, time: SystemTime, level: Level, target: &str, message: &str) -> String {
    let level = match level {
        Level::Error => "ERROR",
        Level::Warn => "WARNING",
        Level::Info => "INFO",
        Level::Debug | Level::Trace => "DEBUG",
    };
    let name = if is_ours(target) { "root" } else { target };
    format!("{prefix}[moe8] {} - {name} - {level} - {message}\n", timestamp(time))
}

/// `YYYY-MM-DD hh:mm:ss,mmm`, in UTC.
fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let seconds = since.as_secs();
    let (year, month, day) = civil(seconds / 86_400);
    let (h, m, s) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {h:02}:{m:02}:{s:02},{:03}", since.subsec_millis())
}

/// Year, month and day of a day counted from 1970-01-01 (Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms", `civil_from_days`). Years begin in March there, so that the leap day comes last.
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (400 * era + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days() {
        for (seconds, want) in [
            (0, "1970-01-01 00:00:00,000"),
            (951_782_400, "2000-02-29 00:00:00,000"),
            (951_868_799, "2000-02-29 23:59:59,000"),
            (1_751_357_410, "2025-07-01 08:10:10,000"),
            (1_709_164_800, "2024-02-29 00:00:00,000"),
            (1_767_225_599, "2025-12-31 23:59:59,000"),
            (4_107_542_400, "2100-03-01 00:00:00,000"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), want);
        }
        assert!(timestamp(UNIX_EPOCH + Duration::from_millis(1_715)).ends_with(",715"));
    }

    #[test]
    fn lines_have_upstreams_form() {
        let time = UNIX_EPOCH + Duration::from_millis(1_751_357_410_715);
        let want = "[moe8] 2025-07-01 08:10:10,715 - root - INFO - step:  1\n";
        assert_eq!(line("", time, Level::Info, "moe8::train", "step:  1"), want);
        let want = "[rank1]:[moe8] 2025-07-01 08:10:10,715 - wgpu_hal - WARNING - x\n";
        assert_eq!(line("[rank1]:", time, Level::Warn, "wgpu_hal", "x"), want);
    }

    #[test]
    fn other_libraries_are_heard_from_warnings_on() {
        let setup = |level| Setup { level, prefix: String::new(), bar: None, installed: false };
        let shows =
            |s: &Setup, target, level| s.shows(&Metadata::builder().target(target).level(level).build());
        let info = setup(LevelFilter::Info);
        assert!(shows(&info, "moe8::gpu", Level::Info) && !shows(&info, "moe8", Level::Debug));
        assert!(shows(&info, "naga", Level::Warn) && !shows(&info, "naga", Level::Info));
        assert!(!shows(&info, "moe8x", Level::Info));
        let off = setup(LevelFilter::Off);
        assert!(!shows(&off, "naga", Level::Error) && !shows(&off, "moe8", Level::Error));
    }
}

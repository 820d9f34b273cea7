//! Options and keys that a subcommand does not have: errors, for nothing passes in silence.

use super::args::{Command, RunArgs};
use crate::config::Config;
use crate::{Error, Result};

/// An option that may have been given.
pub(super) struct Asked<'a> {
    /// The option as the user wrote it; none where it was not given.
    pub given: Option<String>,
    /// Whether it means something here.
    pub fits: bool,
    /// Why not, or what to do instead.
    pub hint: &'a str,
}

impl<'a> Asked<'a> {
    /// `name`, if it was given.
    pub fn new(given: bool, name: &str, fits: bool, hint: &'a str) -> Asked<'a> {
        Asked { given: given.then(|| name.to_string()), fits, hint }
    }
}

/// The first of `asked` that was given and does not fit is an error: it is not for `here`.
///
/// # Errors
/// There is one.
pub(super) fn refuse<'a>(asked: impl IntoIterator<Item = Asked<'a>>, here: &str) -> Result<()> {
    let mut strangers = asked.into_iter().filter(|a| !a.fits);
    match strangers.find_map(|a| Some((a.given?, a.hint))) {
        Some((option, hint)) => Err(Error::user(format!("{option} is not for {here}"), hint)),
        None => Ok(()),
    }
}

/// Refuses what the subcommands without a configuration do not have; the others look at theirs themselves.
///
/// # Errors
/// A key that nobody has, or a key or an option that this subcommand does not have.
pub(super) fn check(command: &Command, overrides: &[String]) -> Result<()> {
    let (args, name) = match command {
        Command::Compare(_) => (None, "moe8 compare"),
        Command::Devices(args) => (Some(args), "moe8 devices"),
        Command::Selftest(args) => (Some(&args.run), "moe8 selftest"),
        Command::Tune(args) => (Some(args), "moe8 tune"),
        Command::Train(_) | Command::Config(_) | Command::Export(_) | Command::Bench(_) => return Ok(()),
    };
    // A misspelt key is named as such, as everywhere.
    Config::load(None, overrides)?;
    let key = overrides.first().map(|key| format!("--{key}"));
    let keys = Asked { given: key, fits: false, hint: NO_CONFIGURATION };
    let options = args.map(|args| options(args, command)).into_iter().flatten();
    refuse(std::iter::once(keys).chain(options), &format!("`{name}`"))
}

const NO_CONFIGURATION: &str =
    "leave it out: no configuration is read here; train, config, export and `bench step` read one";

/// The common flags that `command` may not have.
fn options(args: &RunArgs, command: &Command) -> [Asked<'static>; 7] {
    let selftest = matches!(command, Command::Selftest(_));
    let runs_kernels = !matches!(command, Command::Devices(_));
    let of_kernels = match runs_kernels {
        true => "leave it out: every kernel of the adapter is tried, for runs with and without such wishes",
        false => "leave it out: adapters are listed here, and no kernel runs",
    };
    [
        Asked::new(args.config.is_some(), "--config", false, NO_CONFIGURATION),
        Asked::new(
            args.ranks.is_some_and(|n| n != 1),
            "--ranks",
            false,
            "leave it out: there is one rank here",
        ),
        Asked::new(
            args.check_nan,
            "--check-nan",
            false,
            "it looks at the ops of a model: those of `moe8 train`",
        ),
        Asked::new(args.safe_shaders, "--safe-shaders", runs_kernels, of_kernels),
        Asked::new(args.no_coop, "--no-coop", selftest, of_kernels),
        Asked::new(args.kernel.is_some(), "--kernel", selftest, of_kernels),
        Asked::new(
            args.explain,
            "--explain",
            false,
            "it tells a model's kernels: those of `moe8 train` and `moe8 bench`",
        ),
    ]
}

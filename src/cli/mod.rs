//! The program: typed arguments, then a checked [`Config`], then one of the subcommands.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;

use crate::Result;
use crate::comm::Launcher;
use crate::config::{Config, KEYS, Loaded};
use crate::gpu::{DeviceChoice, GemmKernel, Options, QuantizeKernel, cache_folder};
use crate::train::logger;
use crate::train::run;

pub mod args;
pub mod bench;
pub mod compare;
pub mod config;
pub mod devices;
pub mod export;
pub mod overrides;
pub mod selftest;
mod strangers;
pub mod train;
pub mod tune;

use args::{Cli, Command, RunArgs};

/// Exit status of every error that the user can mend.
const USER_ERROR: u8 = 2;

/// How to run, as opposed to what to compute (that is [`Config`]).
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Adapter: number or part of the name. From `--device`, else `MOE8_DEVICE`.
    pub device: Option<String>,
    /// Ranks; none: as many as the launcher started, else 1.
    pub ranks: Option<usize>,
    /// Stop at the first NaN or Inf.
    pub check_nan: bool,
    /// Keep bounds checks and loop guards in shaders.
    pub safe_shaders: bool,
    /// Do without matrix units.
    pub no_coop: bool,
    /// Matrix product and attention to use wherever it can run.
    pub kernel: Option<GemmKernel>,
    /// The same for quantizers.
    pub quantizer: Option<QuantizeKernel>,
    /// Say which kernels were chosen, and why.
    pub explain: bool,
    /// File that `moe8 export` writes.
    pub output: Option<PathBuf>,
}

impl RunOptions {
    /// The library's view of these options.
    pub fn run_options(&self) -> run::RunOptions {
        run::RunOptions {
            device: DeviceChoice::parse(self.device.as_deref().unwrap_or_default()),
            gpu: Options {
                safe_shaders: self.safe_shaders,
                check_nan: self.check_nan,
                no_coop: self.no_coop,
                kernel: self.kernel,
                quantizer: self.quantizer,
                cache: cache_folder(),
                ..Options::default()
            },
            ranks: self.ranks,
            explain: self.explain,
        }
    }

    fn new(args: &RunArgs, output: Option<PathBuf>) -> Result<Self> {
        let from_environment = || std::env::var("MOE8_DEVICE").ok().filter(|d| !d.is_empty());
        let name = args.kernel.as_deref();
        let quantizer = name.and_then(|name| QuantizeKernel::ALL.into_iter().find(|k| k.name() == name));
        let kernel = name.filter(|_| quantizer.is_none()).map(GemmKernel::parse).transpose()?;
        Ok(RunOptions {
            device: args.device.clone().or_else(from_environment),
            ranks: args.ranks,
            check_nan: args.check_nan,
            safe_shaders: args.safe_shaders,
            no_coop: args.no_coop,
            kernel,
            quantizer,
            explain: args.explain,
            output,
        })
    }
}

/// Runs the program with the process's arguments. Status 0: done; 2: an error that is on standard error
/// with what to do about it.
pub fn run() -> ExitCode {
    // Ranks of an MPI job that are not to print keep their warnings to themselves too.
    let launched = Launcher::detect(|name| std::env::var(name).ok());
    // A list that is none is refused later, where all ranks know how many they are.
    let quiet = launched
        .as_ref()
        .is_some_and(|l| run::shows(l.rank, l.size.unwrap_or(usize::MAX)).is_ok_and(|shown| !shown));
    logger::init(if quiet { log::LevelFilter::Error } else { log::LevelFilter::Info }, "");
    let (flags, overrides) =
        overrides::split(std::env::args_os().skip(1).map(|a| a.to_string_lossy().into_owned()));
    let cli = match Cli::try_parse_from(std::iter::once("moe8".to_string()).chain(flags)) {
        Ok(cli) => cli,
        Err(e) => return usage(&e),
    };
    match dispatch(&cli, &overrides) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            last_words(&e.to_string(), launched.as_ref());
            // Under MPI the other ranks may be waiting for this one.
            crate::comm::abort(USER_ERROR.into())
        }
    }
}

/// Prints an error. Of several processes that come to the same one only the first says it: its end ends the others, which wait.
fn last_words(text: &str, launched: Option<&Launcher>) {
    let Some(launcher) = launched.filter(|l| l.size != Some(1)) else { return complain(text) };
    let rank = launcher.rank;
    if rank > 0 {
        std::thread::sleep(Duration::from_millis(1000 + 100 * rank.min(20) as u64));
    }
    complain(&format!("{text}\n  on rank {rank}"));
}

/// Prints clap's own message (help, version, or a wrong flag), and the key that a wrong flag may mean.
fn usage(error: &clap::Error) -> ExitCode {
    // Nothing is left to do where even that cannot be printed.
    let _ = error.print();
    if let Some(flag) = error.get(clap::error::ContextKind::InvalidArg) {
        let name = flag.to_string().trim_start_matches('-').replace('-', "_");
        if let Some(key) = KEYS.iter().find(|k| k.name == name) {
            complain(&format!("configuration keys need their section: --{}=VALUE", key.path()));
        }
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USER_ERROR))
}

/// The last words of a failed run, without the date of a log line. A closed standard error changes nothing.
fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "error: {text}");
}

fn dispatch(cli: &Cli, overrides: &[String]) -> Result<()> {
    strangers::check(&cli.command, overrides)?;
    let options = |args: &RunArgs| RunOptions::new(args, None);
    match &cli.command {
        Command::Config(args) if args.keys => config::print_keys(),
        Command::Compare(args) => compare::run(args),
        Command::Bench(args) => bench::run(args, &options(&args.run)?, overrides),
        Command::Devices(args) => devices::run(&options(args)?),
        Command::Selftest(args) => selftest::run(args, &options(&args.run)?),
        Command::Tune(args) => tune::run(&options(args)?),
        Command::Train(args) => {
            let opts = options(args)?;
            train::run(&load(args, overrides)?, &opts)
        }
        Command::Config(args) => {
            let opts = options(&args.run)?;
            config::run(&load(&args.run, overrides)?, &opts)
        }
        Command::Export(args) => {
            let opts = RunOptions::new(&args.run, Some(args.output.clone()))?;
            export::run(&load(&args.run, overrides)?, &opts)
        }
    }
}

/// The configuration of `args` and `overrides`; what it warns of is logged.
fn load(args: &RunArgs, overrides: &[String]) -> Result<Config> {
    let Loaded { config, warnings } = Config::load(args.config.as_deref(), overrides)?;
    for warning in warnings {
        log::warn!("{warning}");
    }
    Ok(config)
}

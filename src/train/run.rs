//! A training run: ranks, start-up, the loop.

use super::data::{self, DataSpec, DatasetKind, Loader};
use super::metrics::{MetricsFile, Rates, log_line};
use super::tokenizer::Tokenizer;
use super::trainer::{Pending, Recipe, Trainer};
use super::window::{Window, difference, finished, record};
use super::{logger, report, state};
use crate::comm::{self, Communicator};
use crate::config::{Config, Dataset, ModelArgs, Precision, Reshard, Vocabulary};
use crate::gpu::{Choice, DeviceChoice, Gpu};
use crate::nn::{Converters, Seed};
use crate::num::DType;
use crate::optim::{Hyper, Schedule};
use crate::{Error, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// How to run, as opposed to what to compute.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Adapter.
    pub device: DeviceChoice,
    /// How the adapter is opened.
    pub gpu: crate::gpu::Options,
    /// Ranks; none: as many as the launcher started, else 1.
    pub ranks: Option<usize>,
    /// Say which kernels are used, and why.
    pub explain: bool,
}

/// Seed of a run that names none: the same every time, so that runs repeat unless they are asked to differ.
const DEFAULT_SEED: u64 = 42;

fn seed(config: &Config) -> u64 {
    config.training.seed.unwrap_or(DEFAULT_SEED)
}

/// Trains as `config` says, on all ranks of this process.
///
/// # Errors
/// Everything a user can cause: configuration, files, adapter limits, other ranks.
pub fn run(config: &Config, options: &RunOptions) -> Result<()> {
    look_at_threads(config, options)?;
    comm::run(options.ranks, |comm| {
        let comm: Arc<dyn Communicator> = Arc::from(comm);
        Rank::start(config, options, comm)?.train()
    })?;
    Ok(())
}

/// More ranks than this in one process are worth a word, and more than that are a slip of the hand: each has a device of its own.
const MANY_THREADS: usize = 16;
const MOST_THREADS: usize = 128;

/// Says what many ranks as threads will take of the one adapter that they share.
fn look_at_threads(config: &Config, options: &RunOptions) -> Result<()> {
    let ranks = options.ranks.unwrap_or(1);
    let launched = comm::Launcher::detect(|name| std::env::var(name).ok());
    if ranks <= MANY_THREADS || launched.is_some() {
        return Ok(());
    }
    config.validate(ranks)?;
    let gpu = Gpu::open_with(&options.device, crate::gpu::Options { quiet: true, ..options.gpu.clone() })?;
    let (_, args) = open_data(config)?;
    args.validate()?;
    let others: Arc<dyn Communicator> = Arc::new(comm::Planned::new(ranks));
    let each = plan(config, &gpu, &others, &args)?.memory();
    let [each, all] = [each, each * ranks as u64].map(report::size);
    let what =
        format!("{ranks} ranks as threads of one process share one adapter: {each} each, {all} in all");
    if ranks > MOST_THREADS {
        let hint = format!(
            "at most {MOST_THREADS} ranks in one process; MPI takes more (mpirun -n {ranks} moe8 ...)"
        );
        return Err(Error::user(what, hint));
    }
    log::warn!("{what}");
    Ok(())
}

/// One rank of a run.
struct Rank<'a> {
    config: &'a Config,
    comm: Arc<dyn Communicator>,
    show: bool,
    gpu: Gpu,
    loader: Loader,
    trainer: Trainer,
    rates: Rates,
    metrics: Option<MetricsFile>,
    bar: Option<ProgressBar>,
    /// First step whose loss was no number, while the losses have not become numbers again.
    lost: Option<usize>,
}

/// The data set, its tokenizer's vocabulary and the model's arguments.
///
/// # Errors
/// Files and sizes that do not fit.
pub fn open_data(config: &Config) -> Result<(Loader, ModelArgs)> {
    let path = config.model.tokenizer_path.as_ref().map(Path::new);
    let tokenizer = Tokenizer::load_or_bytes(path)?;
    let vocabulary = match (path, tokenizer.eos_id()) {
        (Some(_), eos) => {
            Some(Vocabulary { words: tokenizer.vocab_size() as usize, eos: eos.unwrap_or(0) as usize })
        }
        (None, _) => None,
    };
    let mut args = config.model_args(vocabulary)?;
    let kind = match config.training.dataset {
        Dataset::Synthetic => DatasetKind::Synthetic,
        Dataset::Text => DatasetKind::Text,
        Dataset::Jsonl => DatasetKind::Jsonl,
        Dataset::Tokens => DatasetKind::Tokens,
    };
    let spec = DataSpec {
        kind,
        path: config.training.dataset_path.as_ref().map(Into::into),
        vocab_size: u32::try_from(args.vocab_size).unwrap_or(u32::MAX),
        token_width: None,
        seed: seed(config),
    };
    let loader = Loader::new(&spec, &tokenizer, config.training.seq_len)?;
    // Raw ids know no end of text unless a tokenizer was named; the configuration's then stands.
    if let Some(eos) = loader.eos_id().filter(|_| kind != DatasetKind::Tokens || path.is_some()) {
        args.eos_id = eos as usize;
    }
    Ok((loader, args))
}

/// What the trainer needs of the configuration.
///
/// # Errors
/// A batch that the ranks do not divide.
pub fn recipe(config: &Config, world: usize) -> Result<Recipe> {
    let t = &config.training;
    let o = &config.optimizer;
    let s = &config.lr_scheduler;
    let dtype = |p| match p {
        Precision::Bfloat16 => DType::BF16,
        Precision::Float32 => DType::F32,
    };
    Ok(Recipe {
        param_dtype: dtype(t.mixed_precision_param),
        reduce_dtype: dtype(t.mixed_precision_reduce),
        reshard: match config.parallelism.fsdp_reshard_after_forward {
            Reshard::Default => world > 1,
            Reshard::Always => true,
            Reshard::Never => false,
        },
        lr: o.lr,
        hyper: Hyper {
            beta1: o.beta1 as f32,
            beta2: o.beta2 as f32,
            eps: o.eps as f32,
            weight_decay: o.weight_decay as f32,
        },
        schedule: Schedule::new(t.steps, s.warmup_steps, s.decay_ratio, s.decay_type, s.lr_min),
        max_norm: t.max_norm as f32,
        load_balance: config.args.load_balance_coeff.map(|c| c as f32),
        accumulation: config.accumulation_steps(world)?,
    })
}

/// Whether the lines of `rank` are shown: `LOG_RANK` is a comma list of ranks, 0 if it is not set.
///
/// # Errors
/// A list with something in it that is no rank of `world`.
pub fn shows(rank: usize, world: usize) -> Result<bool> {
    let list = std::env::var("LOG_RANK").unwrap_or_else(|_| "0".into());
    shown_by(&list, world).map(|shown| shown.contains(&rank))
}

fn shown_by(list: &str, world: usize) -> Result<Vec<usize>> {
    let one = |word: &str| word.trim().parse().ok().filter(|rank| *rank < world);
    list.split(',').map(one).collect::<Option<_>>().ok_or_else(|| {
        let most = world - 1;
        Error::user(
            format!("LOG_RANK={list:?} is no list of ranks"),
            format!("name ranks from 0 to {most} with commas, as in LOG_RANK=0"),
        )
    })
}

/// Builds a trainer and gives its parameters their first values. Settings of the converter that fit no module are warned
/// of, once.
///
/// # Errors
/// Limits of the adapter, or the weights file.
pub fn build(config: &Config, gpu: &Gpu, comm: &Arc<dyn Communicator>, args: &ModelArgs) -> Result<Trainer> {
    let trainer =
        Trainer::new(gpu, comm.clone(), args, &Converters::new(config), recipe(config, comm.size())?)?;
    match &config.checkpoint.initial_load_path {
        Some(path) => state::load(&trainer, Path::new(path))?,
        None => trainer.initialize(Seed(seed(config)))?,
    }
    if comm.rank() == 0 {
        for warning in trainer.model().warnings() {
            log::warn!("{warning}");
        }
    }
    Ok(trainer)
}

/// A planner that has taken two steps of a run, by the run's own code: it knows the device memory that the run will hold, and
/// the kernels that it will ask for.
///
/// # Errors
/// A tensor over the adapter's limits, named before anything is allocated.
pub fn plan(config: &Config, gpu: &Gpu, comm: &Arc<dyn Communicator>, args: &ModelArgs) -> Result<Gpu> {
    let planner = gpu.planner();
    plan_on(&planner, config, comm, args)?;
    Ok(planner)
}

/// [`plan`] on a planner.
fn plan_on(planner: &Gpu, config: &Config, comm: &Arc<dyn Communicator>, args: &ModelArgs) -> Result<()> {
    let alone: Arc<dyn Communicator> = Arc::new(comm::Planned::new(comm.size()));
    let recipe = recipe(config, comm.size())?;
    let mut trainer = Trainer::new(planner, alone, args, &Converters::new(config), recipe)?;
    let t = &config.training;
    let tokens = t.local_batch_size * t.seq_len;
    let zeros = data::Batch {
        inputs: vec![0; tokens],
        labels: vec![0; tokens],
        batch: t.local_batch_size,
        seq: t.seq_len,
    };
    for _ in 0..2 {
        let batches = vec![zeros.clone(); trainer.accumulation()];
        drop(trainer.step(&batches)?);
    }
    Ok(())
}

impl<'a> Rank<'a> {
    fn start(config: &'a Config, options: &'a RunOptions, comm: Arc<dyn Communicator>) -> Result<Rank<'a>> {
        let (rank, world) = (comm.rank(), comm.size());
        config.validate(world)?;
        let show = shows(rank, world)?;
        let gpu = Gpu::open_with(
            &options.device,
            crate::gpu::Options { quiet: options.gpu.quiet || rank != 0, ..options.gpu.clone() },
        )?;
        let (loader, args) = open_data(config)?;
        args.validate()?;
        let lines = Lines { show, rank, world };
        lines.say(&format!("Starting job: {}", config.job.description));
        lines.say(&report::adapter(&gpu));
        let recipe = recipe(config, world)?;
        lines.say(&report::dtypes(recipe.param_dtype, recipe.reduce_dtype));
        for line in report::model(config, &args) {
            lines.say(&line);
        }
        let planner = plan(config, &gpu, &comm, &args)?;
        lines.say(&format!("Device memory needed: {}", report::size(planner.memory())));
        if options.explain {
            lines.say(&format!("matrix units: {}", gpu.caps().matrix_units()));
            Choice::lines(planner.choices()).iter().for_each(|line| lines.say(line));
            lines.say(&report::kernels(&planner.kernels()));
        }
        gpu.prepare(&planner)?;
        let trainer = build(config, &gpu, &comm, &args)?;
        for line in report::conversions(config, trainer.model().conversions()) {
            lines.say(&line);
        }
        lines.say(&format!("data: {}", loader.summary()));
        lines.say(&report::seed(config.training.seed, seed(config)));
        lines.say(&report::plan(config, &*comm, trainer.accumulation()));
        let folder = Path::new(&config.job.dump_folder);
        let metrics = if rank == 0 { Some(MetricsFile::open(folder)?) } else { None };
        let flops_per_token = args.flops_per_token(config.training.seq_len) as f64;
        let rates = Rates { memory_capacity: None, flops_per_token, peak_flops: None };
        let bar = if show && rank == 0 { progress(config.training.steps as u64) } else { None };
        logger::set_progress_bar(bar.clone());
        Ok(Rank { config, comm, show, gpu, loader, trainer, rates, metrics, bar, lost: None })
    }

    fn lines(&self) -> Lines {
        Lines { show: self.show, rank: self.comm.rank(), world: self.comm.size() }
    }

    /// The rows of each forward pass of step `step` (from 0).
    fn batches(&self, step: usize) -> Result<Vec<data::Batch>> {
        let local = self.config.training.local_batch_size as u64;
        let (rank, ranks) = (self.comm.rank() as u64, self.comm.size() as u64);
        let passes = self.trainer.accumulation() as u64;
        (0..passes)
            .map(|pass| {
                let first = data::row_of(step as u64 * passes + pass, rank, ranks, local);
                self.loader.batch(first, local as usize)
            })
            .collect()
    }

    fn train(mut self) -> Result<()> {
        let steps = self.config.training.steps;
        self.lines().say("Training starts at step 1.");
        let mut window = Window { since: Instant::now(), steps: 0, memory: 0, counters: self.gpu.counters() };
        let mut waiting: Option<(usize, Pending, Instant)> = None;
        for step in 0..steps {
            let batches = self.batches(step)?;
            let before = self.gpu.counters();
            let pending = self.trainer.step(&batches)?;
            let returned = Instant::now();
            window.memory = window.memory.max(self.gpu.memory());
            window.counters = difference(self.gpu.counters(), before);
            window.steps += 1;
            // The numbers of the step before are read while this one runs.
            if let Some(done) = waiting.take() {
                self.log(done, &mut window, 1)?;
            }
            if step == 1 {
                // Two steps have asked for every kernel; what comes later, even an end by force, finds them saved.
                self.gpu.save_pipelines();
            }
            if self.is_logged(step) {
                waiting = Some((step, pending, returned));
            }
            if let Some(bar) = &self.bar {
                bar.set_position(step as u64 + 1);
            }
        }
        if let Some(done) = waiting.take() {
            self.log(done, &mut window, 0)?;
        }
        self.gpu.finish()?;
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            logger::set_progress_bar(None);
        }
        let Some(step) = self.lost else {
            self.lines().say("Training completed");
            return Ok(());
        };
        // As upstream, the run goes on to its end; but who reads its log, or a script, must not take it for a success.
        Err(Error::user(
            format!("all {steps} steps are done, but the loss is no number since step {step}"),
            "lower optimizer.lr, or run with --check-nan to see where it begins",
        ))
    }

    /// Step 1 and every multiple of `log_freq` (torchtitan); the last one too.
    fn is_logged(&self, step: usize) -> bool {
        step == 0
            || (step + 1).is_multiple_of(self.config.metrics.log_freq)
            || step + 1 == self.config.training.steps
    }

    /// Reads and logs a step whose call has returned then; `ahead` steps were submitted after it.
    fn log(
        &mut self,
        (step, pending, returned): (usize, Pending, Instant),
        window: &mut Window,
        ahead: usize,
    ) -> Result<()> {
        let asked = Instant::now();
        let stats = self.trainer.read(pending)?;
        let now = finished(window.since, returned, asked, Instant::now());
        let t = &self.config.training;
        let steps = window.steps.saturating_sub(ahead).max(1);
        let tokens = steps * t.local_batch_size * t.seq_len * self.trainer.accumulation();
        let record = record(step, &stats, tokens as f64 / (now - window.since).as_secs_f64(), window);
        self.lines().say(&log_line(
            &record,
            &self.rates,
            logger::colors() && !self.config.metrics.disable_color_printing,
        ));
        if stats.loss.is_finite() {
            self.lost = None;
        } else if self.lost.is_none() {
            self.lost = Some(step + 1);
            if self.comm.rank() == 0 {
                log::warn!(
                    "the loss of step {} is {}: training goes on, and fails at its end",
                    step + 1,
                    stats.loss
                );
            }
        }
        if let Some(file) = &mut self.metrics {
            file.append(&record)?;
        }
        *window = Window { since: now, steps: ahead, memory: self.gpu.memory(), counters: window.counters };
        Ok(())
    }
}

/// Log lines of one rank.
struct Lines {
    show: bool,
    rank: usize,
    world: usize,
}

impl Lines {
    fn say(&self, line: &str) {
        match (self.show, self.world) {
            (false, _) => {}
            (true, 1) => log::info!("{line}"),
            (true, _) => log::info!("[rank{}] {line}", self.rank),
        }
    }
}

/// A bar with the time to go, on a terminal only.
fn progress(steps: u64) -> Option<ProgressBar> {
    if !std::io::stderr().is_terminal() {
        return None;
    }
    let style =
        ProgressStyle::with_template("{bar:30} step {pos}/{len}, {eta} to go").expect("a fixed template");
    Some(ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr()).with_style(style))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Caps, DeviceChoice, MatrixUnits};

    #[test]
    fn ranks_that_are_none_are_refused() {
        assert_eq!(shown_by("0", 1).unwrap(), [0]);
        assert_eq!(shown_by(" 1, 0", 2).unwrap(), [1, 0]);
        for (list, world) in [("", 1), (",", 2), ("x", 1), ("0,", 2), ("5", 2), ("1", 1), ("-1", 2)] {
            let error = shown_by(list, world).unwrap_err().to_string();
            assert!(error.contains(&format!("LOG_RANK={list:?}")), "{error}");
        }
    }

    /// The debug model's step on a GPU with matrix units, by what is launched: no CI adapter has them, and every op must take what the
    /// one before it leaves there.
    #[test]
    fn the_debug_model_is_planned_for_matrix_units() {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        let coop = Some(MatrixUnits::Coop16);
        let caps = Caps { software: false, subgroup_max: 32, coop, max_binding: 1 << 31, ..gpu.caps() };
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/llama4_debug.toml");
        let fp8 = [
            "--model.converters=float8",
            "--float8.recipe_name=rowwise",
            "--float8.moe_fqns_prototype=experts,shared_expert",
        ];
        for overrides in [&[][..], &fp8[..]] {
            let overrides: Vec<String> = overrides.iter().map(|word| (*word).to_owned()).collect();
            let config = Config::load(Some(&path), &overrides).expect("a configuration").config;
            let planner = gpu.planner_with(caps);
            let comm: Arc<dyn Communicator> = Arc::new(comm::Solo::default());
            plan_on(&planner, &config, &comm, &config.args).expect("a plan");
            let launches = planner.launches();
            // Of two steps: three forms of 24 dense and 27 linears of experts, less those that share a launch, and the head's.
            let products = launches["gemm_coop.main"] / 2;
            assert!((95..110).contains(&products), "{products} products a step: {launches:?}");
            assert!(planner.counters().dispatches / 2 < 500, "{launches:?}");
        }
    }
}

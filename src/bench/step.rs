//! Whole training steps: the time of one.

use super::runner::{Runner, Times};
use crate::comm::{Communicator, Solo};
use crate::config::Config;
use crate::gpu::{Clock, Gpu};
use crate::train::data::{Batch, Loader};
use crate::train::run::{build, open_data, plan};
use crate::train::trainer::Trainer;
use crate::{Error, Result};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps before anything is timed: the first two make buffers, bind groups and pipelines.
const FIRST_STEPS: usize = 3;

/// How the step's linears and experts compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// All in f32.
    F32,
    /// bf16 weights and activations.
    Bf16,
    /// bf16, with linears and experts in fp8, row-wise.
    Fp8,
}

impl Precision {
    /// All of them.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Fp8];

    /// As in a row's `dtype`.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Fp8 => "fp8",
        }
    }

    /// The configuration keys that ask for it.
    pub fn overrides(self) -> Vec<String> {
        let fp8 = [
            "model.converters=float8",
            "float8.recipe_name=rowwise",
            "float8.moe_fqns_prototype=experts",
            "float8.filter_fqns=output,router.gate",
        ];
        let dtype = if self == Precision::F32 { "float32" } else { "bfloat16" };
        let mut keys = vec![format!("training.mixed_precision_param={dtype}")];
        match self {
            Precision::Fp8 => keys.extend(fp8.map(String::from)),
            _ => keys.push("model.converters=".into()),
        }
        keys
    }
}

/// The configuration of a benchmarked step on synthetic data: that of `file`, or the debug model's; `batch` sequences of `seq`
/// tokens where `sizes` say so, then the user's own keys.
///
/// # Errors
/// A file, key or value that the user got wrong.
pub fn config(
    precision: Precision,
    file: Option<&Path>,
    sizes: Option<(usize, usize)>,
    user: &[String],
) -> Result<Config> {
    let mut keys = vec![
        "training.dataset=synthetic".to_string(),
        "lr_scheduler.warmup_steps=2".into(),
        "training.steps=1000".into(),
    ];
    if let Some((batch, seq)) = sizes {
        keys.push(format!("training.local_batch_size={batch}"));
        keys.push(format!("training.seq_len={seq}"));
    }
    keys.extend(precision.overrides());
    keys.extend_from_slice(user);
    let config = Config::load(file, &keys)?.config;
    config.validate(1)?;
    Ok(config)
}

/// A planner that has taken a run's first steps.
///
/// # Errors
/// Limits of the device.
pub fn planned(gpu: &Gpu, config: &Config) -> Result<Gpu> {
    let (_, args) = open_data(config)?;
    args.validate()?;
    let solo: Arc<dyn Communicator> = Arc::new(Solo::new());
    plan(config, gpu, &solo, &args)
}

/// A model that trains on one rank.
pub struct Stepper {
    trainer: Trainer,
    loader: Loader,
    batch: usize,
    steps: usize,
    vocabulary: usize,
    flops_per_token: f64,
    recording: Duration,
}

impl Stepper {
    /// Builds the model of `config` with its initial weights.
    ///
    /// # Errors
    /// Limits or memory of the device.
    pub fn new(gpu: &Gpu, config: &Config) -> Result<Stepper> {
        let (loader, args) = open_data(config)?;
        args.validate()?;
        let solo: Arc<dyn Communicator> = Arc::new(Solo::new());
        let trainer = build(config, gpu, &solo, &args)?;
        Ok(Stepper {
            trainer,
            loader,
            batch: config.training.local_batch_size,
            steps: 0,
            vocabulary: args.vocab_size,
            flops_per_token: args.flops_per_token(config.training.seq_len) as f64,
            recording: Duration::ZERO,
        })
    }

    /// The next step's rows, one batch per forward pass.
    fn batches(&mut self) -> Result<Vec<Batch>> {
        let passes = self.trainer.accumulation();
        let first = (self.steps * passes * self.batch) as u64;
        self.steps += 1;
        (0..passes as u64)
            .map(|pass| self.loader.batch(first + pass * self.batch as u64, self.batch))
            .collect()
    }

    /// Trains `n` steps as a run does: each step's numbers are read while the next one is on the device. The last loss.
    ///
    /// # Errors
    /// The device, its memory, or a loss that is no number.
    pub fn run(&mut self, n: usize) -> Result<f64> {
        let (mut waiting, mut loss) = (None, f64::NAN);
        for _ in 0..n {
            let batches = self.batches()?;
            let start = Instant::now();
            let pending = self.trainer.step(&batches)?;
            self.recording += start.elapsed();
            if let Some(before) = waiting.replace(pending) {
                loss = self.trainer.read(before)?.loss;
            }
        }
        if let Some(last) = waiting {
            loss = self.trainer.read(last)?.loss;
        }
        if loss.is_finite() {
            return Ok(loss);
        }
        let what = format!("the loss of step {} is {loss}", self.steps);
        Err(Error::user(what, "lower optimizer.lr, or run with --check-nan"))
    }

    /// Warms up and times repetitions of as many steps as fill the window.
    fn times(&mut self, runner: &Runner) -> Result<Times> {
        let (settings, start) = (runner.settings(), Instant::now());
        let mut seconds = |n: usize| {
            let start = Instant::now();
            self.run(n).map(|_| start.elapsed().as_secs_f64() / n as f64)
        };
        let mut one = seconds(1)?;
        while start.elapsed() < settings.warm_up {
            one = seconds(1)?;
        }
        let n = ((settings.window.as_secs_f64() * 10.0 / one).ceil() as usize).clamp(1, 100);
        let all = (0..settings.repetitions).map(|_| seconds(n));
        Ok(Times { seconds: all.collect::<Result<_>>()?, clock: Clock::Wall })
    }
}

/// How far the first loss may be from the logarithm of the vocabulary, which an untrained model's nearly is, as a part of it.
const FIRST_LOSS: f64 = 0.25;

/// Measures training steps of `config` by the host's clock, as a run has them, and adds the row, called `name`. The error is
/// that of the first loss against `ln V`.
///
/// # Errors
/// As [`Stepper::run`].
pub fn measure(runner: &mut Runner, config: &Config, name: &str, precision: Precision) -> Result<()> {
    let gpu = runner.gpu().clone();
    if runner.explains() {
        runner.explain(&planned(&gpu, config)?);
    }
    let mut stepper = Stepper::new(&gpu, config)?;
    let (batch, seq) = (config.training.local_batch_size, config.training.seq_len);
    let mut row = super::row::Row {
        op: name.into(),
        shape: format!("{batch}x{seq}"),
        groups: "routed".into(),
        dtype: precision.name().into(),
        clock: "wall".into(),
        ..runner.blank()
    };
    let expected = (stepper.vocabulary as f64).ln();
    let first = stepper.run(1)?;
    row.error = Some((first / expected - 1.0).abs());
    if row.error > Some(FIRST_LOSS) {
        row.failed = Some(format!("the first loss is {first}, not about {expected:.3}"));
        row.clock = "none".into();
        runner.push(row);
        return Ok(());
    }
    stepper.run(FIRST_STEPS)?;
    let before = gpu.counters().dispatches;
    stepper.run(1)?;
    row.dispatches = gpu.counters().dispatches - before;
    stepper.recording = Duration::ZERO;
    let first_timed = stepper.steps;
    let times = stepper.times(runner)?;
    times.fill(&mut row);
    row.host_ms = Some(stepper.recording.as_secs_f64() * 1e3 / (stepper.steps - first_timed) as f64);
    let tokens = (batch * seq * stepper.trainer.accumulation()) as f64;
    row.tokens_per_second = Some(tokens / times.median());
    row.tflops = Some(stepper.flops_per_token * tokens / times.median() * 1e-12);
    row.kernel = format!("{} kernels", gpu.kernels().len());
    runner.push(row);
    Ok(())
}

//! Checks a case, warms the device, measures, makes a row.

use super::check::Check;
use super::row::Row;
use crate::Result;
use crate::gpu::{Choice, Clock, Gpu};
use crate::tensor::Tensor;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// What a case does, for its rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Useful floating-point operations: bound by arithmetic.
    Flops(f64),
    /// Bytes, each input read once and each output written once: bound by memory.
    Bytes(f64),
}

/// Something to measure.
pub struct Case {
    /// What.
    pub op: String,
    /// Its sizes.
    pub shape: String,
    /// How rows fall into groups.
    pub groups: String,
    /// Of the operands.
    pub dtype: String,
    /// What one run does.
    pub work: Work,
    /// Records one run; its results.
    pub run: Run,
    /// Judges the results of a run.
    pub check: Judge,
}

/// Records one run of a case on a device, or on a planner.
pub type Run = Box<dyn Fn(&Gpu) -> Result<Vec<Tensor>>>;
/// Compares a run's results with the reference.
pub type Judge = Box<dyn Fn(&Gpu, &[Tensor]) -> Result<Check>>;

/// How long to measure, and how large what rates are compared with is where no case is a copy or a product.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Before the first case, and after a pause: GPUs that have idled run slowly for seconds.
    pub warm_up: Duration,
    /// Before a case when the device was busy just now.
    pub warm_up_again: Duration,
    /// Repetitions; the median is reported.
    pub repetitions: usize,
    /// Least length of a repetition: as many runs as it takes.
    pub window: Duration,
    /// Most bytes of a copy without a shape: one binding may hold less.
    pub most_copied: usize,
    /// M, K and N of the dense product.
    pub product: usize,
}

impl Settings {
    /// For an adapter: on a GPU 2 s of warm-up, a copy of up to 1 GiB and a product of 4096; on a software one 16 MiB and 256.
    pub fn of(gpu: &Gpu) -> Settings {
        let ms = Duration::from_millis;
        let hardware = Settings {
            warm_up: ms(2000),
            warm_up_again: ms(200),
            repetitions: 5,
            window: ms(40),
            most_copied: 1 << 30,
            product: 4096,
        };
        if !gpu.caps().software {
            return hardware;
        }
        Settings {
            warm_up: ms(200),
            warm_up_again: ms(20),
            window: ms(20),
            most_copied: 16 << 20,
            product: 256,
            ..hardware
        }
    }
}

/// Most runs of one repetition: each launch takes some of the recorder's memory.
const MOST_RUNS: usize = 2000;
/// After this long without work the device counts as idle.
const IDLE: Duration = Duration::from_millis(500);

/// Seconds of each repetition, and the clock that all of them were read from.
#[derive(Clone, Debug, PartialEq)]
pub struct Times {
    /// Seconds of one run, by repetition.
    pub seconds: Vec<f64>,
    /// The clock.
    pub clock: Clock,
}

impl Times {
    fn sorted(&self) -> Vec<f64> {
        let mut all = self.seconds.clone();
        all.sort_by(f64::total_cmp);
        all
    }

    /// The median, seconds.
    pub fn median(&self) -> f64 {
        let all = self.sorted();
        let middle = all.len() / 2;
        if all.len() % 2 == 1 { all[middle] } else { (all[middle - 1] + all[middle]) / 2.0 }
    }

    /// Writes median, minimum, spread and clock into `row`.
    pub fn fill(&self, row: &mut Row) {
        let all = self.sorted();
        row.median_ms = Some(self.median() * 1e3);
        row.min_ms = Some(all[0] * 1e3);
        row.spread = Some((all[all.len() - 1] - all[0]) / self.median());
        row.clock = self.clock.name().into();
    }
}

/// Measures cases on one device, and gathers their rows.
pub struct Runner {
    gpu: Gpu,
    settings: Settings,
    busy: Option<Instant>,
    rows: Vec<Row>,
    /// What was said of chosen kernels, if anything is to be said.
    told: Option<BTreeSet<Choice>>,
}

impl Runner {
    /// With the settings that suit the adapter.
    pub fn new(gpu: &Gpu) -> Runner {
        Runner::with(gpu, Settings::of(gpu))
    }

    /// With other settings.
    pub fn with(gpu: &Gpu, settings: Settings) -> Runner {
        Runner { gpu: gpu.clone(), settings, busy: None, rows: Vec::new(), told: None }
    }

    /// Says once which kernels are chosen, and why, as cases come to them.
    #[must_use]
    pub fn explaining(self, explain: bool) -> Runner {
        Runner { told: explain.then(BTreeSet::new), ..self }
    }

    /// Whether it says which kernels are chosen.
    pub fn explains(&self) -> bool {
        self.told.is_some()
    }

    /// Says what `planner` chose, unless it was said or nobody wants to know.
    pub fn explain(&mut self, planner: &Gpu) {
        let Some(told) = &mut self.told else { return };
        let new = planner.choices().into_iter().filter(|choice| told.insert(choice.clone()));
        Choice::lines(new).iter().for_each(|line| log::info!("{line}"));
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// How long it measures.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// A row that names the adapter.
    pub fn blank(&self) -> Row {
        Row {
            adapter: self.gpu.name().into(),
            driver: self.gpu.driver().into(),
            software: self.gpu.caps().software,
            version: env!("CARGO_PKG_VERSION").into(),
            ..Row::default()
        }
    }

    /// Checks and measures a case, without keeping its row.
    ///
    /// # Errors
    /// The device, or its memory.
    pub fn measure_case(&mut self, case: &Case) -> Result<Row> {
        let mut row = Row {
            op: case.op.clone(),
            shape: case.shape.clone(),
            groups: case.groups.clone(),
            dtype: case.dtype.clone(),
            ..self.blank()
        };
        let planner = self.gpu.planner();
        (case.run)(&planner)?;
        self.explain(&planner);
        row.dispatches = planner.counters().dispatches;
        row.kernel = chosen(&planner.kernels());
        let results = (case.run)(&self.gpu)?;
        let check = (case.check)(&self.gpu, &results)?;
        drop(results);
        row.error = Some(check.error).filter(|e| e.is_finite());
        if check.wrong.is_some() {
            row.failed = check.wrong;
            row.clock = "none".into();
            return Ok(row);
        }
        let times = self.times(&case.run)?;
        times.fill(&mut row);
        match case.work {
            Work::Flops(flops) => row.tflops = Some(flops / times.median() * 1e-12),
            Work::Bytes(bytes) => row.gbps = Some(bytes / times.median() * 1e-9),
        }
        Ok(row)
    }

    /// Checks and measures a case, and keeps its row.
    ///
    /// # Errors
    /// As [`Runner::measure_case`].
    pub fn case(&mut self, case: &Case) -> Result<()> {
        let row = self.measure_case(case)?;
        self.push(row);
        Ok(())
    }

    /// Keeps a row that was measured elsewhere.
    pub fn push(&mut self, row: Row) {
        let ms = row.median_ms.map_or("WRONG".into(), |ms| format!("{ms:.4} ms"));
        log::info!("{} {} {} {}: {ms}", row.op, row.shape, row.groups, row.dtype);
        self.rows.push(row);
    }

    fn times(&mut self, run: &Run) -> Result<Times> {
        let gpu = self.gpu.clone();
        let repeat = |n: usize| {
            let record = || (0..n).try_for_each(|_| run(&gpu).map(drop));
            gpu.timed(record)
        };
        let idle = self.busy.is_none_or(|at| at.elapsed() > IDLE);
        let warm_up = if idle { self.settings.warm_up } else { self.settings.warm_up_again };
        let window = self.settings.window.as_secs_f64();
        let (start, mut runs) = (Instant::now(), 1);
        loop {
            let one = repeat(runs)?.seconds / runs as f64;
            runs = ((window / one.max(1e-9)).ceil() as usize).clamp(1, MOST_RUNS);
            if start.elapsed() >= warm_up {
                break;
            }
        }
        let mut all = Vec::new();
        for _ in 0..self.settings.repetitions {
            all.push(repeat(runs)?);
        }
        self.busy = Some(Instant::now());
        // One clock for all: where one reading of the device's was no good, none is used.
        let clock = if all.iter().all(|t| t.clock == Clock::Gpu) { Clock::Gpu } else { Clock::Wall };
        let pick = |t: &crate::gpu::Timing| if clock == Clock::Gpu { t.seconds } else { t.wall };
        Ok(Times { seconds: all.iter().map(|t| pick(t) / runs as f64).collect(), clock })
    }

    /// The rows, with their shares of the peaks: of `copy` (bytes per second) those bound by memory, of the fastest GEMM here,
    /// or `gemm` operations per second if that is faster, the others.
    pub fn finish(mut self, copy: Option<f64>, gemm: Option<f64>) -> Vec<Row> {
        if self.told.as_ref().is_some_and(BTreeSet::is_empty) {
            log::info!("no kernel was chosen: each op here has only one");
        }
        let is_gemm = |r: &&Row| r.op.starts_with("gemm") || r.op.starts_with("grouped");
        let best = self.rows.iter().filter(is_gemm).filter_map(|r| r.tflops).chain(gemm.map(|f| f * 1e-12));
        let best = best.fold(0.0, f64::max);
        let copies = self.rows.iter().filter(|r| r.op == "copy").filter_map(|r| r.gbps);
        let copy = copies.chain(copy.map(|b| b * 1e-9)).fold(0.0, f64::max);
        for row in &mut self.rows {
            row.share_of_peak = match (row.tflops, row.gbps) {
                (Some(t), _) if best > 0.0 => Some(t / best),
                (None, Some(g)) if copy > 0.0 => Some(g / copy),
                _ => None,
            };
        }
        self.rows
    }
}

/// Kernels of a case in one line: with their variants when there are few.
fn chosen(kernels: &[String]) -> String {
    if kernels.len() <= 2 {
        return kernels.join(" + ");
    }
    let mut names: Vec<&str> = kernels.iter().map(|k| k.split(' ').next().unwrap_or_default()).collect();
    names.dedup();
    names.join(" + ")
}

//! Where the time of a training step goes: a table, or a row for each kernel and variant.

use super::step::Stepper;
use crate::Result;
use crate::config::Config;
use crate::gpu::{Clock, Gpu, KernelTime};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Steps before anything is timed: the first two make buffers, bind groups and pipelines.
const FIRST_STEPS: usize = 3;
/// Most lines of the second table of [`Profile::table`].
const LONGEST: usize = 40;

/// Where the time of a step goes.
pub struct Profile {
    gpu: Gpu,
    clock: Clock,
    kernels: Vec<KernelTime>,
    steps: usize,
}

/// The launches of one variant of a kernel with one number of workgroups, in one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// The kernel.
    pub kernel: String,
    /// Its constants and dtypes.
    pub variant: String,
    /// Workgroups of each launch.
    pub workgroups: u32,
    /// Launches.
    pub launches: u64,
    /// Milliseconds of all of them.
    pub ms: f64,
    /// Of the step's milliseconds.
    pub share: f64,
    /// `gpu` or `wall`.
    pub clock: &'static str,
    /// The adapter's name.
    pub adapter: String,
    /// The driver's name and version.
    pub driver: String,
}

/// Profiles `steps` steps of `config` on an adapter that was opened with [`crate::gpu::Options::profile`].
///
/// # Errors
/// As [`Stepper::run`].
pub fn profile(gpu: &Gpu, config: &Config, steps: usize) -> Result<Profile> {
    let mut stepper = Stepper::new(gpu, config)?;
    stepper.run(FIRST_STEPS)?;
    gpu.reset_profile()?;
    stepper.run(steps)?;
    let (clock, kernels) = gpu.profile()?;
    Ok(Profile { gpu: gpu.clone(), clock, kernels, steps: steps.max(1) })
}

impl Profile {
    /// Milliseconds of one step, all launches added up.
    pub fn total_ms(&self) -> f64 {
        self.kernels.iter().map(|k| k.seconds).sum::<f64>() * 1e3 / self.steps as f64
    }

    /// All variants, the longest first.
    pub fn lines(&self) -> Vec<Line> {
        let total = self.total_ms().max(f64::MIN_POSITIVE);
        let line = |k: &KernelTime| {
            let (kernel, variant) = k.kernel.split_once(' ').unwrap_or((&k.kernel, ""));
            let ms = k.seconds * 1e3 / self.steps as f64;
            Line {
                kernel: kernel.into(),
                variant: variant.into(),
                workgroups: k.groups,
                launches: k.dispatches / self.steps as u64,
                ms,
                share: ms / total,
                clock: self.clock.name(),
                adapter: self.gpu.name().into(),
                driver: self.gpu.driver().into(),
            }
        };
        self.kernels.iter().map(line).collect()
    }

    /// Two tables: by kernel name, then by variant and number of workgroups. Times and launches are of one step.
    pub fn table(&self) -> String {
        let lines = self.lines();
        let mut names = BTreeMap::<&str, (u64, f64)>::new();
        for line in &lines {
            let sum = names.entry(&line.kernel).or_default();
            sum.0 += line.launches;
            sum.1 += line.ms;
        }
        let mut names: Vec<_> = names.into_iter().map(|(name, (n, ms))| (name.to_string(), n, ms)).collect();
        names.sort_by(|a, b| b.2.total_cmp(&a.2));
        let launches: u64 = self.kernels.iter().map(|k| k.dispatches).sum::<u64>() / self.steps as u64;
        let mut out = format!(
            "{:.3} ms in {launches} launches of a step, each timed by itself ({} clock)\n",
            self.total_ms(),
            self.clock.name()
        );
        self.print(&mut out, names.into_iter());
        let _ = writeln!(out, "by variant and workgroups, the {LONGEST} longest:");
        let longest = lines.into_iter().take(LONGEST);
        self.print(
            &mut out,
            longest.map(|l| (format!("{} x {} {}", l.workgroups, l.kernel, l.variant), l.launches, l.ms)),
        );
        out
    }

    fn print(&self, out: &mut String, rows: impl Iterator<Item = (String, u64, f64)>) {
        let _ = writeln!(out, "  share        ms  launches  kernel");
        for (name, launches, ms) in rows {
            let share = 100.0 * ms / self.total_ms().max(f64::MIN_POSITIVE);
            let _ = writeln!(out, "{share:6.2}%  {ms:8.4}  {launches:8}  {}", name.trim_end());
        }
    }
}

impl Line {
    /// As one line of JSON.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("a line has only numbers and words")
    }
}

/// Lines as comma-separated values with a head line.
pub fn csv(lines: &[Line]) -> String {
    let quote = |s: &str| format!("\"{}\"", s.replace('"', "\"\""));
    let mut out = "kernel,variant,workgroups,launches,ms,share,clock,adapter,driver\n".to_string();
    for l in lines {
        let words = [l.clock, &l.adapter, &l.driver].map(quote).join(",");
        let (kernel, variant) = (quote(&l.kernel), quote(&l.variant));
        let _ =
            writeln!(out, "{kernel},{variant},{},{},{},{},{words}", l.workgroups, l.launches, l.ms, l.share);
    }
    out
}

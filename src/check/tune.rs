//! `moe8 tune`: finds the fastest matrix kernel of every class of products, and the kernels that must not be used.
//!
//! A candidate is written down as being tried, compared with the reference on small ragged groups and on a product of its
//! class, and only then timed. Each has a device of its own: one that is lost takes nothing else along.

use crate::bench::data::Split;
use crate::bench::gemm::{Linear, Pass};
use crate::bench::runner::{Case, Runner, Settings};
use crate::bench::step::Precision;
use crate::gpu::{Decisions, Fastest, GemmKernel, Gpu};
use crate::num::DType;
use crate::ops::gemm_choice::{Form, Product, Size, candidates, class_name, op_name};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::time::Duration;

/// A kernel and the class of products that it is tried on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// The kernel.
    pub kernel: GemmKernel,
    /// The operands.
    pub precision: Precision,
    /// The product of a linear layer.
    pub pass: Pass,
    /// Its size.
    pub size: Size,
}

impl Trial {
    /// Every kernel on every class.
    pub fn all() -> Vec<Trial> {
        let mut all = Vec::new();
        for kernel in GemmKernel::ALL {
            for precision in Precision::ALL {
                for size in Size::ALL {
                    all.extend(Pass::ALL.map(|pass| Trial { kernel, precision, pass, size }));
                }
            }
        }
        all
    }

    fn form(&self) -> Form {
        match self.pass {
            Pass::Forward => Form::Nt,
            Pass::Input => Form::Nn,
            Pass::Weight => Form::Tn,
        }
    }

    fn op(&self) -> String {
        op_name(self.form(), self.precision.name())
    }

    fn class(&self) -> String {
        class_name(self.form(), self.precision.name(), self.size)
    }

    /// M, K, N of a layer whose three products are all of the trial's size.
    fn shape(&self, software: bool) -> [usize; 3] {
        match (self.size, software) {
            (Size::Narrow, false) => [4096, 4096, 8],
            (Size::Thin, false) => [4096, 1024, 32],
            (Size::Small, false) => [2048, 512, 512],
            (Size::Large, false) => [4096, 4096, 4096],
            (Size::Narrow, true) => [256, 128, 8],
            (Size::Thin, true) => [256, 128, 32],
            (Size::Small, true) => [128, 64, 96],
            // Smaller than the class: what counts there is seconds.
            (Size::Large, true) => [384, 256, 256],
        }
    }

    /// Whether the kernel may be tried on `gpu`.
    fn can_run(&self, gpu: &Gpu) -> bool {
        let operand = match self.precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::Fp8 => DType::E4M3,
        };
        let [m, k, n] = self.shape(gpu.caps().software);
        let sizes = match self.pass {
            Pass::Forward => [m, n, k],
            Pass::Input => [m, k, n],
            Pass::Weight => [n, k, m],
        };
        let product = Product { form: self.form(), operands: [operand; 2], sizes };
        candidates(gpu, &product).contains(&self.kernel)
    }

    /// A small case of ragged groups, and the one to be timed.
    fn cases(&self, gpu: &Gpu) -> Result<[Case; 2]> {
        let ragged = Split { name: "ragged".into(), sizes: vec![130, 0, 1, 66] };
        let width = if self.size == Size::Narrow { 9 } else { 68 };
        let small = Linear::new(gpu, [197, 100, width], Some(&ragged), self.precision)?;
        let timed = Linear::new(gpu, self.shape(gpu.caps().software), None, self.precision)?;
        Ok([small.product(gpu, self.pass)?, timed.product(gpu, self.pass)?])
    }

    /// Milliseconds, or what is wrong with a result.
    fn run(
        &self,
        gpu: &Gpu,
        spoil: &dyn Fn(&Trial, Case) -> Case,
    ) -> Result<std::result::Result<f64, String>> {
        let [small, timed] = self.cases(gpu)?.map(|case| spoil(self, case));
        let results = (small.run)(gpu)?;
        if let Some(wrong) = (small.check)(gpu, &results)?.wrong {
            return Ok(Err(format!("a wrong result for ragged groups: {wrong}")));
        }
        let row = Runner::with(gpu, settings(gpu)).measure_case(&timed)?;
        Ok(row.min_ms.ok_or_else(|| format!("a wrong result: {}", row.failed.unwrap_or_default())))
    }
}

/// Shorter than a benchmark's: kernels that differ by a few percent may be taken for each other. The fastest repetition counts.
fn settings(gpu: &Gpu) -> Settings {
    let ms = Duration::from_millis;
    // The host has just made the operands, and a GPU that has idled runs slowly for a while.
    let warm_up = if gpu.caps().software { ms(5) } else { ms(500) };
    Settings { warm_up, warm_up_again: warm_up, repetitions: 3, window: ms(15) }
}

/// Runs the trials and keeps what they found in `decisions`; `open` opens the adapter with one kernel, without a cache, and
/// `say` hears of each result. `spoil` may change a case (tests plant faults with it).
///
/// # Errors
/// An adapter that does not open, or a file that cannot be written.
pub fn tune(
    trials: &[Trial],
    open: &dyn Fn(GemmKernel) -> Result<Gpu>,
    decisions: &mut Decisions,
    spoil: &dyn Fn(&Trial, Case) -> Case,
    say: &mut dyn FnMut(&str),
) -> Result<()> {
    let mut times: BTreeMap<String, Vec<(GemmKernel, f64)>> = BTreeMap::new();
    let mut device: Option<(GemmKernel, Gpu)> = None;
    for trial in trials {
        let (kernel, op) = (trial.kernel, trial.op());
        if !decisions.may_try(&op, kernel) {
            continue;
        }
        let gpu = match device.take() {
            Some((of, gpu)) if of == kernel => gpu,
            _ => match open(kernel) {
                Ok(gpu) => gpu,
                // Matrix units where there are none.
                Err(Error::User { .. }) => continue,
                Err(e) => return Err(e),
            },
        };
        if !trial.can_run(&gpu) {
            device = Some((kernel, gpu));
            continue;
        }
        decisions.begin(&op, kernel)?;
        let outcome = trial.run(&gpu, spoil);
        // An adapter that lost its device is opened again; one that is too small for a case has shown nothing.
        device = Some((kernel, gpu)).filter(|_| outcome.is_ok());
        let wrong = match outcome {
            Ok(Ok(ms)) => {
                say(&format!("{}: {} {ms:.4} ms", trial.class(), kernel.name()));
                times.entry(trial.class()).or_default().push((kernel, ms));
                None
            }
            Ok(Err(wrong)) => Some(wrong),
            Err(Error::Gpu { what, .. }) => Some(what),
            Err(e) => {
                say(&format!("{}: {} is not measured: {e}", trial.class(), kernel.name()));
                None
            }
        };
        if let Some(why) = &wrong {
            log::warn!("{} is not used for {op} here from now on: {why}", kernel.name());
        }
        decisions.end(wrong)?;
    }
    conclude(&times, decisions, say)
}

/// Sets the fastest kernel of each class, of those that stayed.
fn conclude(
    times: &BTreeMap<String, Vec<(GemmKernel, f64)>>,
    decisions: &mut Decisions,
    say: &mut dyn FnMut(&str),
) -> Result<()> {
    for (class, all) in times {
        let op = class.rsplit_once(' ').map_or("", |(op, _)| op);
        let mut good: Vec<_> = all.iter().filter(|(k, _)| decisions.rejection(op, *k).is_none()).collect();
        good.sort_by(|a, b| a.1.total_cmp(&b.1));
        let Some((kernel, ms)) = good.first() else { continue };
        let next = good.get(1);
        let fastest = Fastest {
            kernel: kernel.name().into(),
            than: next.map(|(kernel, _)| kernel.name().into()),
            times: next.map_or(1.0, |(_, other)| other / ms),
        };
        let than = fastest
            .than
            .as_ref()
            .map_or("no other can run".into(), |than| format!("{:.2}x faster than {than}", fastest.times));
        say(&format!("{class}: {} ({than})", fastest.kernel));
        decisions.set(class, fastest)?;
    }
    Ok(())
}

//! `moe8 tune`: finds the fastest kernel of every class of calls of ops that have several, and those that must not be used.
//!
//! A candidate is written down as being tried, compared with the reference on small ragged cases and on a case of its
//! class, and only then timed. Each has a device of its own: one that is lost takes nothing else along. Times are written
//! down as they come: an interrupted tuning goes on where it was.

use super::trial::{AnyKernel, Trial};
use crate::bench::runner::Case;
use crate::gpu::{Decisions, Fastest, Gpu};
use crate::{Error, Result};

/// What a trial came to.
enum Outcome {
    /// Milliseconds.
    Time(f64),
    /// A wrong result, or a lost device.
    Wrong(String),
    /// The adapter is too small for the case: that shows nothing.
    Untried(String),
}

/// Where a tuning is, for whoever shows it.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Trials done, and all of them.
    pub done: usize,
    /// All trials.
    pub of: usize,
    /// What came out last; while a trial begins, nothing.
    pub result: Option<&'a str>,
    /// What is being tried.
    pub now: &'a str,
}

/// Runs the trials and keeps what they found in `decisions`; `open` opens the adapter with one kernel, without a cache, and
/// `say` hears of each trial, before it and after. `spoil` may change a case (tests plant faults with it).
///
/// # Errors
/// An adapter that does not open, or a file that cannot be written.
pub fn tune(
    trials: &[Trial],
    open: &dyn Fn(AnyKernel) -> Result<Gpu>,
    decisions: &mut Decisions,
    spoil: &dyn Fn(&Trial, Case) -> Case,
    say: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let mut device: Option<(AnyKernel, Gpu)> = None;
    for (done, trial) in trials.iter().enumerate() {
        let (kernel, op, class) = (trial.kernel, trial.op(), trial.class());
        let timed = decisions.timings().get(&class).is_some_and(|all| all.contains_key(kernel.name()));
        if timed || !decisions.may_try(&op, kernel.name()) {
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
        if !trial.can_run(&gpu)? {
            device = Some((kernel, gpu));
            continue;
        }
        let now = format!("{class}: {}", kernel.name());
        let at = |done, result| Progress { done, of: trials.len(), result, now: &now };
        say(at(done, None));
        decisions.begin(&op, kernel.name())?;
        let outcome = outcome(trial.run(&gpu, spoil));
        // An adapter that lost its device is opened again.
        device = Some((kernel, gpu)).filter(|_| matches!(outcome, Outcome::Time(_)));
        let result = match &outcome {
            Outcome::Time(ms) => format!("{now} {ms:.4} ms"),
            Outcome::Wrong(why) => format!("{now} is not used from now on: {why}"),
            Outcome::Untried(why) => format!("{now} is not measured: {why}"),
        };
        say(at(done + 1, Some(&result)));
        match outcome {
            Outcome::Time(ms) => {
                decisions.time(&class, kernel.name(), ms);
                decisions.end(None)?;
            }
            Outcome::Wrong(why) => decisions.end(Some(why))?,
            Outcome::Untried(_) => decisions.give_up()?,
        }
    }
    conclude(trials, decisions, say)
}

fn outcome(run: Result<std::result::Result<f64, String>>) -> Outcome {
    match run {
        Ok(Ok(ms)) => Outcome::Time(ms),
        Ok(Err(wrong)) => Outcome::Wrong(wrong),
        Err(Error::Gpu { what, .. }) => Outcome::Wrong(what),
        Err(e) => Outcome::Untried(e.to_string()),
    }
}

/// Sets the fastest kernel of each class, of those that stayed.
fn conclude(trials: &[Trial], decisions: &mut Decisions, say: &mut dyn FnMut(Progress<'_>)) -> Result<()> {
    for (class, all) in decisions.timings().clone() {
        let op = class.rsplit_once(' ').map_or("", |(op, _)| op);
        let mut good: Vec<_> = all.iter().filter(|(k, _)| decisions.rejection(op, k).is_none()).collect();
        good.sort_by(|a, b| a.1.total_cmp(b.1));
        let Some((kernel, ms)) = good.first() else { continue };
        let next = good.get(1);
        let fastest = Fastest {
            kernel: (*kernel).clone(),
            than: next.map(|(kernel, _)| (*kernel).clone()),
            times: next.map_or(1.0, |(_, other)| *other / **ms),
        };
        let than = fastest
            .than
            .as_ref()
            .map_or("no other can run".into(), |than| format!("{:.2}x faster than {than}", fastest.times));
        let line = format!("{class}: {} ({than})", fastest.kernel);
        say(Progress { done: trials.len(), of: trials.len(), result: Some(&line), now: "" });
        decisions.set(&class, fastest)?;
    }
    decisions.finish()
}

//! The steps between two that are logged: their time, memory and counts.

use super::metrics::StepRecord;
use super::trainer::StepStats;
use crate::gpu::Counters;
use std::time::Instant;

/// What the log line needs to know of the time since the last one.
pub(super) struct Window {
    pub since: Instant,
    pub steps: usize,
    pub memory: u64,
    pub counters: Counters,
}

/// When a step was finished, whose call returned at `returned` and whose numbers were asked for at `asked` and there at `read`; the one
/// logged before it at `since`. Where most of a step has run when its call returns (ranks that meet, `--check-nan`, drivers that do not
/// run ahead), its numbers are not waited for while the next step's call takes its time, which belongs to the next.
pub(super) fn finished(since: Instant, returned: Instant, asked: Instant, read: Instant) -> Instant {
    let next = asked - returned;
    let is_there = 4 * (read - asked) < next;
    if is_there && 2 * returned.saturating_duration_since(since) >= next { returned } else { read }
}

/// What is logged of a step (from 0), from its numbers and its window.
pub(super) fn record(step: usize, stats: &StepStats, tokens_per_second: f64, window: &Window) -> StepRecord {
    StepRecord {
        step: step as u64 + 1,
        loss: stats.loss,
        grad_norm: stats.grad_norm,
        lr: stats.lr,
        tokens_per_second,
        memory_bytes: window.memory,
        tokens_per_expert: stats.counts.clone(),
        dispatches: window.counters.dispatches,
        submits: window.counters.submits,
        uploads: window.counters.uploads,
        downloads: window.counters.downloads,
    }
}

/// What was counted between two readings.
pub(super) fn difference(now: Counters, before: Counters) -> Counters {
    Counters {
        dispatches: now.dispatches - before.dispatches,
        submits: now.submits - before.submits,
        uploads: now.uploads - before.uploads,
        downloads: now.downloads - before.downloads,
        pipelines: now.pipelines - before.pipelines,
    }
}

#[cfg(test)]
mod tests {
    use super::finished;
    use std::time::{Duration, Instant};

    #[test]
    fn a_step_that_has_run_when_its_call_returns_is_finished_then() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        // The device works behind the calls: numbers are waited for.
        assert_eq!(finished(at(0), at(5), at(10), at(20)), at(20));
        // The calls wait for the device: 100 ms each, and the second one's are not the first one's.
        assert_eq!(finished(at(0), at(100), at(200), at(201)), at(100));
        // A first step whose call was short, behind which the second one's makes its buffers.
        assert_eq!(finished(at(0), at(10), at(300), at(301)), at(301));
        // The last step has none behind it.
        assert_eq!(finished(at(100), at(200), at(200), at(201)), at(201));
        // Never before the step before it.
        assert_eq!(finished(at(150), at(100), at(200), at(201)), at(201));
    }
}

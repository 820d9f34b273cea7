//! Runs a closure on ranks that are threads.

use super::{Communicator, DEFAULT_TIMEOUT, Local};
use crate::{Error, Result};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::Duration;

/// What the main thread gets from Linux by default; a spawned one would get a quarter of it.
const STACK_BYTES: usize = 8 << 20;

/// Runs `body` on `n` ranks, each a thread with its own communicator, and returns their results in
/// rank order.
///
/// When a rank fails, the others fail at their next collective, and the error returned is the
/// cause: a panic (as [`Error::Comm`], with its message) before an error of the rank's own, and
/// that before the errors that merely follow from it.
pub fn run_threads<T: Send>(
    n: usize,
    body: impl Fn(Box<dyn Communicator>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    run_threads_within(n, DEFAULT_TIMEOUT, body)
}

/// As [`run_threads`]; a rank that waits longer than `timeout` for the others fails.
pub fn run_threads_within<T: Send>(
    n: usize,
    timeout: Duration,
    body: impl Fn(Box<dyn Communicator>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let body = &body;
    std::thread::scope(|scope| {
        let ranks = Local::world_within(n, timeout).into_iter();
        // A rank that cannot be started drops those after it, and so the started ones fail too.
        let threads: Vec<_> = ranks.map(|comm| start(scope, comm, body)).collect::<Result<_>>()?;
        first_cause(threads.into_iter().enumerate().map(|(r, t)| join(r, t)).collect())
    })
}

fn start<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    comm: Local,
    body: &'scope (impl Fn(Box<dyn Communicator>) -> Result<T> + Sync),
) -> Result<ScopedJoinHandle<'scope, Result<T>>> {
    let rank = comm.rank();
    let thread = Builder::new().name(format!("rank {rank}")).stack_size(STACK_BYTES);
    thread.spawn_scoped(scope, move || body(Box::new(comm))).map_err(|e| {
        Error::comm(format!("cannot start a thread for rank {rank}: {e}"), "ask for fewer ranks")
    })
}

/// How close an error is to the root of a failure; the smallest wins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    Panic,
    Own,
    Comm,
}

fn join<T>(rank: usize, thread: ScopedJoinHandle<'_, Result<T>>) -> std::result::Result<T, (Cause, Error)> {
    match thread.join() {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e @ Error::Comm { .. })) => Err((Cause::Comm, e)),
        Ok(Err(e)) => Err((Cause::Own, e)),
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            let hint = "this is a bug in moe8: please report it with the lines above";
            Err((Cause::Panic, Error::comm(format!("rank {rank} panicked: {words}"), hint)))
        }
    }
}

fn first_cause<T>(ends: Vec<std::result::Result<T, (Cause, Error)>>) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(ends.len());
    let mut errors = Vec::new();
    for end in ends {
        match end {
            Ok(value) => values.push(value),
            Err(error) => errors.push(error),
        }
    }
    // Of equal causes the lowest rank's: `min_by_key` returns the first.
    errors.into_iter().min_by_key(|(cause, _)| *cause).map_or(Ok(values), |(_, e)| Err(e))
}

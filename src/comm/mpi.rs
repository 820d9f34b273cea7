//! Ranks as MPI processes, through rsmpi.
//!
//! Errors inside MPI stay fatal (`MPI_ERRORS_ARE_FATAL`, the default): rsmpi's safe functions drop
//! return codes, so `MPI_ERRORS_RETURN` would turn a failed collective into silent garbage. What can
//! be checked beforehand is: lengths by `assert!`, and that all ranks make the same call by a
//! 24-byte all-gather before each one (0.6 us on two ranks of one machine).

use super::Communicator;
use super::call::Call;
use super::chunk;
use super::stats::{CommStats, Meter};
use crate::{Error, Result};
use mpi::Threading;
use mpi::environment::{Universe, initialize_with_threading, is_finalized, is_initialized};
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::{Communicator as _, CommunicatorCollectives as _, Root as _};
use std::io::Write;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};

/// The most bytes in one MPI call: far below the `i32` that MPI counts with, yet so many that few
/// calls go in pieces, which costs another copy.
const CHUNK_BYTES: usize = 256 << 20;

/// Exit code of a job that a panic ended, as Rust's own for a panicking process.
const PANIC_CODE: i32 = 101;

/// Open from [`Mpi::open`] to [`finalize`]; MPI can be opened once per process.
static UNIVERSE: Mutex<Option<Universe>> = Mutex::new(None);

/// One rank of an MPI job.
pub struct Mpi {
    handle: Mutex<Handle>,
    rank: usize,
    size: usize,
    name: String,
    chunk: usize,
    concurrent: bool,
    meter: Meter,
}

/// An MPI communicator that is never freed: `MPI_Comm_free` is collective, and a rank that leaves
/// because of an error must not wait for the others. The process has a handful of them.
struct Handle(ManuallyDrop<SimpleCommunicator>);

// SAFETY: a communicator handle is valid in the whole process, and any thread may use it (MPI 3.1,
// section 12.4) once the library provides MPI_THREAD_SERIALIZED, which `Mpi::open` insists on. It is
// not Send of itself only because Open MPI's handle is a pointer.
unsafe impl Send for Handle {}

impl Mpi {
    /// Opens MPI and returns this process's end of `MPI_COMM_WORLD`.
    ///
    /// From here on a panic on any thread ends the whole job with exit code 101.
    /// Errors: [`Error::Comm`] when MPI was opened before, or the library forbids threads.
    pub fn open() -> Result<Mpi> {
        let Some((universe, got)) = initialize_with_threading(Threading::Multiple) else {
            return Err(Error::comm(
                "MPI is already open in this process, or was; it can be opened once",
                "hand the communicator on, or split it",
            ));
        };
        let world = universe.world();
        *UNIVERSE.lock().unwrap_or_else(PoisonError::into_inner) = Some(universe);
        abort_on_panic();
        if got < Threading::Serialized {
            return Err(Error::comm(
                format!("the MPI library provides only thread level {got:?}"),
                "use an MPI library built with thread support, or ranks as threads (without mpirun)",
            ));
        }
        if got < Threading::Multiple {
            log::warn!("the MPI library provides thread level {got:?}, not Multiple: no prefetching");
        }
        let name = format!("mpi ({})", library_name());
        Ok(Mpi::wrap(world, name, CHUNK_BYTES, got >= Threading::Multiple))
    }

    /// The same rank, with at most `bytes` bytes in one MPI call (but at least one per rank). Every
    /// rank must choose the same value.
    pub fn with_chunk_limit(self, bytes: usize) -> Mpi {
        Mpi { chunk: bytes.min(CHUNK_BYTES), ..self }
    }

    fn wrap(comm: SimpleCommunicator, name: String, chunk: usize, concurrent: bool) -> Mpi {
        let (rank, size) = (comm.rank() as usize, comm.size() as usize);
        let handle = Mutex::new(Handle(ManuallyDrop::new(comm)));
        Mpi { handle, rank, size, name, chunk, concurrent, meter: Meter::default() }
    }

    /// One collective: takes the turn, checks that all ranks make the same `call`, and does `work`.
    fn collective<T>(&self, call: Call, work: impl FnOnce(&SimpleCommunicator) -> Result<T>) -> Result<T> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let comm: &SimpleCommunicator = &handle.0;
        if is_finalized() {
            return Err(Error::comm(
                format!("rank {}: {call} after MPI was closed", self.rank),
                "communicate before comm::finalize",
            ));
        }
        let mut calls = vec![0u64; 3 * self.size];
        comm.all_gather_into(&call.to_wire()[..], &mut calls[..]);
        Call::agree(calls.chunks_exact(3).map(Call::from_wire))?;
        let done = work(comm)?;
        self.meter.count(&call, self.rank, self.size);
        Ok(done)
    }
}

impl Communicator for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn concurrent(&self) -> bool {
        self.concurrent
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let call = Call::all_gather(self.size, send.len(), recv.len());
        self.collective(call, |comm| {
            chunk::all_gather(self.chunk, self.size, send, recv, |s, r| {
                comm.all_gather_into(s, r);
                Ok(())
            })
        })
    }

    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let call = Call::all_to_all(self.size, send.len(), recv.len());
        self.collective(call, |comm| {
            chunk::all_to_all(self.chunk, self.size, send, recv, |s, r| {
                comm.all_to_all_into(s, r);
                Ok(())
            })
        })
    }

    fn broadcast(&self, root: usize, buf: &mut [u8]) -> Result<()> {
        let call = Call::broadcast(self.size, root, buf.len());
        self.collective(call, |comm| {
            let root = comm.process_at_rank(root as i32);
            chunk::broadcast(self.chunk, buf, |part| {
                root.broadcast_into(part);
                Ok(())
            })
        })
    }

    fn barrier(&self) -> Result<()> {
        // The check that all ranks make this call is a barrier itself.
        self.collective(Call::BARRIER, |_| Ok(()))
    }

    fn stats(&self) -> CommStats {
        self.meter.get()
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let [Ok(color), Ok(key)] = [i32::try_from(color), i32::try_from(key)] else {
            panic!("split with color {color} and key {key}: both must fit an i32");
        };
        let part = self.collective(Call::SPLIT, |comm| {
            let part = comm.split_by_color_with_key(Color::with_value(color), key);
            Ok(part.expect("a rank with a color gets a communicator"))
        })?;
        Ok(Box::new(Mpi::wrap(part, self.name.clone(), self.chunk, self.concurrent)))
    }
}

/// Makes a panic on any thread end the whole job: a rank that unwound into `MPI_Finalize` would
/// wait there for ranks that wait for it.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        // Nothing can be done about a closed stream here.
        let _ = std::io::stdout().flush();
        let _ = std::io::stderr().flush();
        abort_job(PANIC_CODE);
    }));
}

/// Ends all ranks with `code` where MPI is open; returns where it is not.
pub(super) fn abort_job(code: i32) {
    if is_initialized() && !is_finalized() {
        // SAFETY: MPI is open, and MPI_Abort may be called by any thread at any time.
        unsafe { mpi::ffi::MPI_Abort(mpi::ffi::RSMPI_COMM_WORLD, code) };
    }
}

/// Closes MPI; nothing where it is not open.
pub(super) fn finalize() {
    drop(UNIVERSE.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// The library's name and version, such as `Open MPI 4.1.4` or `MPICH 4.0.2`.
fn library_name() -> String {
    // "Open MPI v4.1.4, package: ..." and "MPICH Version:      4.0.2\n..."
    let text = mpi::environment::library_version().unwrap_or_default();
    let first = text.split([',', '\n']).next().unwrap_or_default().replace("Version:", "");
    let words: Vec<&str> = first.split_whitespace().map(|w| w.trim_start_matches('v')).collect();
    words.join(" ")
}

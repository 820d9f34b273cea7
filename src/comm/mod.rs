//! Ranks: one process, threads of one process, or MPI processes, behind one trait.
//!
//! Only bytes in host memory pass here; what they mean is the caller's business. Everything that
//! adds numbers is in [`reduce`], built on [`Communicator::all_gather`] and
//! [`Communicator::all_to_all`] with a local sum in rank order, so results are the same bits on
//! every backend and in every run. (MPI's own reductions may sum in any order, and Open MPI 4's
//! reduce-scatter is several times slower than an all-to-all followed by a local sum.)
//!
//! A program asks [`run`] for ranks and gets a communicator on each:
//!
//! ```
//! let sums = moe8::comm::run(Some(3), |comm| {
//!     let mut x = [comm.rank() as f32];
//!     moe8::comm::reduce::all_reduce_f32(&*comm, &mut x, moe8::comm::reduce::Op::Sum)?;
//!     Ok(x[0])
//! });
//! assert_eq!(sums.unwrap(), [3.0; 3]);
//! ```
//!
//! Rules that every backend holds:
//! - Every rank makes the same calls in the same order, with the same sizes and root. A call that
//!   differs is an [`crate::Error::Comm`] on every rank, which names both calls.
//! - A rank that panics or leaves early makes the others fail; it does not make them wait for ever.
//! - Calls on one communicator from several threads take turns; which comes first is the
//!   caller's business. For a helper thread, [`Communicator::split`] off a communicator of its own.

use crate::Result;

mod call;
pub mod chunk;
mod launch;
mod local;
#[cfg(feature = "mpi")]
mod mpi;
mod planned;
pub mod reduce;
mod solo;
mod stats;
mod threads;

pub use launch::{Launcher, abort, finalize, from_env, run};
pub use local::{DEFAULT_TIMEOUT, Local};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
pub use planned::Planned;
pub use solo::Solo;
pub use stats::{CommStats, Traffic};
pub use threads::{run_threads, run_threads_within};

/// One rank's end of a group of ranks.
///
/// Lengths are in bytes. A buffer of the wrong length, or a root that does not exist, is a broken
/// contract and panics; what other ranks can cause is an [`crate::Error::Comm`].
pub trait Communicator: Send + Sync {
    /// This rank's number, `0..size()`.
    fn rank(&self) -> usize;

    /// How many ranks the group has; at least 1.
    fn size(&self) -> usize;

    /// The backend, for logs: `solo`, `threads` or `mpi (Open MPI 4.1.4)`.
    fn name(&self) -> &str;

    /// Whether two communicators may be in use at the same time from two threads of this rank.
    ///
    /// False only for an MPI library without `MPI_THREAD_MULTIPLE`; a caller must then not prefetch
    /// on a helper thread.
    fn concurrent(&self) -> bool {
        true
    }

    /// Puts every rank's `send` into `recv`, in rank order: `recv` is `[size, send.len()]`.
    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()>;

    /// Sends block `p` of `send` to rank `p`, and puts what rank `p` sent here into block `p` of
    /// `recv`. Both are `[size, block]`.
    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()>;

    /// Copies `buf` of rank `root` into `buf` of all ranks.
    fn broadcast(&self, root: usize, buf: &mut [u8]) -> Result<()>;

    /// Returns once every rank has called it.
    fn barrier(&self) -> Result<()>;

    /// What passed through this handle so far.
    fn stats(&self) -> CommStats;

    /// A communicator of the ranks that give the same `color`, numbered by `key`, ties by their
    /// rank here (as `MPI_Comm_split`, MPI 3.1 section 6.4.2). Its statistics start at zero.
    /// Both values must fit an `i32`.
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>>;
}

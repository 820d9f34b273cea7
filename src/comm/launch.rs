//! How many ranks, and as what: the launcher's environment decides.

use super::{Communicator, Solo, run_threads};
use crate::{Error, Result};
use std::io::Write;

/// Launchers by the variables that they give each process: name, number of ranks, rank.
const LAUNCHERS: [(&str, &str, &str); 4] = [
    ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MPICH", "PMI_SIZE", "PMI_RANK"),
    ("MVAPICH2", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    // Slurm sets its own variables in batch scripts too; only PMIX_RANK says that `srun` gave us a rank.
    ("PMIx", "SLURM_STEP_NUM_TASKS", "PMIX_RANK"),
];

/// The MPI launcher that started this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launcher {
    /// Whose variables were found.
    pub name: &'static str,
    /// Number of ranks, where the launcher says it.
    pub size: Option<usize>,
    /// This process's rank: known before MPI is open, for instance to log on one rank only.
    pub rank: usize,
}

impl Launcher {
    /// The launcher that `get`, which reads an environment variable, gives away; `None` for a
    /// process that nobody launched.
    pub fn detect(get: impl Fn(&str) -> Option<String>) -> Option<Launcher> {
        let number = |key: &str| get(key).and_then(|v| v.trim().parse().ok());
        LAUNCHERS.iter().find_map(|&(name, size, rank)| {
            let rank = number(rank)?;
            Some(Launcher { name, size: number(size), rank })
        })
    }

    /// Whether MPI is to be opened, when the user asked for `ranks` ranks and the program was
    /// `built` with MPI; otherwise this process is alone.
    ///
    /// Errors: [`Error::User`] when the launcher's number of ranks differs from `ranks`, or when
    /// there are several processes that cannot talk to each other.
    pub fn wants_mpi(&self, ranks: Option<usize>, built: bool) -> Result<bool> {
        if let (Some(asked), Some(given)) = (ranks, self.size)
            && asked != given
        {
            return Err(ranks_differ(asked, given));
        }
        if !built && self.size != Some(1) {
            let n = self.size.map_or("several".to_string(), |n| n.to_string());
            return Err(Error::user(
                format!(
                    "MPI asked for but not built: {} started {n} processes of a program without MPI",
                    self.name
                ),
                "build with `cargo build --release --features mpi`, or start it without mpirun to get ranks as threads",
            ));
        }
        Ok(built)
    }
}

fn ranks_differ(asked: usize, given: usize) -> Error {
    Error::user(
        format!("{asked} ranks asked for, but the MPI launcher started {given}"),
        "give the number of ranks once: to mpirun (-n), or without mpirun to moe8",
    )
}

/// The communicator of the MPI launcher that started this process, or `None` where there is none:
/// the caller then makes `ranks` threads, or works alone.
///
/// Errors: [`Error::User`] for 0 ranks, for a launcher with another number of ranks, and under a
/// launcher with several ranks when this program was built without the feature `mpi`;
/// [`Error::Comm`] when MPI is already open (once per process).
pub fn from_env(ranks: Option<usize>) -> Result<Option<Box<dyn Communicator>>> {
    if ranks == Some(0) {
        return Err(Error::user("0 ranks asked for", "at least 1 is needed"));
    }
    match Launcher::detect(|key| std::env::var(key).ok()) {
        Some(launcher) if launcher.wants_mpi(ranks, cfg!(feature = "mpi"))? => open_mpi(ranks),
        _ => Ok(None),
    }
}

#[cfg(feature = "mpi")]
fn open_mpi(ranks: Option<usize>) -> Result<Option<Box<dyn Communicator>>> {
    let comm = super::Mpi::open()?;
    match ranks {
        Some(asked) if asked != comm.size() => Err(ranks_differ(asked, comm.size())),
        _ => Ok(Some(Box::new(comm))),
    }
}

#[cfg(not(feature = "mpi"))]
fn open_mpi(_ranks: Option<usize>) -> Result<Option<Box<dyn Communicator>>> {
    unreachable!("wants_mpi is false in a build without MPI")
}

/// Runs `body` on every rank: on this process's own under an MPI launcher, else on `ranks` threads
/// (one, in this very thread, when `ranks` is `None` or 1). Returns the results of the ranks in this
/// process.
///
/// Errors: those of [`from_env`] and of `body`. After an error under MPI the other ranks may be
/// waiting for this one: print it and end the process with [`abort`].
pub fn run<T: Send>(
    ranks: Option<usize>,
    body: impl Fn(Box<dyn Communicator>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if let Some(comm) = from_env(ranks)? {
        let result = body(comm)?;
        finalize();
        return Ok(vec![result]);
    }
    match ranks.unwrap_or(1) {
        1 => Ok(vec![body(Box::new(Solo::new()))?]),
        n => run_threads(n, body),
    }
}

/// Closes MPI where it is open. Collective: every rank must call it, and none may communicate
/// afterwards. [`run`] does it after a success.
pub fn finalize() {
    #[cfg(feature = "mpi")]
    super::mpi::finalize();
}

/// Ends this process, and under MPI all ranks of the job, with exit code `code`.
///
/// Under MPI a rank that merely returned would be waited for by the others.
pub fn abort(code: i32) -> ! {
    // Nothing can be done about a closed stream here.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    #[cfg(feature = "mpi")]
    super::mpi::abort_job(code);
    std::process::exit(code)
}

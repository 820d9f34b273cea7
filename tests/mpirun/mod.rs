//! Runs a test of this very binary on MPI ranks: `mpirun -n N <binary> --exact <test> --nocapture`.
//!
//! A test calls [`launch`] unless [`is_child`]; in the child it opens MPI and does the work. The
//! settings are environment variables, so that MPICH's launcher, which ignores Open MPI's, works
//! too. `MOE8_MPIRUN` names another launcher than `mpirun`.

use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Jobs run one at a time: each alone may have more ranks than the machine has cores.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// As root, more ranks than cores, no pinning, no spinning; of Open MPI 4 and 5.
const SETTINGS: [(&str, &str); 8] = [
    ("MOE8_MPI_CHILD", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("OMPI_MCA_mpi_yield_when_idle", "1"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
];

/// Only a hang takes so long: three ranks with software adapters need seconds alone, and over half a minute at a load of 12 on two cores.
const PATIENCE: Duration = Duration::from_secs(600);

/// How a job ended.
pub struct Job {
    /// The launcher's exit code; `None` when it had to be killed.
    pub code: Option<i32>,
    /// What all ranks printed.
    pub text: String,
    /// From start to end.
    pub took: Duration,
}

/// Whether this process is a rank of a job.
pub fn is_child() -> bool {
    std::env::var_os("MOE8_MPI_CHILD").is_some()
}

/// Runs test `name` on `ranks` ranks; the launcher ends it after `limit`, and we the launcher soon
/// after that.
pub fn launch(name: &str, ranks: usize, limit: Duration) -> Job {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mpirun = std::env::var("MOE8_MPIRUN").unwrap_or_else(|_| "mpirun".into());
    let log = tempfile::NamedTempFile::new().unwrap();
    let start = Instant::now();
    let mut job = Command::new(&mpirun)
        .args(["-n", &ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .envs(SETTINGS)
        .env("MPIEXEC_TIMEOUT", limit.as_secs().to_string())
        .env("LP_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(log.reopen().unwrap())
        .stderr(log.as_file().try_clone().unwrap())
        .spawn()
        .unwrap_or_else(|e| panic!("cannot start {mpirun}: {e}; is an MPI library installed?"));
    let code = loop {
        if let Some(status) = job.try_wait().unwrap() {
            break status.code();
        }
        if start.elapsed() > limit + Duration::from_secs(5) {
            job.kill().unwrap();
            job.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let text = String::from_utf8_lossy(&std::fs::read(log.path()).unwrap()).into_owned();
    Job { code, text, took: start.elapsed() }
}

/// As [`launch`], and fails with the ranks' output unless every rank succeeds.
pub fn succeed(name: &str, ranks: usize) {
    let job = launch(name, ranks, PATIENCE);
    assert_eq!(job.code, Some(0), "{name} on {ranks} ranks, after {:?}:\n{}", job.took, job.text);
    // The ranks' lines may be cut into each other, but not within what is written at once.
    let ran = job.text.matches(". 1 passed; 0 failed").count();
    assert_eq!(ran, ranks, "{name} ran on {ran} of {ranks} ranks:\n{}", job.text);
}

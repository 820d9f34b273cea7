//! Ranks: one process, threads of one process, or MPI.

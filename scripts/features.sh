#!/usr/bin/env bash
# Prints cargo's feature flags for this machine: `cargo build --release $(scripts/features.sh)`.
# `--features mpi` where mpicc, mpirun and libclang are found, else nothing, with the reason on standard error.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

obstacle=$(mpi_obstacle)
[ -z "$obstacle" ] || say "building without MPI ($obstacle)" >&2
cargo_features

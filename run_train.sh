#!/usr/bin/env bash
# Trains: sets the machine up, builds in release, starts NGPU ranks. The command line is torchtitan's:
#
#   ./run_train.sh                                      the quickstart
#   NGPU=2 CONFIG_FILE=./configs/llama4_debug.toml ./run_train.sh --training.steps=10 --model.converters="float8"
#
# NGPU=N             ranks (default 1): MPI processes where the build has MPI, else threads of one process
# CONFIG_FILE=FILE   default ./configs/quickstart.toml
# LOG_RANK=R[,R..]   the ranks that print (default 0)
# MOE8_MPI=0 | 1     never, or in any case, build with MPI
# MOE8_DRY_RUN=1     prints the commands instead of running them
# Everything after the script's name goes to `moe8 train` and overrides the file.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

ngpu=${NGPU:-1}
case $ngpu in
    '' | *[!0-9]* | 0*) fail 2 "NGPU='$ngpu' is not a number of ranks" "give a whole number from 1, as in NGPU=2 ./run_train.sh" ;;
esac
export LOG_RANK=${LOG_RANK:-0}
case $LOG_RANK in
    '' | *[!0-9,]*) fail 2 "LOG_RANK='$LOG_RANK' is not a list of ranks" "give numbers with commas, as in LOG_RANK=0,1" ;;
esac
config=${CONFIG_FILE:-./configs/quickstart.toml}
case $config in /*) ;; *) [ ! -e "$called_from/$config" ] || [ "$called_from" = "$PWD" ] || config=$called_from/$config ;; esac
[ -e "$config" ] || fail 2 "CONFIG_FILE '$config' does not exist" "configurations are in ./configs: $(ls -m configs)"

# Runs a command, or only says it; the last one takes this script's place, so that signals reach it.
run() {
    if [ -n "${MOE8_DRY_RUN:-}" ]; then
        printf '%q ' "$@" | sed 's/ $//'
        echo
    else
        "$@"
    fi
}
start() {
    [ -n "${MOE8_DRY_RUN:-}" ] || exec "$@"
    run "$@"
    exit
}

run ./scripts/setup.sh
obstacle=$(mpi_obstacle)
read -r -a features <<<"$(cargo_features)"
[ -z "$obstacle" ] || say "building without MPI ($obstacle)" >&2
run cargo build --release ${features[@]+"${features[@]}"}

program=("${CARGO_TARGET_DIR:-target}/release/moe8" train --config "$config")
[ "$ngpu" -gt 1 ] || start "${program[@]}" "$@"

# A software driver takes all cores for itself: share them out among the ranks.
if [ "$(vulkan_driver)" != hardware ] && [ -z "${LP_NUM_THREADS:-}" ]; then
    share=$(($(cores) / ngpu))
    export LP_NUM_THREADS=$((share > 1 ? share : 1))
    [ -z "${MOE8_DRY_RUN:-}" ] || echo "LP_NUM_THREADS=$LP_NUM_THREADS"
fi
if [ -n "$obstacle" ]; then
    say "$ngpu ranks as threads of one process (this build has no MPI: $obstacle)" >&2
    start "${program[@]}" --ranks "$ngpu" "$@"
else
    say "$ngpu ranks as MPI processes" >&2
    mpi_environment
    start "$(mpi_launcher)" -n "$ngpu" "${program[@]}" "$@"
fi

#!/usr/bin/env bash
# Sets the machine up and runs every check: format, lints, documentation, scripts, then all tests, with the MPI ones
# where this machine can build with MPI. A check that fails does not stop the others. Arguments go to `cargo test`.
# The last line says how many tests passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

./scripts/setup.sh

report='' code=0
stage() { # stage NAME COMMAND...: runs the command, notes how long it took and whether it failed, and goes on
    local name=$1 begin=$SECONDS result=''
    shift
    printf '\n=== %s: %s\n' "$name" "$*"
    "$@" || { result=' FAILED' && code=1; }
    report="$report  $name$result $((SECONDS - begin)) s"
}

read -r -a features <<<"$(./scripts/features.sh)"

stage format cargo fmt --check
if command -v shellcheck >/dev/null 2>&1; then
    stage shellcheck shellcheck -x run_train.sh run_tests.sh scripts/*.sh .ci/run
fi
stage clippy cargo clippy --all-targets ${features[@]+"${features[@]}"} -- -D warnings
if [ ${#features[@]} -gt 0 ]; then
    stage clippy-without-mpi cargo clippy -- -D warnings # a machine without MPI must be able to build
fi
RUSTDOCFLAGS='-D warnings' stage doc cargo doc --no-deps ${features[@]+"${features[@]}"}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2317 # called by stage
run_tests() { cargo test --no-fail-fast ${features[@]+"${features[@]}"} "$@" 2>&1 | tee "$log"; }
stage tests run_tests "$@"

printf '\n===%s\n' "$report"
awk '/^test result: / { passed += $4; failed += $6; skipped += $8 }
    END { printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }' "$log"
exit "$code"

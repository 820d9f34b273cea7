#!/usr/bin/env bash
# Sets the machine up and runs every check: format, lints, documentation, scripts, then all tests, with the MPI ones
# where this machine can build with MPI. Arguments go to `cargo test`. The last line says how many tests passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

times=''
stage() { # stage NAME COMMAND...: runs the command and notes how long it took
    local name=$1 begin=$SECONDS
    shift
    printf '\n=== %s: %s\n' "$name" "$*"
    "$@" || { printf '=== %s failed after %d s\n' "$name" $((SECONDS - begin)) && exit 1; }
    times="$times  $name $((SECONDS - begin)) s"
}

stage setup ./scripts/setup.sh
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
begin=$SECONDS code=0
printf '\n=== tests: cargo test %s\n' "${features[*]-} $*"
cargo test --no-fail-fast ${features[@]+"${features[@]}"} "$@" 2>&1 | tee "$log" || code=$?
printf '\n===%s  tests %d s\n' "$times" $((SECONDS - begin))
awk '/^test result: / { passed += $4; failed += $6; skipped += $8 } END { printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }' \
    "$log"
exit "$code"

#!/usr/bin/env bash
# tsan.sh - runs groups with threads under ThreadSanitizer: loaders, data sets, the hang detector, ranks. OpenMP loops
# run in one thread in this build (CMakeLists.txt). Two runs at a time; each prints its output when it ends, after 300 s
# at the latest.
#   bash tests/tsan.sh [BUILD_DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build-tsan}
bash configs/setup.sh "$build" -DMOETRAIN_CUDA=off -DMOETRAIN_SANITIZE=thread
export TSAN_OPTIONS=exitcode=66
run() { # BUILD_DIR ARGUMENT ...: one run of the tests, its output in one piece
    local out status=0
    out=$(timeout --verbose 300 "$1/moetrain_test" "${@:2}" 2>&1) || status=$?
    printf '== %s\n%s\n' "${*:2}" "$out"
    [ $status -eq 0 ] || printf 'FAILED: %s, exit code %s\n' "${*:2}" "$status"
    return $status
}
export -f run
# the longest first
xargs -P 2 -L 1 bash -c 'run "$@"' run "$build" << 'END'
--only test_sigterm ranks
--only test_same_training ranks
serve
--only test_faults comm
rendezvous
--only test_groups comm
--only test_collectives comm
--only test_agree comm
loader
dataset
file
base
END

#!/usr/bin/env bash
# tsan.sh - runs groups with threads under ThreadSanitizer: loaders, data sets, the hang detector, ranks. OpenMP loops
# run in one thread in this build (CMakeLists.txt).
#   bash tests/tsan.sh [BUILD_DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build-tsan}
bash configs/setup.sh "$build" -DMOETRAIN_CUDA=off -DMOETRAIN_SANITIZE=thread
export TSAN_OPTIONS=exitcode=66
for group in base file dataset loader rendezvous; do "$build/moetrain_test" "$group"; done
for name in test_collectives test_groups test_agree test_faults; do "$build/moetrain_test" --only "$name" comm; done
for name in test_same_training test_sigterm; do "$build/moetrain_test" --only "$name" ranks; done

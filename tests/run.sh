#!/usr/bin/env bash
# run.sh - set-up, then every test: the unit tests and the house rules (tests/lint.sh is one of them).
#   bash tests/run.sh [CTEST_OPTION ...]      for example: bash tests/run.sh -R parity
# Up to four groups run at a time (CMakeLists.txt names those that run alone); another number: -j N.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash configs/setup.sh build
echo "== test: ctest $*"
status=0
jobs=$(nproc)
[ "$jobs" -le 4 ] || jobs=4
ctest --test-dir build -j "$jobs" --output-on-failure --no-tests=error "$@" || status=$?
# A test that could not run here passes, but not silently.
grep -a '^skip:' build/Testing/Temporary/LastTest.log | sort -u || true
exit $status

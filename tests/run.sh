#!/usr/bin/env bash
# run.sh - set-up, then every test: the test groups, tests/lint.sh and a slice of the sweeps.
#   bash tests/run.sh [--turn N] [CTEST_OPTION ...]      for example: bash tests/run.sh -R parity
# --turn N leaves out the tests that CI does not run here at commit number N (turns.py), and names them.
# Up to four groups run at a time; -j N sets another number. CMakeLists.txt lists the groups that run alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash configs/setup.sh build
if [ "${1:-}" = --turn ]; then
    turns=$(python3 tests/turns.py build plain "$2")
    echo "not in turn at commit $2: ${turns#*$'\n'}"
    set -- -R "${turns%%$'\n'*}" "${@:3}"
fi
echo "== test: ctest $*"
status=0
jobs=$(nproc)
[ "$jobs" -le 4 ] || jobs=4
ctest --test-dir build -j "$jobs" --output-on-failure --no-tests=error "$@" || status=$?
# Repeats the lines of tests that could not run on this machine.
grep -a '^skip:' build/Testing/Temporary/LastTest.log | sort -u || true
exit $status

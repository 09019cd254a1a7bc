#!/usr/bin/env bash
# slice.sh - runs a small part of each sweep, for ctest: bash tests/sweep/slice.sh BINARY
set -euo pipefail
if ! command -v python3 > /dev/null; then
    echo "skip: no python3: no sweeps of options, faults and hostile files"
    exit 0
fi
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" # as in tests/main.c
here=$(dirname "${BASH_SOURCE[0]}")
python3 "$here/sweep.py" "$1" options --every 199 --first 7
python3 "$here/sweep.py" "$1" options --every 8 --only "('valid'"
python3 "$here/sweep.py" "$1" faults --every 211 --first 3
python3 "$here/sweep.py" "$1" files --every 79 --first 5

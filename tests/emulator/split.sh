#!/usr/bin/env bash
# split.sh - blocks that do not run at the same time: products of Hopper's kernels stop waiting for each other's tiles
# after MAX_SPLIT launches (sm90/pingpong.cuh). With one thread the emulator runs the blocks one after another, so that
# every wait ends without success.
#   bash tests/emulator/split.sh BUILD_DIR
set -euo pipefail
if [ $# -ne 1 ] || [ ! -x "$1/moetrain_test_emulated" ]; then
    sed -n '5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
fi
build=$(cd "$1" && pwd)
header=$(dirname "${BASH_SOURCE[0]}")/../../kernels/cuda/sm90/pingpong.cuh
most=$(sed -n 's/^ *MAX_SPLIT = \([0-9]*\),.*/\1/p' "$header")
export LD_LIBRARY_PATH=$build/emulator:$build/fake_driver/hopper OMP_NUM_THREADS=1 MT_EMULATOR_SHOW=launches_split
log=$("$build/moetrain_test_emulated" --binary "$build/moetrain_emulated" --need-gpu --only frozen_on_the_gpu \
    ops_moe 2>&1) || { echo "$log"; exit 1; }
count=$(sed -n 's/^emulator: launches_split //p' <<< "$log")
echo "launches whose blocks ran apart: $count, at most $most"
[ "$count" = "$most" ]

#!/usr/bin/env bash
# mutations.sh - removes, one by one, the places of the kernels that order accesses to global memory between blocks, and
# checks that the emulator (order.c) reports each; exit status 1 when one is not reported.
#   bash tests/emulator/mutations.sh BUILD_DIR [NUMBER ...]
# NUMBER: lines of the table below, from 1; default: all.
set -euo pipefail
if [ $# -lt 1 ] || [ ! -x "$1/moetrain_test_emulated" ]; then
    sed -n '4,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
fi
build=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
shift
report="without an acquire of its release"
proxy="without fence.proxy.async"
# place | test group and test | OLD=NEW:K/N of MT_EMULATOR_REPLACE | what the emulator reports
attn="attn_wgmma_keys.cuh|ops_attn width_64_on_the_gpu"
moe="|ops_moe decoded_ahead_on_the_gpu"
table=(
    "wait_turn, $attn|ld.acquire.gpu=ld.relaxed.gpu:0/1|$report"
    "the release of add_tiles, $attn|st.release.gpu=st.relaxed.gpu:0/1|$report"
    "the fences of add_tiles, $attn|fence.proxy.async;=membar.cta;:0/1|$proxy"
    "wait_count, grouped_ahead_wgmma.cu$moe|ld.acquire.gpu=ld.relaxed.gpu:0/1|$report"
    "add_one, grouped_ahead_wgmma.cu$moe|atom.release.gpu=atom.relaxed.gpu:0/1|$report"
    "the fence of wait_decoded, grouped_ahead_wgmma.cu$moe|fence.proxy.async;=membar.cta;:0/1|$proxy"
    "the first fence of sum_parts, grouped_parts.cuh$moe|membar.gl=membar.cta:0/2|$report"
    "the second fence of sum_parts, grouped_parts.cuh$moe|membar.gl=membar.cta:1/2|$report"
)
[ $# -gt 0 ] || set -- $(seq ${#table[@]})
export LD_LIBRARY_PATH=$build/emulator:$build/fake_driver/hopper OMP_WAIT_POLICY=passive
status=0
run() { # GROUP TEST
    "$build/moetrain_test_emulated" --binary "$build/moetrain_emulated" --only "$2" "$1" 2>&1
}
for number in "$@"; do
    IFS='|' read -r place group rule words <<< "${table[number - 1]}"
    # shellcheck disable=SC2086 # a group and a test
    if log=$(MT_EMULATOR_REPLACE=$rule run $group); then
        echo "FAILED: nothing was reported without $place"
        status=1
    elif ! grep -qF "$words" <<< "$log"; then
        printf 'FAILED: not the report "%s" without %s:\n%s\n' "$words" "$place" "$(tail -n 20 <<< "$log")"
        status=1
    else
        echo "reported: $place"
    fi
done
exit $status

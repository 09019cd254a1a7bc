#!/usr/bin/env bash
# ci.sh - checks exit code and last line of .ci/run on a scratch tree whose stages are stubs: for a run that passes,
# runs in which a build, a group of tests or the demo fails, a run that a signal ends, and a run without nvcc. Then it
# checks the exit code of tests/gpu.sh.
#   bash tests/ci.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree"/{.ci,bin,configs,tests,build/demo} "$tree"/build{,-asan}/Testing/Temporary
cp "$root/.ci/run" "$tree/.ci/"
stub() { # FILE LINE ...: a script
    printf '%s\n' '#!/usr/bin/env bash' "${@:2}" > "$tree/$1"
    chmod +x "$tree/$1"
}
losses() { # of the demo's evaluations
    stub configs/demo.sh "printf '{\"event\":\"eval\",\"loss\":%s,\"tokens\":9}\n' $* > build/demo/metrics.jsonl"
}
healthy() {
    local list=Testing/Temporary/LastTestsFailed.log
    printf '1:old\n' | tee "$tree/build/$list" > "$tree/build-asan/$list" # of an earlier run
    stub bin/ctest
    stub bin/nvcc
    stub bin/python3 # turns.py
    stub configs/setup.sh
    losses 6.0 3.0
    stub tests/tsan.sh
    stub tests/run.sh
}
unset CUDACXX
failed=0
expect() { # EXIT_CODE LAST_LINE [ARGUMENT ...]
    local out status=0
    out=$(PATH="$tree/bin:$PATH" bash -c \
        'echo $$ > "$1/ci.pid"; exec bash "$1/.ci/run" "${@:2}" 2>&1' run "$tree" "${@:3}") || status=$?
    if [ "$status" -ne "$1" ] || [ "${out##*$'\n'}" != "$2" ] ||
        ! grep -q '^CUDA compiler[ |].*[0-9]' <<< "$out"; then
        printf '.ci/run: exit code %s, must be %s; a line with the time of the first stage; the last line "%s":\n%s\n' \
            "$status" "$1" "$2" "$out"
        failed=1
    fi
    healthy
}
healthy
stub configs/setup.sh 'echo "$*" >> options'
expect 0 "PASSED: all stages"
grep -q -e "^build .*-DMOETRAIN_CUDA=on" "$tree/options" || { echo "the build may leave out CUDA"; failed=1; }
# Without nvcc: a failure, unless it is asked for.
export CUDACXX=/none/nvcc
expect 1 "FAILED: CUDA compiler, exit code 1"
stub configs/setup.sh 'echo "$*" >> options'
expect 0 "PASSED: all stages, without CUDA: no kernel was compiled and none was run" --without-cuda
grep -q -e "^build .*-DMOETRAIN_CUDA=off" "$tree/options" || { echo "the build may need CUDA"; failed=1; }
unset CUDACXX
stub configs/setup.sh '[ "$1" != build ] || exit 3'
expect 3 "FAILED: build, exit code 3"
stub bin/ctest "printf '2:train\n9:qat\n' > build-asan/Testing/Temporary/LastTestsFailed.log" 'exit 8'
expect 8 "FAILED: tests with sanitizers, exit code 8; groups: train qat"
stub tests/run.sh "printf '7:system\n' > build/Testing/Temporary/LastTestsFailed.log" 'exit 8'
expect 8 "FAILED: tests, exit code 8; groups: system"
stub bin/python3 '[ "$1" != tests/mutations.py ]'
expect 1 "FAILED: mutations, exit code 1"
stub bin/python3 'echo thread'
stub tests/tsan.sh 'exit 123'
expect 123 "FAILED: ThreadSanitizer, exit code 123"
for last in "6.0 4.0" "6.0 null" "null null" "null 3.0" "6.0 nan" "6.0 -inf" "6.0" "6.0 1e999999999999 null 3.0"; do
    # shellcheck disable=SC2086 # several losses
    losses $last
    expect 1 "FAILED: demo, exit code 1"
done
stub configs/demo.sh 'exit 5'
expect 5 "FAILED: demo, exit code 5"
stub bin/python3 'echo thread'
stub tests/tsan.sh 'kill "$(cat ci.pid)"'
expect 143 "FAILED: ThreadSanitizer, exit code 143"
stub bin/python3 '[ "$3" != sanitized ]'
expect 1 "FAILED: tests with sanitizers, exit code 1"
stub bin/python3 '[ "$2" != sanitizer ]'
expect 1 "FAILED: CUDA compiler, exit code 1"

# Each test but the longest runs at each commit, and twice under AddressSanitizer in fifteen commits. In three commits
# in a row ThreadSanitizer runs once, in six each of the longest tests once.
PYTHONPATH=$root/tests python3 - << 'END' || failed=1
from turns import LONGEST, PLAIN, chosen, sanitizer
NAMES = {"train", "qat", "sweep", "hub", "cli", "ops_kl", "ops_moe", "qat_parity", "lint", "emulated_hopper_quant"}
tests = [{"name": n, "properties": [{"name": "COST", "value": len(n)}]} for n in NAMES.union(LONGEST)]
for first in range(12):
    sanitized = [chosen(tests, "sanitized", first + k) for k in range(15)]
    plain = [chosen(tests, "plain", first + k) for k in range(15)]
    for s, p in zip(sanitized, plain):
        assert s | p >= NAMES and not s & p, (first, s, p)
    assert sorted(sum(map(sorted, sanitized), [])) == sorted(2 * [n for n in NAMES if not PLAIN.fullmatch(n)]), first
    assert sorted(n for p in plain[:6] for n in p if n in LONGEST) == sorted(LONGEST), first
    assert [sanitizer(first + k) for k in range(3)].count("thread") == 1, first
END

# gpu.sh on a machine with one GPU: a stage that is named and cannot run is a failure.
cp "$root/tests/gpu.sh" "$tree/tests/"
stub bin/nvidia-smi 'echo "GPU 0"'
expect_gpu() { # EXIT_CODE CODE_OF_THE_TESTS STAGE ...
    local out status=0
    stub bin/moetrain_test 'echo "$*" >> options' "exit $2"
    out=$(PATH="$tree/bin:$PATH" bash "$tree/tests/gpu.sh" -b "$tree/bin" "${@:3}" 2>&1) || status=$?
    [ "$status" -eq "$1" ] && return
    printf 'gpu.sh %s: exit code %s, must be %s:\n%s\n' "${*:3}" "$status" "$1" "$out"
    failed=1
}
expect_gpu 0 0 tests
expect_gpu 1 1 tests
expect_gpu 1 0 ranks
expect_gpu 1 0 tests ranks
expect_gpu 2 0 none
grep -q -e --need-gpu "$tree/options" || { echo "gpu.sh: its tests may be skipped"; failed=1; }
[ "$failed" -eq 0 ] && echo "ci.sh: each end of .ci/run and gpu.sh is as expected"

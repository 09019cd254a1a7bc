#!/usr/bin/env bash
# ci.sh - checks the end of .ci/run on a scratch tree whose stages are stubs: exit code and last line of a run that
# passes and of runs in which a build, a group of tests or the demo fails, or that is ended.
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
healthy() {
    local list=Testing/Temporary/LastTestsFailed.log
    printf '1:old\n' | tee "$tree/build/$list" > "$tree/build-asan/$list" # of an earlier run
    stub bin/ctest
    stub bin/nvcc
    stub configs/setup.sh
    stub configs/demo.sh "printf '{\"event\":\"eval\",\"loss\":%s}\n' 6.0 3.0 > build/demo/metrics.jsonl"
    stub tests/tsan.sh
    stub tests/run.sh
}
failed=0
expect() { # EXIT_CODE LAST_LINE
    local out status=0
    out=$(PATH="$tree/bin:$PATH" bash -c 'echo $$ > "$1/ci.pid"; exec bash "$1/.ci/run" 2>&1' run "$tree") || status=$?
    if [ "$status" -ne "$1" ] || [ "${out##*$'\n'}" != "$2" ] ||
        ! grep -q '^build with sanitizers  .*[0-9]' <<< "$out"; then
        printf '.ci/run: exit code %s, must be %s; a line with the time of the first stage; the last line "%s":\n%s\n' \
            "$status" "$1" "$2" "$out"
        failed=1
    fi
    healthy
}
healthy
expect 0 "PASSED: all stages"
stub configs/setup.sh '[ "$1" != build ] || exit 3'
expect 3 "FAILED: build, exit code 3"
stub bin/ctest "printf '2:train\n9:qat\n' > build-asan/Testing/Temporary/LastTestsFailed.log" 'exit 8'
expect 8 "FAILED: tests with sanitizers, exit code 8; groups: train qat"
stub tests/run.sh "printf '7:system\n' > build/Testing/Temporary/LastTestsFailed.log" 'exit 8'
expect 8 "FAILED: tests, exit code 8; groups: system"
stub tests/tsan.sh 'exit 123'
expect 123 "FAILED: tests with ThreadSanitizer, exit code 123"
stub configs/demo.sh "printf '{\"event\":\"eval\",\"loss\":%s}\n' 6.0 4.0 > build/demo/metrics.jsonl"
expect 1 "FAILED: demo, exit code 1"
stub configs/demo.sh 'exit 5'
expect 5 "FAILED: demo, exit code 5"
stub tests/tsan.sh 'kill "$(cat ci.pid)"'
expect 143 "FAILED: tests with ThreadSanitizer, exit code 143"
[ "$failed" -eq 0 ] && echo "ci.sh: each end of .ci/run is as expected"

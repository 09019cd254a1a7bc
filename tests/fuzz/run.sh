#!/usr/bin/env bash
# run.sh - builds each tests/fuzz/fuzz_NAME.c with libFuzzer, AddressSanitizer and UBSan, and fuzzes from its corpus.
#   bash tests/fuzz/run.sh [SECONDS [NAME ...]]     seconds per target, default 60; 0 runs only the corpus
# Writes only under build-fuzz: inputs that reach new code to corpus/NAME, a failing input to NAME-crash-*.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:-60}
names=("${@:2}")
if [ ${#names[@]} -eq 0 ]; then
    for f in tests/fuzz/fuzz_*.c; do f=${f##*/fuzz_}; names+=("${f%.c}"); done
fi
if ! clang=$(command -v clang-14 || command -v clang); then
    echo "run.sh: needs clang with libFuzzer and OpenMP (Debian, Ubuntu: clang-14 libomp-14-dev)"
    exit 1
fi

out=build-fuzz
sanitize="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
echo "== build: the program with $sanitize"
cmake -S . -B $out -DCMAKE_C_COMPILER="$clang" -DCMAKE_BUILD_TYPE=None -DMOETRAIN_CUDA=off \
    -DCMAKE_C_FLAGS="$sanitize -fsanitize=fuzzer-no-link" > $out.log 2>&1 || { cat $out.log; exit 1; }
cmake --build $out --target mt_train --parallel "$(nproc)" > $out.log 2>&1 || { cat $out.log; exit 1; }
mv $out.log $out/build.log
libraries=("-L$out" -lmt_train -lmt_model -lmt_optim -lmt_data -lmt_kernels
    -lopenblas -lz -lzstd -ljansson -linih -lpcre2-8 -lutf8proc -lpthread -lm)
grep -q 'brotlidec_LIBRARY:.*NOTFOUND' $out/CMakeCache.txt || libraries+=(-lbrotlidec -lbrotlicommon)

failed=0
for name in "${names[@]}"; do
    # shellcheck disable=SC2086 # several words
    "$clang" -std=c11 -D_GNU_SOURCE -I. -fopenmp $sanitize -fsanitize=fuzzer "tests/fuzz/fuzz_$name.c" \
        "${libraries[@]}" -o "$out/$name"
    mkdir -p "$out/corpus/$name" "tests/fuzz/corpus/$name"
    limit=-max_total_time=$seconds
    [ "$seconds" -gt 0 ] || limit=-runs=0
    echo "== fuzz $name: $seconds seconds, from $(find "tests/fuzz/corpus/$name" -type f | wc -l) inputs"
    if "$out/$name" "$limit" -max_len=4096 -close_fd_mask=3 -print_final_stats=1 -artifact_prefix="$out/$name-" \
        "$out/corpus/$name" "tests/fuzz/corpus/$name" > "$out/$name.log" 2>&1; then
        grep -a -E '^(Done|#.* DONE)' "$out/$name.log" || true
    else
        failed=1
        tail -n 30 "$out/$name.log"
        echo "run.sh: $name failed: see $out/$name.log; to see all it prints, run $out/$name on the input named there"
    fi
done
exit $failed

#!/usr/bin/env bash
# gpu.sh - runs every test that needs an NVIDIA GPU; exit status 1 when a stage fails, when one that is named is
# skipped, and when no stage has run.
#   bash tests/gpu.sh [-b BIN_DIR] [STAGE ...]
# BIN_DIR: moetrain and moetrain_test, built on another machine; without it the script builds build/ with CUDA.
# Stages (default: all):
#   tests      every test group; those with more than 2^31 elements need 41 GiB of free device memory
#   blocking   the same with CUDA_LAUNCH_BLOCKING=1: a test that passes only here lacks a wait between streams
#   memcheck   the kernels' tests under compute-sanitizer: accesses out of bounds or misaligned
#   racecheck  the kernels' tests under compute-sanitizer: hazards in shared memory
#   synccheck  the kernels' tests under compute-sanitizer: barriers that not all threads reach
#   initcheck  the kernels' tests under compute-sanitizer: reads of device memory that nothing has written
#   builds     (needs nvcc) ptxas does not make the wgmmas of a kernel wait for each other; builds for other GPUs only.
#              Built for sm_80, a Hopper GPU runs the portable kernels. Built without code for this GPU, `auto` trains
#              on the CPU and says why, `cuda` is an error
#   check      `moetrain check` on the demo's model, with the Hopper kernels and the portable ones, in bf16 and FP8
#   demo       trains the demo on the GPU: held-out loss within 1 % of the CPU's
#   repeat     trains the demo twice: the same adapter, bit by bit
#   ranks      trains the demo on several GPUs: data parallel, with parallel.zero, expert parallel, and resumed on one
#              GPU. The losses of 50 steps are within 3e-3 of one GPU's. On two GPUs the adapter has the same bytes,
#              except with expert parallelism
#   skew       time of adapter gradients and of a whole layer when all tokens go to the same experts: at most 1.5 times
#              that of uniform routing; least of three measurements, as the time of adapter gradients is a difference
#   bench      speed of this GPU
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
bin=""
while getopts b: option; do
    case $option in
    b) bin=$OPTARG ;;
    *) sed -n '3,25s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
stages=("$@") named="$*"
[ ${#stages[@]} -gt 0 ] || stages=(tests blocking memcheck racecheck synccheck initcheck builds check demo repeat
    ranks skew bench)

for stage in "${stages[@]}"; do
    grep -q "^stage_$stage()" tests/gpu.sh || { echo "gpu.sh: no stage $stage"; exit 2; }
done
if [ -z "$bin" ]; then
    bash configs/setup.sh build -DMOETRAIN_CUDA=on || exit 1
    bin=build
fi
bin=$(cd "$bin" && pwd) || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)

echo "== $(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | head -1)"
echo "== commit $(git describe --always --dirty 2> /dev/null || echo unknown)"

run_tests() { # [WRAPPER ...] -- [ARGUMENT ...]
    local wrapper=()
    while [ "$1" != -- ]; do wrapper+=("$1"); shift; done
    shift
    "${wrapper[@]}" "$bin/moetrain_test" --fixtures tests/fixtures --binary "$bin/moetrain" "$@"
}
run_tests_of() { # BIN_DIR [ARGUMENT ...]
    local bin=$1
    shift
    run_tests -- "$@"
}

stage_tests() { run_tests env -u CUDA_LAUNCH_BLOCKING -- --need-gpu; }
stage_blocking() { run_tests env CUDA_LAUNCH_BLOCKING=1 -- --need-gpu; }

# Runs the small GPU tests of some groups, with launches that block, so that a report names the launch; tests
# *_large_on_the_gpu take too long under a sanitizer.
sanitize() { # TOOL [OPTION ...] -- GROUP ...
    if ! command -v "$sanitizer" > /dev/null; then
        echo "skip: $1: compute-sanitizer was not found (it comes with the CUDA Toolkit)"
        return 77
    fi
    local options=() only='*gpu*'
    [ "$1" != racecheck ] || only='*gpu' # without *_on_the_gpu_by_cublas
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    local group status=0
    for group in "$@"; do # one process per group, as the tool must start it
        run_tests env CUDA_LAUNCH_BLOCKING=1 "$sanitizer" --tool "${options[@]}" --error-exitcode 9 -- \
            --need-gpu --only "$only" --skip '*_large_on_the_gpu' "$group" || status=1
    done
    return $status
}
kernel_groups=(fakequant fp8 input_quant ops_attn ops_branch ops_compress ops_decode ops_delta ops_dense ops_dora
    ops_embed ops_entries ops_experts ops_hyper ops_kl ops_mamba ops_mla ops_moe ops_norm ops_policy ops_preference
    ops_prefix ops_residual ops_router ops_sample ops_shared_attn ops_short_conv ops_sigmoid ops_states optim quant)
stage_memcheck() { sanitize memcheck -- "${kernel_groups[@]}" prof; }
stage_synccheck() { sanitize synccheck -- "${kernel_groups[@]}"; }
stage_initcheck() { sanitize initcheck -- "${kernel_groups[@]}"; }
# racecheck does not know the ordering by TMA and mbarriers and reports false hazards in kernels that use them. The
# stage therefore excludes kernels with wgmma in their name (their tests also run the portable kernels), and tests that
# call cuBLASLt, whose Hopper kernels use TMA too.
stage_racecheck() {
    sanitize racecheck --racecheck-report analysis --kernel-name-exclude kns=wgmma -- \
        fakequant fp8 input_quant ops_attn ops_branch ops_compress ops_decode ops_delta ops_dora ops_entries \
        ops_experts ops_hyper ops_mamba ops_mla ops_moe ops_norm ops_prefix ops_router ops_sample ops_shared_attn \
        ops_short_conv ops_sigmoid ops_states optim quant
}

# build_for builds for one architecture; train_built_for runs the demo's model, with the log in $work/ARCH.log.
build_for() { # ARCH
    local log=$work/build-$1.log
    bash configs/setup.sh "$work/build-$1" -DMOETRAIN_CUDA=on -DCMAKE_CUDA_ARCHITECTURES="$1" > "$log" 2>&1 && return
    tail -n 20 "$log"
    return 1
}
train_built_for() { # ARCH DEVICE
    "$work/build-$1/moetrain" configs/demo.ini --set train.device="$2" --set train.steps=2 --set eval.at_start=no \
        --set eval.at_end=no --set eval.every=0 --set output.dir="$work/built-for-$1-$2" > "$work/$1.log" 2>&1
}
wants() { # ARCH TEXT
    grep -F "$2" "$work/$1.log" && return
    echo "built for $1: the log lacks: $2"
    cat "$work/$1.log"
    return 1
}
# ptxas says so where it makes wgmmas wait for each other.
compile_hopper_kernels() {
    local file said
    for file in kernels/cuda/sm90/*.cu kernels/cuda/sm90/*/*.cu; do
        said=$(nvcc -O3 -D_DEFAULT_SOURCE -I. -gencode arch=compute_90a,code=sm_90a -c "$file" -o "$work/kernel.o" 2>&1)
        [ $? -eq 0 ] && ! grep -q "Performance Loss" <<< "$said" && continue
        printf '%s: %s\n' "$file" "$said"
        return 1
    done
}
stage_builds() {
    local capability other=86-real status=0
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)
    if ! command -v nvcc > /dev/null; then
        echo "skip: builds: nvcc was not found"
        return 77
    fi
    compile_hopper_kernels || status=1
    case $capability in
    8.*) other=90a-real ;;
    9.*)
        build_for 80 || return 1
        train_built_for 80 cuda || status=1
        wants 80 "portable kernels (built without sm_90a)" || status=1
        run_tests_of "$work/build-80" --need-gpu --only '*gpu*' --skip '*_large_on_the_gpu' || status=1
        ;;
    esac
    build_for $other || return 1
    train_built_for $other auto || status=1
    wants $other "train.device = auto takes the CPU: " || status=1
    wants $other "for which this program has no code" || status=1
    if train_built_for $other cuda; then echo "built for $other: trains on this GPU"; status=1; fi
    wants $other "moetrain: error: train.device = cuda: " || status=1
    return $status
}

stage_check() {
    local device dtype
    for device in cuda cuda-portable; do
        for dtype in bf16 fp8 fp8-backward; do
            "$bin/moetrain" check configs/demo.ini --set train.device=$device --set train.expert_dtype=$dtype \
                --set output.dir="$work/check" || return 1
        done
    done
}

train() { # DEVICE NAME: the demo's adapter in $work/NAME
    "$bin/moetrain" configs/demo.ini --set train.device="$1" --set train.resume=never --set output.dir="$work/$2" \
        > "$work/$2.log" 2>&1 || { cat "$work/$2.log"; return 1; }
    tail -n 3 "$work/$2.log"
}
held_out() { grep '"event":"eval"' "$work/$1/metrics.jsonl" | tail -n 1 | sed 's/.*"loss":\([-+.0-9e]*\).*/\1/'; }

stage_demo() {
    local device status=0
    train cpu cpu || return 1
    for device in cuda cuda-portable; do
        train $device $device || return 1
        awk -v a="$(held_out $device)" -v b="$(held_out cpu)" -v name=$device 'BEGIN {
            d = (a - b) / b
            printf "held-out loss: %s %s, cpu %s: %.3f %% apart, 1 %% allowed\n", name, a, b, 100 * d
            exit !(d < 0.01 && d > -0.01) }' || status=1
    done
    return $status
}

stage_repeat() {
    train cuda first && train cuda second || return 1
    cmp "$work/first/adapter/adapter_model.safetensors" "$work/second/adapter/adapter_model.safetensors" || return 1
    echo "two runs: the same $(wc -c < "$work/first/adapter/adapter_model.safetensors") bytes of adapter"
}

# NAME STEPS KEY=VALUE ...: trains the demo on $ranks ranks, with one micro-batch per rank and step.
train_ranks() {
    local name=$1 steps=$2 options=() key
    shift 2
    for key in "$@" train.grad_accum="$ranks" train.steps="$steps" train.device="$device" log.report=no \
        optim.schedule=constant optim.warmup_ratio=0 eval.at_start=no eval.at_end=no output.dir="$work/$name"; do
        options+=(--set "$key")
    done
    "$bin/moetrain" configs/demo.ini "${options[@]}" > "$work/$name.log" 2>&1 || { cat "$work/$name.log"; return 1; }
}
step_losses() { grep '"event":"step"' "$work/$1/metrics.jsonl" | sed 's/.*"loss":\([-+.0-9e]*\).*/\1/'; }
compare_ranks() { # NAME
    paste <(step_losses "$1") <(step_losses one) | awk -v name="$1" '
        { d = $1 / $2 - 1; if (d < 0) d = -d; if (d > most) most = d }
        END { printf "%-10s %d steps, losses within %.1e of one rank'"'"'s, 3e-3 allowed\n", name, NR, most
              exit !(NR == 50 && most <= 3e-3) }'
}
several_ranks() { # DEVICE RANKS KEY; KEY sets the number of ranks
    local device=$1 ranks=$2 key=$3 name status=0
    train_ranks one 50 && train_ranks data 50 "$key=$ranks" && train_ranks zero 50 "$key=$ranks" parallel.zero=yes &&
        train_ranks experts 50 "$key=$ranks" parallel.ep="$ranks" parallel.chunks=3 &&
        train_ranks pairs 50 "$key=$ranks" parallel.ep=2 parallel.capacity_factor=1 &&
        train_ranks ended 20 "$key=$ranks" && train_ranks ended 50 || return 1
    for name in data zero experts pairs ended; do compare_ranks $name || status=1; done
    for name in data zero ended; do
        [ "$ranks" != 2 ] || cmp "$work/"{one,$name}/adapter/adapter_model.safetensors || status=1
    done
    return $status
}
stage_ranks() {
    local gpus ranks=2
    gpus=$(nvidia-smi -L | wc -l)
    if [ "$gpus" -lt 2 ]; then
        echo "skip: ranks: this machine has one GPU"
        return 77
    fi
    while [ $((2 * ranks)) -le "$gpus" ] && [ $ranks -lt 8 ]; do ranks=$((2 * ranks)); done
    several_ranks cuda $ranks parallel.gpus
}

# For each routing the JSON has dab_ms and ms of gate_up, down and the whole layer.
stage_skew() {
    local arch status=0
    for arch in gpt-oss-20b qwen3-30b-a3b; do
        for _ in 1 2 3; do
            "$bin/moetrain" bench lora --device cuda --arch $arch --rank 16 --tokens 16384 --routing uniform,one --json
        done | awk -v arch=$arch '
            /"dab_ms"/ { i = n++ % 6 + 1; if (n <= 6 || $2 + 0 < dab[i]) dab[i] = $2 + 0 }
            /"ms"/ { if (n <= 6 || $2 + 0 < ms[i]) ms[i] = $2 + 0 }
            END {
                printf "%s: uniform %.3f ms of %.2f, skewed %.3f of %.2f\n", arch, dab[3], ms[3], dab[6], ms[6]
                exit !(n == 18 && dab[6] <= 1.5 * dab[3] && ms[6] <= 1.5 * ms[3])
            }' || status=1
    done
    return $status
}

stage_bench() {
    "$bin/moetrain" bench ops --device cuda && "$bin/moetrain" bench step --device cuda
}

failed=0 ran=0
for stage in "${stages[@]}"; do
    echo "== $stage"
    start=$SECONDS
    "stage_$stage"
    status=$?
    case $status in
    0) verdict=ok ran=1 ;;
    77) [ -z "$named" ] && verdict=skipped || { verdict="FAILED (skipped, but named)"; failed=1; } ;;
    *) verdict="FAILED ($status)"; failed=1 ;;
    esac
    summary+=("$(printf '%-10s %-12s %4d s' "$stage" "$verdict" $((SECONDS - start)))")
done
echo "== summary"
printf '%s\n' "${summary[@]}"
[ $((failed + ran)) -gt 0 ] || { echo "FAILED: no stage has run"; failed=1; }
exit $failed

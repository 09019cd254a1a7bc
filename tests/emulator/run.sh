#!/usr/bin/env bash
# run.sh - runs the GPU tests of test groups in the emulator; exit status 1 when one fails.
#   bash tests/emulator/run.sh BUILD_DIR hopper|ampere|ada|turn [GROUP ...]
# BUILD_DIR was configured with -DMOETRAIN_EMULATOR=ON. turn: the number of commits chooses the GPU and, for attention,
# the tests. On Hopper asynchronous operations are late, and warps run in random turns. Without GROUP: every group whose
# kernels compute-sanitizer checks too (tests/gpu.sh).
set -euo pipefail
if [ $# -lt 2 ] || [ ! -x "$1/moetrain_test_emulated" ] || { [ "$2" != turn ] && [ ! -d "$1/fake_driver/$2" ]; }; then
    sed -n '3,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
fi
build=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
chosen=$2
shift 2
[ $# -gt 0 ] || set -- cache fakequant fp8 input_quant ops_attn ops_branch ops_compress ops_decode ops_delta ops_dense \
    ops_dora ops_embed ops_entries ops_experts ops_hyper ops_kl ops_mamba ops_mla ops_moe ops_norm ops_policy \
    ops_preference ops_prefix ops_residual ops_router ops_sample ops_shared_attn ops_short_conv ops_sigmoid ops_states \
    optim packing qat quant
export OMP_WAIT_POLICY=passive
number=$(git rev-list --count HEAD 2> /dev/null) || number=$(($(date +%s) / 86400)) # of commits, or of the day

turns_of() { # GROUP: lines GPU TESTS
    case $1 in
    ops_attn)
        printf '%s_on_the_gpu\n' 'hopper width_64' 'hopper width_128' 'hopper width_192' 'hopper width_256' \
            'hopper growing_scores' 'hopper neighbours_change_no_bits' 'hopper poison' 'ampere width_64' \
            'ada other_widths' 'ampere width_128' 'ada width_256' 'ampere wide_heads' 'hopper wide_heads'
        ;;
    ops_compress | ops_mla | ops_moe | ops_router) printf '%s\n' 'ampere *gpu*' 'ada *gpu*' ;; # always on Hopper
    *) printf '%s\n' 'hopper *gpu*' 'ampere *gpu*' 'hopper *gpu*' 'ada *gpu*' ;;
    esac
}
run() { # GROUP GPU TESTS
    if [ "$2" = hopper ]; then export MT_EMULATOR_LATE=1 MT_EMULATOR_SEED=1; else unset MT_EMULATOR_{LATE,SEED}; fi
    LD_LIBRARY_PATH=$build/emulator:$build/fake_driver/$2 "$build/moetrain_test_emulated" \
        --binary "$build/moetrain_emulated" --need-gpu --only "$3" --skip '*_large_on_the_gpu' "$1"
}
status=0
for group in "$@"; do
    begin=$SECONDS gpu=$chosen tests='*gpu*' turn=
    if [ "$gpu" = turn ]; then
        mapfile -t turns < <(turns_of "$group")
        at=$((number % ${#turns[@]}))
        read -r gpu tests <<< "${turns[at]}"
        turn=", turn $((at + 1)) of ${#turns[@]} at commit $number"
    fi
    run "$group" "$gpu" "$tests" || status=1
    echo "$group, $tests, on an emulated GPU ($gpu$turn): $((SECONDS - begin)) s"
done
exit $status

#!/usr/bin/env bash
# run.sh - runs the GPU tests of test groups in the emulator; exit status 1 when one fails.
#   bash tests/emulator/run.sh BUILD_DIR hopper|ampere|ada [GROUP ...]
# BUILD_DIR was configured with -DMOETRAIN_EMULATOR=ON. Without GROUP: every group whose kernels compute-sanitizer
# checks too (tests/gpu.sh).
set -euo pipefail
if [ $# -lt 2 ] || [ ! -x "$1/moetrain_test_emulated" ] || [ ! -d "$1/fake_driver/$2" ]; then
    sed -n '3,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
fi
build=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
gpu=$2
shift 2
[ $# -gt 0 ] || set -- fakequant fp8 input_quant ops_attn ops_compress ops_delta ops_dense ops_experts ops_hyper \
    ops_mla ops_moe ops_norm ops_residual ops_router ops_shared_attn ops_sigmoid optim packing qat quant
export LD_LIBRARY_PATH=$build/emulator:$build/fake_driver/$gpu OMP_WAIT_POLICY=passive
status=0
for group in "$@"; do
    begin=$SECONDS
    "$build/moetrain_test_emulated" --binary "$build/moetrain_emulated" --need-gpu --only '*gpu*' \
        --skip '*_large_on_the_gpu' "$group" || status=1
    echo "$group on an emulated GPU ($gpu): $((SECONDS - begin)) s"
done
exit $status

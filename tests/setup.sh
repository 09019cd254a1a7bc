#!/usr/bin/env bash
# setup.sh - checks what configs/setup.sh chooses to build, on a scratch tree with stubs of cmake, nvcc and nvidia-smi.
#   bash tests/setup.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree"/{bin,configs}
cp "$root/configs/setup.sh" "$tree/configs/"
cp "$root/CMakeLists.txt" "$tree/"
stub() { # NAME LINE ...: a command
    printf '%s\n' '#!/usr/bin/env bash' "${@:2}" > "$tree/bin/$1"
    chmod +x "$tree/bin/$1"
}
stub dpkg-query 'echo installed'
stub apt-get 'exit 1'
stub cmake 'if [ "$1" = --version ]; then echo "cmake version 3.25.1"; else echo "cmake $*"; fi'
stub nvcc 'for arch in 75 80 86 89 90 90a 100; do echo "sm_$arch"; done' # in several writes, as nvcc does
gpus() { stub nvidia-smi "printf '%s\n' $*"; }
export CUDACXX=$tree/bin/nvcc
unset CUDAARCHS
failed=0 n=0
expect() { # PATTERN ARGUMENT ...: it matches the output, in which | stands for line feeds
    local out status=0
    n=$((n + 1))
    out=$(PATH="$tree/bin:$PATH" bash "$tree/configs/setup.sh" "${@:2}" 2>&1 | paste -s -d '|') || status=$?
    [[ "$out" =~ $1 ]] && return
    printf 'setup.sh %s: exit code %s, the output lacks "%s":\n%s\n' "${*:2}" "$status" "$1" "$out"
    failed=1
}
gpus '"No devices were found"'
expect 'CUDA: off.*nvidia-smi finds no GPU.*\|cmake -S . -B build .*-DMOETRAIN_CUDA=off\|'
expect '-B build .*-DMOETRAIN_CUDA=on -UCMAKE_CUDA_ARCHITECTURES\|' --cuda all
expect '-B other .*-DMOETRAIN_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=80;90a-real\|' other --cuda 80,90a-real
expect '-B other .*-DX=1 -DMOETRAIN_CUDA=off\|' other -DX=1 --cuda off
expect '-B build .*-DX=1 -DMOETRAIN_CUDA=off\|' build -DX=1
# Options that choose pass through, and so does CUDAARCHS.
for choice in -DMOETRAIN_CUDA=on -DMOETRAIN_CUDA:STRING=auto -DCMAKE_CUDA_ARCHITECTURES=90a; do
    expect "are installed\|== configure: build $choice\|cmake .* $choice\|" build $choice
done
export CUDAARCHS=80-virtual
expect 'are installed\|== configure: build\|cmake -S . -B build -G Ninja\|'
expect '-B build .*-DMOETRAIN_CUDA=off\|' --cuda auto
unset CUDAARCHS
# The script chooses one architecture per kind of GPU. For Hopper it is sm_90a. For a GPU that nvcc does not know it is
# sm_80, whose PTX the driver compiles.
gpus 9.0 9.0
expect 'CUDA: architecture 90a \(.*compute capability 9.0;.*\|cmake .*-DCMAKE_CUDA_ARCHITECTURES=90a\|'
gpus 8.9 7.5 8.6
expect 'CUDA: architecture 86, 89 .*\|cmake .*-DCMAKE_CUDA_ARCHITECTURES=86;89\|'
gpus 12.1
expect 'CUDA: architecture 80 .*12.1.*\|cmake .*-DMOETRAIN_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=80\|'
gpus 7.5
expect 'CUDA: off.*7.5, below 8.0.*\|cmake .*-DMOETRAIN_CUDA=off\|'
gpus 9.0
CUDACXX=/none/nvcc expect 'CUDA: off.*nvcc was not found; for the GPU install.*\|cmake .*-DMOETRAIN_CUDA=off\|'
# A build folder keeps its choice until --cuda changes it.
mkdir "$tree/build"
touch "$tree/build/CMakeCache.txt" "$tree/build/build.ninja"
expect 'are installed\|== build: build\|cmake --build build '
expect 'are installed\|== configure: build -DX=1\|cmake -S . -B build -DX=1\|' build -DX=1
expect 'CUDA: architecture 90a' --cuda auto
expect '\|cmake --build build --parallel [0-9]+ --target moetrain$' --target moetrain
expect 'setup.sh: --cuda hopper: expected' --cuda hopper
expect 'setup.sh: --cuda 80,: expected' --cuda 80,
expect 'setup.sh: --cuda needs a value' --cuda
# An optional package that cannot be installed does not stop the build.
stub dpkg-query 'case "$*" in *libmicrohttpd-dev*|*libbrotli-dev*) exit 1 ;; *) echo installed ;; esac'
expect 'libmicrohttpd-dev: not installed; this build has no .*libbrotli-dev: not installed; .*\|cmake --build build '
[ "$failed" -eq 0 ] && echo "setup.sh: $n calls choose as expected"

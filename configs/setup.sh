#!/usr/bin/env bash
# setup.sh - installs missing packages of the distribution, configures, builds. demo.sh and tests/run.sh run it first.
# Installing needs root or sudo; nothing is installed when all packages are there. For Debian 12 and Ubuntu 22.04 or
# newer. On another system it prints the packages and continues with what is installed.
#   bash configs/setup.sh [BUILD_DIR] [--cuda WHICH] [--target NAME] [CMAKE_OPTION ...]      BUILD_DIR: build
#   --cuda auto      for the GPUs that nvidia-smi finds, if nvcc is installed; else for the CPU only. The default for a
#                    new BUILD_DIR, unless a CMAKE_OPTION or CUDAARCHS chooses
#   --cuda all       for every supported GPU
#   --cuda 80,90a    for these architectures
#   --cuda off       for the CPU only
#   --target NAME    builds only this target of CMake: `moetrain` is the executable without tests
# It runs a compiler per core, or CMAKE_BUILD_PARALLEL_LEVEL of them.
set -euo pipefail
wrong_usage() {
    echo "setup.sh: $*" >&2
    exit 2
}
build='' cuda='' target=all options=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit
            ;;
        --cuda | --target)
            [ $# -gt 1 ] || wrong_usage "$1 needs a value (see --help)"
            case $1 in --cuda) cuda=$2 ;; --target) target=$2 ;; esac
            shift
            ;;
        -*)
            [ -n "$build" ] || wrong_usage "$1: name the build directory first, as in: bash configs/setup.sh build $1"
            options+=("$1")
            ;;
        *) if [ -z "$build" ]; then build=$1; else options+=("$1"); fi ;;
    esac
    shift
done
[[ "$cuda" =~ ^(|auto|all|off|[0-9]+[af]?(-real|-virtual)?(,[0-9]+[af]?(-real|-virtual)?)*)$ ]] ||
    wrong_usage "--cuda $cuda: expected auto, all, off or architectures, as in: --cuda 80,90a"
build=${build:-build}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(gcc libc6-dev cmake ninja-build libopenblas-pthread-dev zlib1g-dev libzstd-dev libpcre2-dev libutf8proc-dev
    libjansson-dev libinih-dev libcurl4-openssl-dev ca-certificates libcmocka-dev python3)
optional=(libmicrohttpd-dev libbrotli-dev)
declare -A lacks=([libmicrohttpd-dev]='has no `moetrain serve`' [libbrotli-dev]='reads no parquet in Brotli')

say() { printf '== %s\n' "$*"; }
die() {
    printf 'setup.sh: %s\n' "$*" >&2
    exit 1
}

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2> /dev/null)" = installed ]; }

# Optional packages are tried; the build continues without them.
install_optional() {
    local missing=() as_root=() p
    for p in "${optional[@]}"; do installed "$p" || missing+=("$p"); done
    [ ${#missing[@]} -eq 0 ] && return
    say "packages: installing ${missing[*]} (optional)"
    if [ "$(id -u)" -ne 0 ]; then as_root=(sudo -n); fi
    if ! { timeout 120 "${as_root[@]}" apt-get update -q && timeout 120 "${as_root[@]}" \
        env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"; }; then
        for p in "${missing[@]}"; do say "$p: not installed; this build ${lacks[$p]}"; done
    fi
}

install_packages() {
    local missing=() as_root=() p
    if ! command -v apt-get > /dev/null; then
        say "apt-get not found: install the equivalents of these Debian packages: ${packages[*]} ${optional[*]}"
        return
    fi
    for p in "${packages[@]}"; do installed "$p" || missing+=("$p"); done
    if [ ${#missing[@]} -eq 0 ]; then
        say "packages: all ${#packages[@]} are installed"
        install_optional
        return
    fi
    say "packages: installing ${missing[*]}"
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo > /dev/null ||
            die "needs root, and sudo is not installed; as root: apt-get update && apt-get install ${missing[*]}"
        as_root=(sudo)
    fi
    "${as_root[@]}" apt-get update -q
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
    install_optional
}

# Compares the installed CMake with the version that CMakeLists.txt requires.
check_cmake() {
    local want have
    want=$(sed -n 's/^cmake_minimum_required(VERSION \([0-9]*\.[0-9]*\).*/\1/p' CMakeLists.txt)
    have=$(cmake --version | sed -n 's/^cmake version \([0-9.]*\).*/\1/p')
    [ "$(printf '%s\n' "$want" "$have" | sort -V | head -n 1)" = "$want" ] ||
        die "cmake $have is too old: install $want or newer"
}

find_nvcc() { # where CMake looks for it
    if [ -n "${CUDACXX:-}" ]; then
        command -v "$CUDACXX"
    else
        command -v nvcc || command -v /usr/local/cuda/bin/nvcc
    fi
}

# Sets `cuda` to `off` or to the architectures of this machine's GPUs, and `why` to the reason.
choose_for_this_machine() {
    local nvcc='' known='' found=() capability arch archs=() names='' usable=''
    if nvcc=$(find_nvcc); then known=$("$nvcc" --list-gpu-code); fi
    mapfile -t found < <(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null |
        grep -E '^[0-9]+\.[0-9]+$' | sort -u)
    cuda=off
    for capability in "${found[@]}"; do
        names+=${names:+, }$capability
        [ "${capability%.*}" -ge 8 ] || continue
        usable=1
        arch=${capability/./}
        if [ "$arch" = 90 ]; then arch=90a; fi # the kernels for Hopper exist only for it
        # Drivers compile PTX of sm_80 for GPUs that nvcc does not know.
        if [ -n "$nvcc" ] && ! grep -qx "sm_$arch" <<< "$known"; then arch=80; fi
        archs+=("$arch")
    done
    if [ -z "$nvcc" ]; then
        why="nvcc was not found${usable:+; for the GPU install the CUDA Toolkit 13 or set CUDACXX}"
    elif [ -z "$names" ]; then
        why="nvcc is installed, but nvidia-smi finds no GPU; --cuda all builds for every GPU"
    elif [ -z "$usable" ]; then
        why="the GPU has compute capability $names, below 8.0"
    else
        cuda=$(printf '%s\n' "${archs[@]}" | sort -u | paste -s -d ,)
        why="nvidia-smi finds compute capability $names; --cuda all builds for every GPU"
    fi
}

# Chooses what CUDA code the build has, prints it, and adds the choice to `options`.
choose_cuda() {
    local why="--cuda $cuda"
    if [ -z "$cuda" ]; then
        [ ! -e "$build/CMakeCache.txt" ] || return 0 # the choice of the first call
        if [[ -n "${CUDAARCHS:-}" || " ${options[*]}" =~ \ -D(MOETRAIN_CUDA|CMAKE_CUDA_[A-Z]+)[:=] ]]; then return; fi
    fi
    if [[ "$cuda" =~ ^(|auto)$ ]]; then choose_for_this_machine; fi
    unset CUDAARCHS
    case $cuda in
        off)
            say "CUDA: off, this build is for the CPU only ($why)"
            options+=(-DMOETRAIN_CUDA=off)
            ;;
        all)
            say "CUDA: every supported architecture ($why)"
            options+=(-DMOETRAIN_CUDA=on -UCMAKE_CUDA_ARCHITECTURES)
            ;;
        *)
            say "CUDA: architecture ${cuda//,/, } ($why)"
            options+=(-DMOETRAIN_CUDA=on "-DCMAKE_CUDA_ARCHITECTURES=${cuda//,/;}")
            ;;
    esac
}

configure_and_build() {
    local generator=()
    command -v cmake > /dev/null || die "cmake is not installed"
    check_cmake
    choose_cuda
    if [ ! -e "$build/CMakeCache.txt" ] && command -v ninja > /dev/null; then generator=(-G Ninja); fi
    if [ ${#options[@]} -gt 0 ] || { [ ! -e "$build/build.ninja" ] && [ ! -e "$build/Makefile" ]; }; then
        say "configure: $build${options[*]:+ ${options[*]}}"
        cmake -S . -B "$build" "${generator[@]}" "${options[@]}"
    fi
    say "build: $build"
    cmake --build "$build" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" --target "$target"
}

install_packages
configure_and_build

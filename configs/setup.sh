#!/usr/bin/env bash
# setup.sh - installs missing packages of the distribution, configures, builds. demo.sh and tests/run.sh run it first.
# Installing needs root or sudo; nothing is installed when all packages are there. For Debian 12 and Ubuntu 22.04 or
# newer. On another system it prints the packages and continues with what is installed.
#   bash configs/setup.sh [BUILD_DIR [CMAKE_OPTION ...]]      default: build, CUDA when nvcc is found
# It runs a compiler per core, or CMAKE_BUILD_PARALLEL_LEVEL of them.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit
        ;;
    -*)
        echo "setup.sh: $1: name the build directory first, as in: bash configs/setup.sh build $1" >&2
        exit 2
        ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build}
shift $(($# > 0))

packages=(gcc libc6-dev cmake ninja-build libopenblas-pthread-dev zlib1g-dev libpcre2-dev libutf8proc-dev libjansson-dev
    libinih-dev libcurl4-openssl-dev ca-certificates libcmocka-dev python3)

say() { printf '== %s\n' "$*"; }
die() {
    printf 'setup.sh: %s\n' "$*" >&2
    exit 1
}

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2> /dev/null)" = installed ]; }

install_packages() {
    local missing=() as_root=() p
    if ! command -v apt-get > /dev/null; then
        say "apt-get not found: install the equivalents of these Debian packages: ${packages[*]}"
        return
    fi
    for p in "${packages[@]}"; do installed "$p" || missing+=("$p"); done
    if [ ${#missing[@]} -eq 0 ]; then
        say "packages: all ${#packages[@]} are installed"
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
}

# Compares the installed CMake with the version that CMakeLists.txt requires.
check_cmake() {
    local want have
    want=$(sed -n 's/^cmake_minimum_required(VERSION \([0-9]*\.[0-9]*\).*/\1/p' CMakeLists.txt)
    have=$(cmake --version | sed -n 's/^cmake version \([0-9.]*\).*/\1/p')
    [ "$(printf '%s\n' "$want" "$have" | sort -V | head -n 1)" = "$want" ] ||
        die "cmake $have is too old: install $want or newer"
}

configure_and_build() {
    local generator=()
    command -v cmake > /dev/null || die "cmake is not installed"
    check_cmake
    if [ ! -e "$build/CMakeCache.txt" ] && command -v ninja > /dev/null; then generator=(-G Ninja); fi
    if [ $# -gt 0 ] || { [ ! -e "$build/build.ninja" ] && [ ! -e "$build/Makefile" ]; }; then
        say "configure: $build${*:+ $*}"
        cmake -S . -B "$build" "${generator[@]}" "$@"
    fi
    say "build: $build"
    cmake --build "$build" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
}

install_packages
configure_and_build "$@"

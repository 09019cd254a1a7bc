#!/usr/bin/env bash
# demo.sh - from a fresh clone to a trained adapter: set-up, then the run that configs/demo.ini describes.
#   bash configs/demo.sh [--set section.key=value ...]
set -euo pipefail
case ${1:-} in
    '' | --set*) ;;
    *)
        echo "demo.sh: $1: expected --set section.key=value or nothing" >&2
        exit 2
        ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash configs/setup.sh build --target moetrain
echo "== train: build/moetrain configs/demo.ini${*:+ $*}"
build/moetrain configs/demo.ini "$@"
out=$(build/moetrain configs/demo.ini "$@" --dump-config | sed -n '/^\[output\]/,/^\[/s/^dir *= *//p')
echo "== done
adapter (loads in PEFT): $out/adapter
report (open in a browser): $out/report.html"

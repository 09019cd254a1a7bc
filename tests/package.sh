#!/usr/bin/env bash
# package.sh - makes the archive and the wheel of a build, installs the wheel, and runs the executable of each. Checks
# that the bytes of both follow from the files alone, and that the SBOM names what is linked.
#   bash tests/package.sh BUILD_DIR
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$(cd "$1" && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
say() { echo "package.sh: $*"; }
die() {
    say "$@"
    exit 1
}
if ! command -v dpkg-query > /dev/null; then
    echo "skip: packages are made on Debian and Ubuntu"
    exit
fi

# CPack makes a .deb only with both.
for package in dpkg-dev file; do
    grep -q "apt-get install .* $package\( \|$\)" "$root/configs/Containerfile" || die "no $package in the container"
done

# The same files in two folders, created in another order and at another time.
mkdir -p "$tree"/{a,b}/{bin,share/x} "$tree"/out-{a,b}
for file in bin/moetrain share/x/1 share/x/2; do echo "$file" > "$tree/a/$file"; done
for file in share/x/2 share/x/1 bin/moetrain; do echo "$file" > "$tree/b/$file"; done
touch -d 2001-01-01 "$tree/b/share/x/1"
for side in a b; do
    python3 "$root/configs/package.py" "$tree/$side" 1.2.3-dev+gabc.changes 1700000000 "$tree/out-$side" > /dev/null
done
diff -r "$tree/out-a" "$tree/out-b" || die "the bytes of a package depend on more than its files"
ls "$tree/out-a"/moetrain-1.2.3.dev0+gabc.changes-py3-none-manylinux_2_35_*.whl > /dev/null
# sbom.py refuses a linker map with an archive that is not in its table LICENSES, and a map without archives.
for map in '/usr/lib/libnew.a(x.o) main.o (x)' ' /usr/lib/libz.a(x.o)'; do
    echo "$map" > "$tree/map"
    ! python3 "$root/configs/sbom.py" --map "$tree/map" --version 1 --epoch 0 --out "$tree" 2> "$tree/said" ||
        die "sbom.py accepts: $map"
    grep -q "sbom.py: .*: \(no licence is known\|names no archive\)" "$tree/said"
done

mkdir "$tree/out"
(cd "$build" && cpack -G External -B "$tree/out") > "$tree/log" 2>&1 || { cat "$tree/log"; die "cpack failed"; }
want=$("$build/moetrain" version)
tar -C "$tree" -xzf "$tree"/out/moetrain-*.tar.gz
unpacked=$(echo "$tree"/moetrain-*)
[ "$("$unpacked/bin/moetrain" version)" = "$want" ] || die "the archive has another version"
(cd / && "$unpacked/bin/moetrain" plan "$unpacked/share/moetrain/configs/demo.ini" --set train.device=cpu \
    --set train.memory_gb=4 > /dev/null)
bash "$root/tests/symbols.sh" "$unpacked/bin/moetrain"
python3 - "$unpacked/share/doc/moetrain" "$want" << 'END'
import json, sys
folder, version = sys.argv[1], sys.argv[2].split()[1]
with open(f"{folder}/moetrain.spdx.json") as f:
    packages = {p["name"]: p for p in json.load(f)["packages"]}
with open(f"{folder}/copyright") as f:
    text = f.read()
assert packages["moetrain"]["versionInfo"].startswith(version), packages["moetrain"]
for name in ("libz", "libzstd", "libjansson", "libinih", "libpcre2-8", "libutf8proc", "libopenblas", "libgomp"):
    assert packages[name]["versionInfo"][0].isdigit() and f"{name} {packages[name]['versionInfo']}" in text, name
END
if ! python3 -m venv "$tree/env" > /dev/null 2>&1; then
    echo "skip: the wheel: python3 has no venv here"
    exit
fi
"$tree/env/bin/pip" install -q --no-index "$tree"/out/moetrain-*.whl
[ "$(PATH="$tree/env/bin:$PATH" moetrain version)" = "$want" ] || die "the wheel has another version"
(cd / && "$tree/env/bin/moetrain" tokens "$tree/env/share/moetrain/configs/demo.ini" --set output.dir="$tree/demo" \
    > /dev/null)
say "archive and wheel of $(awk 'NR == 1 { print $2 }' <<< "$want") run"

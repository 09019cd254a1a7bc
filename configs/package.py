#!/usr/bin/env python3
"""package.py - writes an archive and a Python wheel of an installed tree: moetrain-*.tar.gz, moetrain-*.whl.

    python3 package.py PREFIX VERSION EPOCH OUT_DIR

PREFIX has bin/ and share/. pip copies bin/ to the environment's bin/, share/ to its share/. The bytes follow from the
arguments: files are sorted, belong to root and have the time EPOCH (seconds). Prints the paths."""
import base64
import gzip
import hashlib
import io
import os
import platform
import re
import sys
import tarfile
import time
import zipfile

GLIBC = "2_35"  # tests/symbols.sh checks that the executable needs no newer one
EARLIEST = 315532800  # 1980, for zip


def python_version(version):
    """X.Y.Z-dev+gCOMMIT as PEP 440 writes it; X.Y.Z is the same."""
    public, _, local = version.partition("+")
    return public.replace("-dev", ".dev0") + (f"+{re.sub('[^a-z0-9]+', '.', local)}" if local else "")


def read_files(prefix):
    """Content by path below prefix, sorted."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(prefix) for name in names]
    files = {}
    for path in sorted(paths):
        with open(path, "rb") as f:
            files[os.path.relpath(path, prefix)] = f.read()
    return files


def mode(path):
    return 0o755 if path.startswith("bin/") else 0o644


def write_archive(path, top, files, epoch):
    with open(path, "wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=epoch) as packed, \
            tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), epoch, mode(name)
            entry.uname = entry.gname = "root"
            tar.addfile(entry, io.BytesIO(content))


def place(path, data, info):
    """Returns the path in the wheel for a file of the prefix. PEP 770: the SBOM is beside the metadata."""
    if path == "share/doc/moetrain/moetrain.spdx.json":
        return f"{info}/sboms/moetrain.spdx.json"
    if path == "share/doc/moetrain/copyright":
        return f"{info}/licenses/copyright"
    return path.replace("bin/", f"{data}/scripts/", 1) if path.startswith("bin/") else f"{data}/data/{path}"


def record(files):
    """The lines of RECORD: path, hash, size."""
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(content).digest()) for name, content in files.items()}
    return [f"{name},sha256={digests[name].rstrip(b'=').decode()},{len(files[name])}\n" for name in files]


def cuda_packages(version):
    """Metadata of the extra `cuda`: the libraries that a build with CUDA opens. "" for a build without CUDA."""
    major = re.search(r"cuda(\d+)$", version)
    if not major:
        return ""
    cublas = "nvidia-cublas" if int(major[1]) >= 13 else f"nvidia-cublas-cu{major[1]}"
    return (f'Provides-Extra: cuda\nRequires-Dist: {cublas}=={major[1]}.*; extra == "cuda"\n'
            f'Requires-Dist: nvidia-nccl-cu{major[1]}; extra == "cuda"\n')


def write_wheel(path, version, tag, files, epoch):
    data, info = f"moetrain-{version}.data", f"moetrain-{version}.dist-info"
    modes = {place(name, data, info): mode(name) for name in files}
    entries = {place(name, data, info): content for name, content in files.items()}
    entries[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: moetrain\nVersion: {version}\n"
        "Summary: LoRA fine-tuning of mixture-of-experts models with 4-bit experts\n"
        "License: Apache-2.0\nLicense-File: copyright\n" + cuda_packages(version)).encode()
    entries[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: moetrain-package.py\nRoot-Is-Purelib: false\nTag: {tag}\n").encode()
    entries[f"{info}/RECORD"] = "".join(record(entries) + [f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(path, "w") as wheel:
        for name in sorted(entries, key=lambda n: (n.startswith(info), n)):  # the metadata last, as PEP 427 recommends
            entry = zipfile.ZipInfo(name, time.gmtime(max(epoch, EARLIEST))[:6])
            entry.create_system = 3  # Unix: the next line is a mode
            entry.external_attr = (0o100000 | modes.get(name, 0o644)) << 16
            wheel.writestr(entry, entries[name], zipfile.ZIP_DEFLATED, 9)


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    files, version, epoch, out = read_files(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    top = f"moetrain-{version}-linux-{platform.machine()}"
    archive = os.path.join(out, f"{top}.tar.gz")
    write_archive(archive, top, files, epoch)
    tag = f"py3-none-manylinux_{GLIBC}_{platform.machine()}"
    wheel = os.path.join(out, f"moetrain-{python_version(version)}-{tag}.whl")
    write_wheel(wheel, python_version(version), tag, files, epoch)
    print(archive, wheel, sep="\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""same_bytes.py - two builds of moetrain write the same bytes: adapters, checkpoints, exports, plans. For changes that
move code and must not change what it does.
    python3 tests/same_bytes.py OLD NEW [--device cpu|cuda|cuda-portable] [--only PATTERN] [-j JOBS]
OLD, NEW: executables, both run on this machine, since the bits of a CPU run depend on OpenBLAS's kernels for the
processor. Builds with and without CUDA plan the same (--only 'plan/*'). Configuration keys that only one of the two has
are left out of the files that list all settings. Prints each case that differs, with its files; exit status 1 when
there is one, or no case."""
import argparse
import concurrent.futures
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

FORMATS = ["mxfp4", "nf4", "bf16", "nvfp4", "fp8"]
EXPORTS = ["peft", "vllm", "gguf", "merged-bf16", "merged-mxfp4", "merged-nvfp4", "merged-fp8"]
# Settings that runs of every family accept. Their values do not matter, only that much of the code runs.
VARIANTS = {
    "offload": "train.recompute=full train.offload=all train.threads=3",
    "zero": "train.recompute=selective parallel.cpu_ranks=2 parallel.zero=yes",
    "ep": "parallel.cpu_ranks=2 parallel.ep=2 parallel.chunks=2",
    "lora": "lora.dropout=0.2 lora.rslora=yes lora.rank_pattern=q_proj=4,experts=2 lora.layers=0-2",
    "distill": "distill.teacher=base distill.alpha=0.3",
    "quantize-nf4": "model.quantize=nf4", "quantize-nested": "model.quantize=nf4-nested",
    "quantize-mxfp4": "model.quantize=mxfp4", "quantize-nvfp4": "model.quantize=nvfp4",
    "inputs": "quant.weights=int8 quant.activations=int8 quant.targets=all",
    "dtype-bf16": "train.dtype=bf16 data.packing=no",
} | {f"qat-{w}": f"quant.weights={w}" for w in
     ["mxfp4", "mxfp4-ceil", "nvfp4", "nvfp4-fake", "fp8", "int8", "int4", "int4-32", "int4-128"]}
TIMED = [".lock", "report.html", "profile.txt", "trace.json"]
SETTINGS = ["config.ini", "README.md", "state.json", "manifest.json"]
TIMES = re.compile(rb'"(ms|tok_s|date|roof|mem_bytes|version)": ?("[^"]*"|[-+.0-9e]+|null),?')


def run(binary, where, *words):
    done = subprocess.run([binary, *words], cwd=where, capture_output=True, stdin=subprocess.DEVNULL, timeout=600)
    return done.returncode, done.stdout, done.stderr


def config_keys(binary):
    return set(re.findall(r"^\| `([^`]*)`", run(binary, ".", "config", "--markdown")[1].decode(), re.MULTILINE))


def without_keys(name, data, keys):
    """The bytes of a file without these settings: "section.key" in JSON, "key = value" below "[section]" in INI."""
    if name == "manifest.json": # size and checksum of state.json, whose bytes are compared
        return re.sub(rb'("state.json": ){.*}', rb"\1{}", data)
    kept, section = [], b""
    for line in data.split(b"\n"):
        section = line[1:-1] if re.fullmatch(rb"\[\w+\]", line) else section
        key = re.match(rb' *"(\w+\.\w+)": ', line) if name == "state.json" else re.match(rb"(\w+) = ", line)
        name_of = key and (key[1] if name == "state.json" else section + b"." + key[1])
        if not key or name_of.decode() not in keys:
            kept.append(line.rstrip(b",") if name == "state.json" else line) # a key after it may be left out
    return b"\n".join(kept)


def hashes(where, keys):
    """Hash of every file without the settings `keys`; times are removed from metrics.jsonl, other files with times are
    left out."""
    found = {}
    for folder, _, names in os.walk(where):
        for name in names:
            path = os.path.join(folder, name)
            if name in TIMED or "tfevents" in name or "/cache" in folder:
                continue
            with open(path, "rb") as f:
                data = f.read()
            if name == "metrics.jsonl":
                data = TIMES.sub(b"", data)
            if name in SETTINGS:
                data = without_keys(name, data, keys)
            found[os.path.relpath(path, where)] = hashlib.sha256(data).hexdigest()[:16]
    return found


class Case:
    """Commands that run one after the other in an empty folder, each with its exit code and, if `says`, its output."""

    def __init__(self, name, commands, says=False):
        self.name, self.commands, self.says = name, commands, says

    def result(self, binary, where, keys):
        shutil.rmtree(where, ignore_errors=True)
        os.makedirs(where)
        found = {}
        for i, words in enumerate(self.commands):
            code, out, error = run(binary, where, *words)
            found[f"exit code of {' '.join(words)}"] = code
            if code or self.says: # other output has times
                found[f"output of {' '.join(words)}"] = (b"" if code else out) + b"\n".join(
                    line for line in error.splitlines()
                    if line.startswith(b"moetrain: error") or (self.says and not line.startswith(b"plan: "))) # progress
        found.update(hashes(where, keys))
        shutil.rmtree(where)
        return found

    def compare(self, old, new, where, keys):
        a, b = self.result(old, where, keys), self.result(new, where, keys)
        return [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)], len(a)


def tiny_models(binary):
    """Name and formats of each small architecture of `moetrain synth`."""
    rows = run(binary, ".", "synth")[1].decode().splitlines()
    columns = rows[0].split()[3:]
    for row in rows[1:]:
        words = re.split(r"\s{2,}", row.strip())
        if words[0].endswith("-tiny"):
            yield words[0], [c for c, size in zip(columns, words[3:]) if size != "-"]


def training(model, device, sets, steps=2):
    base = (f"model.path={model} train.device={device} data.seq_len=64 train.steps={steps} train.grad_accum=2 lora.r=4 "
            "lora.targets=all-linear optim.schedule=constant output.save_every=1 eval.at_start=no eval.max_batches=1 "
            "log.report=no")
    return ["../../run.ini"] + [word for s in (base + " " + sets).split() for word in ("--set", s)]


def training_cases(models, device):
    for name, formats in models:
        for fmt in formats:
            path = f"../../models/{name}-{fmt}"
            exports = [["export", "out/config.ini", "--to", to] for to in EXPORTS]
            yield Case(f"{name}/{fmt}", [training(path, device, "")] + exports)
        path = f"../../models/{name}-{'bf16' if 'bf16' in formats else formats[0]}"
        for variant, sets in VARIANTS.items():
            yield Case(f"{name}/{variant}", [training(path, device, sets)])
        yield Case(f"{name}/resumed", [training(path, device, "", 1), training(path, device, "train.threads=3")])


PLANS = [[], ["--set", "lora.targets=all-linear", "--set", "model.quantize=nf4", "--host-gb", "64"],
         ["--set", "parallel.gpus=2", "--set", "parallel.ep=2", "--set", "train.offload=none"]]


def plan_cases(binary):
    archs = [row.split()[0] for row in run(binary, ".", "synth")[1].decode().splitlines()[1:]]
    for arch in archs:
        for gpu in ["h200", "rtx4090", "12gb"]:
            for i, sets in enumerate(PLANS):
                yield Case(f"plan/{arch}/{gpu}/{i}",
                           [["plan", "../../run.ini", "--arch", arch, "--gpu", gpu, *sets]], says=True)


def prepare(work, old, models):
    with open(os.path.join(work, "text.jsonl"), "w", encoding="utf-8") as f:
        for i in range(16):
            f.write(json.dumps({"text": " ".join(str((i * 7919 + j * j) % 997) for j in range(40 + i))}) + "\n")
    with open(os.path.join(work, "run.ini"), "w", encoding="utf-8") as f:
        f.write("[data]\ntrain = ../../text.jsonl\neval = ../../text.jsonl\n[output]\ndir = out\n[train]\nseed = 7\n")
    for name, formats in models:
        for fmt in formats:
            code, _, error = run(old, work, "synth", name, f"models/{name}-{fmt}", "--quant", fmt)
            if code:
                sys.exit(f"{name} as {fmt}: {error.decode()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "cuda-portable"])
    parser.add_argument("--only", default="*", help="pattern of the names of cases")
    parser.add_argument("-j", type=int, default=2, dest="jobs")
    args = parser.parse_args()
    old, new = os.path.abspath(args.old), os.path.abspath(args.new)
    os.environ.update(OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive")
    keys = config_keys(old) ^ config_keys(new)
    with tempfile.TemporaryDirectory() as work:
        models = list(tiny_models(old))
        cases = list(training_cases(models, args.device))
        if args.device == "cpu":
            cases += plan_cases(old)
        cases = [c for c in cases if fnmatch.fnmatch(c.name, args.only)]
        needed = {c.name.split("/")[0] for c in cases}
        prepare(work, old, [m for m in models if m[0] in needed])
        differ = files = 0
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            tasks = {pool.submit(c.compare, old, new, os.path.join(work, "runs", c.name.replace("/", "_")), keys): c
                     for c in cases}
            for done in concurrent.futures.as_completed(tasks):
                different, n = done.result()
                files += n
                differ += bool(different)
                if different:
                    print(f"{tasks[done].name} differs: {', '.join(different)}", flush=True)
        print(f"{len(cases)} cases, {files} results compared on {args.device}: {differ} differ")
        return 1 if differ or not cases else 0


if __name__ == "__main__":
    sys.exit(main())

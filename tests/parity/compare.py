"""compare.py - trains with the moetrain executable on a case of make_case.py and compares the results with those of
transformers + PEFT: the loss and gradient norm of every step, held-out losses, final adapter.
(tests/model/test_parity.c compares the gradients of the first step and the hidden states, inside the library.)

  python compare.py CASE [--moetrain build/moetrain] [--out DIR] [--set section.key=value ...]

Needs numpy and safetensors. Prints the largest error of each kind. Exit 1 when one exceeds its tolerance.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy
from safetensors.numpy import load_file

# Relative tolerances; the adapter's is for the Frobenius norm of the difference of each tensor.
TOLERANCE = {"loss": 1e-4, "grad_norm": 1e-3, "eval": 1e-4, "adapter": 1e-3}

CONFIG = """[model]
path = {case}
[data]
train = {case}/train.jsonl
eval = {case}/eval.jsonl
format = text
seq_len = {seq_len}
packing = false
shuffle = false
[lora]
r = {r}
alpha = {alpha}
alpha_pattern = {alpha_pattern}
rslora = {rslora}
dora = {dora}
targets = {targets}
layers = {layers}
init = {init}
init_from = {init_from}
[optim]
lr = {lr}
lr_ratio_b = {lr_ratio_b}
schedule = {schedule}
warmup_ratio = 0
weight_decay = {weight_decay}
beta1 = {beta1}
beta2 = {beta2}
eps = {eps}
clip_norm = {clip_norm}
[train]
device = cpu
dtype = fp32
steps = {steps}
micro_batch = {micro_batch}
grad_accum = {grad_accum}
neftune_alpha = {neftune_alpha}
resume = never
[eval]
every = 0
at_start = true
at_end = true
[output]
dir = {out}
save_every = 0
"""


def events(out, kind):
    with open(os.path.join(out, "metrics.jsonl")) as f:
        return [e for e in map(json.loads, f) if e["event"] == kind]


class Comparison:
    def __init__(self):
        self.worst = {}

    def add(self, kind, what, error):
        if kind not in self.worst or not error <= self.worst[kind][0]:  # NaN counts as the largest error
            self.worst[kind] = (error, what)

    def number(self, kind, what, ours, theirs):
        self.add(kind, f"{what}: {ours:.9g}, expected {theirs:.9g}", abs(ours - theirs) / abs(theirs))

    def passed(self):
        good = True
        for kind, (error, what) in self.worst.items():
            ok = error <= TOLERANCE[kind]
            good &= ok
            print(f"{'ok  ' if ok else 'FAIL'} {kind:10s} worst {error:.2e}, allowed {TOLERANCE[kind]:.0e}   {what}")
        return good


def compare_adapters(result, ours, theirs):
    if ours.keys() != theirs.keys():
        sys.exit(f"tensor names differ: {sorted(ours.keys() ^ theirs.keys())}")
    for name, expected in theirs.items():
        if ours[name].shape != expected.shape:
            sys.exit(f"{name}: shape {ours[name].shape}, expected {expected.shape}")
        error = numpy.linalg.norm(ours[name].astype(float) - expected) / numpy.linalg.norm(expected.astype(float))
        result.add("adapter", name, error)


def compare_products(result, ours, theirs):
    """B A of Linears: PiSSA's signs are arbitrary."""
    if ours.keys() != theirs.keys():
        sys.exit(f"tensor names differ: {sorted(ours.keys() ^ theirs.keys())}")
    for name in theirs:
        if "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            got, want = (x[other].astype(float) @ x[name].astype(float) for x in (ours, theirs))
            result.add("adapter", name, numpy.linalg.norm(got - want) / numpy.linalg.norm(want))


def expected_of(case):
    with open(os.path.join(case, "expected.json")) as f:
        return json.load(f)


def against(case, out):
    """moetrain's run in `out` against the case."""
    expected, steps = expected_of(case), events(out, "step")
    if len(steps) != len(expected["steps"]):
        sys.exit(f"{len(steps)} steps, expected {len(expected['steps'])}")
    result = Comparison()
    for ours, theirs in zip(steps, expected["steps"]):
        result.number("loss", f"step {ours['step']}", ours["loss"], theirs["loss"])
        result.number("grad_norm", f"step {ours['step']}", ours["grad_norm"], theirs["grad_norm"])
    first, last = events(out, "eval")
    result.number("eval", "before step 1", first["loss"], expected["eval_init_adapter"])
    result.number("eval", "after the last step", last["loss"], expected["eval_final"])
    compare = compare_adapters if expected["setup"].get("init", "default") == "default" else compare_products
    compare(result, load_file(os.path.join(out, "adapter", "adapter_model.safetensors")),
            load_file(os.path.join(case, "adapter_final", "adapter_model.safetensors")))
    return result


def train(case, moetrain, out, settings):
    """Trains on the case into the folder `out`."""
    setup = {"targets": "q_proj,k_proj,v_proj,o_proj,experts", "rslora": False, "layers": "all", "lr_ratio_b": 1,
             "neftune_alpha": 0, "alpha_pattern": "", "init": "default", "dora": False}
    setup |= expected_of(case)["setup"]
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as config:
        setup["init_from"] = f"{case}/adapter_init" if setup["init"] == "default" else ""
        if setup["init"] != "default":  # of no use with weights that A and B stand for
            setup["weight_decay"] = 0
        for name in ("rslora", "dora"):
            setup[name] = str(setup[name]).lower()
        config.write(CONFIG.format(case=case, out=out, **setup))
        config.flush()
        command = [moetrain, config.name] + [word for s in settings for word in ("--set", s)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def compare(case, moetrain, out, settings=()):
    train(case, moetrain, out, settings)
    return against(case, out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--moetrain", default="build/moetrain")
    parser.add_argument("--out", help="keep the run here (default: a temporary folder)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.abspath(a.out) if a.out else os.path.join(scratch, "out")
        result = compare(os.path.abspath(a.case), a.moetrain, out, a.set)
    sys.exit(0 if result.passed() else 1)


if __name__ == "__main__":
    main()

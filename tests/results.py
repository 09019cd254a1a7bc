#!/usr/bin/env python3
"""results.py - measures the speed of a GPU and writes the tables of tests/RESULTS.md.

  python3 tests/results.py measure BINARY DIR [NAME ...]   runs `BINARY bench ... --json`; writes a file per run to DIR
  python3 tests/results.py write DIR                       writes the tables of tests/RESULTS.md from DIR

Python 3 and its standard library. `measure` skips runs whose file is in DIR already."""
import importlib.util
import json
import os
import subprocess
import sys
import time

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "RESULTS.md")
BEGIN, END = "<!-- begin: tests/results.py write -->\n", "<!-- end -->\n"

STEPS = [  # name, note, options of `bench step`
    ("20b", "", "--arch gpt-oss-20b"),
    ("20b-packed", "no decoded layers", "--arch gpt-oss-20b --decoded 0"),
    ("20b-portable", "portable kernels", "--arch gpt-oss-20b --device cuda-portable"),
    ("20b-fp8", "FP8 experts", "--arch gpt-oss-20b --expert-dtype fp8"),
    ("20b-nf4", "", "--arch gpt-oss-20b --quant nf4"),
    ("20b-qat-mxfp4", "QAT in mxfp4", "--arch gpt-oss-20b --qat mxfp4"),
    ("20b-qat-nvfp4", "QAT in nvfp4", "--arch gpt-oss-20b --qat nvfp4"),
    ("20b-qat-int8", "QAT in int8", "--arch gpt-oss-20b --qat int8"),
    ("20b-qad-mxfp4", "QAT in mxfp4, teacher: base", "--arch gpt-oss-20b --qat mxfp4 --teacher base"),
    ("20b-8192", "", "--arch gpt-oss-20b --seq 8192"),
    ("20b-4x2048", "", "--arch gpt-oss-20b --tokens 8192 --seq 2048"),
    ("20b-4x2048-packed", "no decoded layers", "--arch gpt-oss-20b --tokens 8192 --seq 2048 --decoded 0"),
    ("20b-4x2048-19gb", "limit 19 GiB", "--arch gpt-oss-20b --tokens 8192 --seq 2048 --memory-gb 19"),
    ("20b-1x1024", "", "--arch gpt-oss-20b --tokens 1024 --seq 1024"),
    ("20b-1x1024-packed", "no decoded layers", "--arch gpt-oss-20b --tokens 1024 --seq 1024 --decoded 0"),
    ("20b-15gb", "limit 15 GiB", "--arch gpt-oss-20b --tokens 2048 --seq 2048 --rank 8 --memory-gb 15"),
    ("20b-12.8gb", "attention only, limit 12.8 GiB",
     "--arch gpt-oss-20b --tokens 1024 --seq 1024 --rank 8 --memory-gb 12.8 --targets q_proj,k_proj,v_proj,o_proj"),
    ("20b-balanced", "experts balanced", "--arch gpt-oss-20b --routing balanced"),
    ("20b-zipf", "experts by zipf", "--arch gpt-oss-20b --routing zipf"),
    ("20b-one", "all tokens to the same 4 experts", "--arch gpt-oss-20b --routing one"),
    ("qwen3", "", "--arch qwen3-30b-a3b --quant nf4"),
    ("olmoe", "", "--arch olmoe-1b-7b"),
    ("mixtral", "", "--arch mixtral-8x7b --tokens 8192 --quant nf4"),
    ("120b", "", "--arch gpt-oss-120b --tokens 4096 --rank 8 --steps 3"),
]
PATHS = [
    ("path-20b", "--arch gpt-oss-20b --tokens 4096"),
    ("path-olmoe", "--arch olmoe-1b-7b --tokens 4096"),
    ("path-qwen3", "--arch qwen3-30b-a3b --tokens 4096 --quant nf4"),
]
LORA, SPLIT, QUANT, TORCH = "lora", "split", "quant", "quant-torch"
PUBLISHED = ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b")


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def run(folder, name, command):
    path = os.path.join(folder, name + ".json")
    if os.path.exists(path):
        return True
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    if done.returncode:
        print(f"{name}: exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return False
    with open(path, "w", encoding="utf-8") as f:
        f.write(done.stdout)
    print(f"{name}: {seconds:.0f} s", flush=True)
    return True


def measure(binary, folder, names):
    os.makedirs(folder, exist_ok=True)
    gpu = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").strip().splitlines()
    version = dict(line.split(None, 1) for line in output_of(binary, "version").splitlines() if len(line.split()) > 1)
    machine = {"gpu": gpu[0] if gpu else "none", "commit": version.get("commit", "unknown").strip(),
               "date": time.strftime("%Y-%m-%d")}
    before = load(folder, "machine")  # a folder may hold runs of several commits
    if before and machine["commit"] not in before["commit"]:
        machine["commit"] = before["commit"] + ", " + machine["commit"]
    with open(os.path.join(folder, "machine.json"), "w", encoding="utf-8") as f:
        json.dump(machine, f)
    runs = [(n, ["step", *o.split()]) for n, _, o in STEPS]
    runs += [(n, ["step", "--path", "loop,presort,grouped", *o.split()]) for n, o in PATHS]
    runs += [(LORA, ["lora", "--arch", "all", "--rank", "16"]), (QUANT, ["quant"])]
    runs += [(SPLIT, ["lora", "--split", "--arch", "all", "--rank", "16,64"])]
    commands = [(n, [binary, "bench", *words, "--json"]) for n, words in runs]
    if importlib.util.find_spec("torch"):
        commands.append((TORCH, [sys.executable, os.path.join(os.path.dirname(RESULTS), "parity", "quant_speed.py")]))
    fine = [run(folder, n, command) for n, command in commands if not names or n in names]
    return 0 if all(fine) else 1


def load(folder, name):
    path = os.path.join(folder, name + ".json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def gib(n):
    return f"{n / 2**30:.1f}"


def step_rows(folder):
    yield ("| model | experts, note | tokens per step | r | tokens/s | step (least to most) | floor | of the floor | "
           "recompute | decoded layers | peak, plan |")
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for name, note, _ in STEPS:
        b = load(folder, name)
        if not b:
            continue
        kind = b["experts"].split(",")[0]  # without the number of decoded layers, which has its own column
        kind = kind.upper() if kind != "bf16" else kind
        yield (f"| {b['arch']} | {', '.join(x for x in (kind, note) if x)} | {b['tokens'] // b['seq']} x {b['seq']} | "
               f"{b['rank']} | {b['tok_s']:,.0f} | {b['step_ms']:.1f} ms ({b['step_ms_min']:.1f} to "
               f"{b['step_ms_max']:.1f}) | {b['floor_ms']:.1f} ms | {b['roof_pct']:.0f} % | {b['recompute']} | "
               f"{b['decoded_layers']} of {b['layers']} | {gib(b['peak_bytes'])}, {gib(b['plan_bytes'])} GiB |")


def share_rows(folder):
    b = load(folder, "20b")
    if not b:
        return
    yield f"The largest parts of the first step, {b['launches']:,} launches, host waits: {b['waits']}."
    yield ""
    yield "| op | calls | ms | of the step | TFLOP/s | of the floor |"
    yield "|---|---|---|---|---|---|"
    total = sum(o["us"] for o in b["ops"])
    for o in sorted(b["ops"], key=lambda o: -o["us"])[:12]:
        part = f" {o['part']}" if o["part"] else ""
        rate = f"{o['tflops']:.0f}" if o["flops"] else ""
        yield (f"| {o['op']}{part} | {o['calls']} | {o['us'] / 1e3:.1f} | {100 * o['us'] / total:.1f} % | {rate} | "
               f"{100 * o['floor_us'] / o['us']:.0f} % |")


def path_rows(folder):
    yield ("| model, 1 x 4096 tokens per step | loop: a wait per expert | one wait per layer | grouped, as training | "
           "losses of 20 steps, loop and grouped |")
    yield "|---|---|---|---|---|"
    for name, _ in PATHS:
        b = load(folder, name)
        if b:
            cells = [f"{p['tok_s']:,.0f} tokens/s, waits: {p['waits']:,}" for p in b["paths"]]
            apart = max(p["loss_apart"] for p in b["paths"])
            yield f"| {b['arch']}, {b['experts']} | " + " | ".join(cells) + f" | at most {apart:.2g} apart |"


def lora_rows(folder):
    b = load(folder, LORA)
    yield "| experts | tokens | without adapters | with r = 16 | forward + dX + dA, dB |"
    yield "|---|---|---|---|---|"
    for row in b["rows"] if b else []:
        x = row["layer"]
        yield (f"| {row['arch']}, {row['quant']} | {row['tokens']:,} | {x['base_ms']:.2f} ms | "
               f"+{x['overhead_pct']:.0f} % | "
               f"{x['fwd_ms'] - x['fwd_base_ms']:.2f} + {x['dx_lora_ms']:.2f} + {x['dab_ms']:.2f} ms |")


def split_lines(folder):
    b = load(folder, SPLIT)
    if not b:
        return
    rows = [r for r in b["rows"] if r["arch"] in PUBLISHED]
    yield from ("### Adapters in the product (hybrid) or in a third launch (split)", "",
                "`bench lora --split`, bf16 experts of one layer. Hybrid, as training runs it: x A^T, then one product",
                "with the adapter. Split: x A^T, the product without adapter, y += s xa B^T. No activation is applied;",
                "the split form of a layer could apply it only after its third launch. A row sums gate_up and down,",
                "forward and dX. dA and dB are the same in both forms.", "", *split_verdict(rows), "")
    yield ("| experts | tokens | r | without adapter | hybrid | split | split, third launch at copy speed | "
           "dA | dB |")
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        ms = {key: sum(p.get(key, 0) for p in row["products"])
              for key in ("base_ms", "hybrid_ms", "split_ms", "split_at_copy_ms", "da_ms", "db_ms")}
        yield (f"| {row['arch']} | {row['tokens']:,} | {row['rank']} | {ms['base_ms']:.2f} ms | "
               f"{ms['hybrid_ms']:.2f} ms | {ms['split_ms']:.2f} ms, {ms['split_ms'] / ms['hybrid_ms']:.2f} times | "
               f"{ms['split_at_copy_ms']:.2f} ms, {ms['split_at_copy_ms'] / ms['hybrid_ms']:.2f} times | "
               f"{ms['da_ms']:.2f} ms | {ms['db_ms']:.2f} ms |")
    yield ""


def split_verdict(rows):
    where = [f"{r['arch']}, {r['tokens']:,} tokens, r = {r['rank']}" for r in rows]
    text = []
    for key, form in (("split_ms", "as measured"), ("split_at_copy_ms", "with a third launch at copy speed")):
        one, of = min((p[key] / p["hybrid_ms"], f"{w}, {p['product']}") for r, w in zip(rows, where)
                      for p in r["products"])
        layer = min(sum(p[key] for p in r["products"]) / sum(p["hybrid_ms"] for p in r["products"]) for r in rows)
        text.append(f"{form} at least {layer:.2f} times for a layer and {one:.2f} times for a product ({of})")
    return ["The split form takes, relative to the hybrid, over the five published models:",
            f"{text[0]};", f"{text[1]}.", "Training uses the hybrid for every shape."]


def quant_verdict(rows, loops):
    def span(ratios):
        digits = 0 if max(ratios) >= 10 else 1
        return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"
    for name, chosen in (("Fake quantisation reaches", [r for r in rows if r["op"] != "amax"]),
                         ("amax reaches", [r for r in rows if r["op"] == "amax"])):
        copies = [r["same_copy_pct"] for r in chosen]
        torch = [loops[key] / r["ms"] for r in chosen if (key := (r["op"], r["experts"], r["out"])) in loops]
        yield f"{name} {min(copies):.0f} to {max(copies):.0f} % of a copy of the same size. One call per expert takes"
        yield f"{span([r['loop_ratio'] for r in chosen])} times as long" + (
            f", the loop of PyTorch operations {span(torch)} times." if torch else ".")


def quant_lines(folder):
    b = load(folder, QUANT)
    if not b:
        return
    peer = load(folder, TORCH)
    loops = {(r["op"], r["experts"], r["out"]): r["ms"] for r in peer["rows"]} if peer else {}
    yield from ("### Fake quantisation of bf16 experts, all in one call", "")
    yield from ("Calls run back to back on one stack of experts after another; a stack comes up again after 512 MiB of",
                "other inputs, so the caches are cold. The copy of the same size moves as many bytes, read and written",
                "together, with cudaMemcpyAsync between the same buffers, timed in the same way. A large copy moves",
                "256 MiB. The op is compared with two loops over the experts: one calls our kernels once per expert,",
                "the other runs PyTorch operations (`tests/parity/quant_speed.py`).", "")
    yield from (*quant_verdict(b["rows"], loops), "")
    yield ("| op | experts | GB/s | of a copy of the same size | of a large copy | one call per expert takes | "
           "a loop of PyTorch operations takes | launches |")
    yield "|---|---|---|---|---|---|---|---|"
    for row in b["rows"]:
        loop = loops.get((row["op"], row["experts"], row["out"]))
        times = f"{loop / row['ms']:.0f} times as long" if loop else ""
        yield (f"| {row['op']} | {row['experts']} x [{row['out']}, {row['in']}] | {row['gbs']:,.0f} | "
               f"{row['same_copy_pct']:.0f} % | {row['copy_pct']:.0f} % | "
               f"{row['loop_ratio']:.1f} times as long | {times} | {row.get('launches', '')} |")
    yield ""


def write(folder):
    machine, first = load(folder, "machine"), load(folder, "20b")
    gpu, driver = (machine["gpu"] + ",").split(",")[:2]
    lines = [f"{gpu}, driver {driver.strip()}, commit {machine['commit']}, {machine['date']}. "
             f"A large bf16 product reaches {first['roof_tflops']:.0f} TFLOP/s, a large copy "
             f"{first['roof_gbs'] / 1e3:.2f} TB/s.", "",
             "### A training step", "",
             "LoRA on attention and all experts unless noted, bf16 activations, random weights; median of 10 steps.",
             "",
             *step_rows(folder), "", *share_rows(folder), "",
             "### Grouped experts against loops over experts, in this program", "", *path_rows(folder), "",
             "### What adapters cost on the experts of one layer, forward and backward", "", *lora_rows(folder), "",
             *split_lines(folder),
             *quant_lines(folder)]
    with open(RESULTS, encoding="utf-8") as f:
        text = f.read()
    head, rest = text.split(BEGIN)
    tail = rest.split(END, 1)[1]
    with open(RESULTS, "w", encoding="utf-8") as f:
        f.write(head + BEGIN + "\n".join(lines) + "\n" + END + tail)
    return 0


def main():
    if len(sys.argv) >= 4 and sys.argv[1] == "measure":
        return measure(sys.argv[2], sys.argv[3], sys.argv[4:])
    if len(sys.argv) == 3 and sys.argv[1] == "write":
        return write(sys.argv[2])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

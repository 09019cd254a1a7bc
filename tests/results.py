#!/usr/bin/env python3
"""results.py - measures the speed of a GPU, keeps figures in tests/results/ and writes the tables of pages from them.

  python3 tests/results.py measure BINARY DIR [NAME ...]   runs `BINARY bench ... --json`; writes a file per run to DIR
  python3 tests/results.py collect DIR                     figures of DIR's runs into tests/results/
  python3 tests/results.py write                           tables of README.md, tests/RESULTS.md, tests/notebook/
  python3 tests/results.py check                           fails where a page differs from the figures

tests/results/NAME.json is a table: columns, and rows with commit, GPU, date, what was run, and a value per column: a
text or [number, unit]. A page has it between `<!-- table: NAME -->` and `<!-- end -->`; the first may have
`rows=0,3 columns=0,1`.
Python 3 and its standard library. `measure` skips runs whose file is in DIR already."""
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TABLES = os.path.join(ROOT, "tests", "results")
NOTEBOOK = os.path.join(ROOT, "tests", "notebook")
RESULTS_WORDS = 4000
MARK = re.compile(r"<!-- table: (\w+)(?: rows=([\d,]+))?(?: columns=([\d,]+))? -->\n(.*?)<!-- end -->", re.S)
FIGURE = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)? (?:tokens/s|GiB|times|%|ms)(?!\w)|(?<![\w.=])\d(?:\.\d+)?e-\d+"
                    r"|(?<=loss )\d\.\d+")

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
LORA, QUANT, TORCH = "lora", "quant", "quant-torch"


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
    runs += [(LORA, ["lora", "--arch", "all", "--rank", "16"]), (QUANT, ["quant"])]
    commands = [(n, [binary, "bench", *words, "--json"]) for n, words in runs]
    if importlib.util.find_spec("torch"):
        commands.append((TORCH, [sys.executable, os.path.join(ROOT, "tests", "parity", "quant_speed.py")]))
    fine = [run(folder, n, command) for n, command in commands if not names or n in names]
    return 0 if all(fine) else 1


def load(folder, name):
    path = os.path.join(folder, name + ".json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        return json.load(f)


# ---- from runs to tests/results/

def gib(n):
    return [round(n / 2**30, 1), "GiB"]


def step_values(folder):
    for name, note, options in STEPS:
        b = load(folder, name)
        if not b:
            continue
        kind = b["experts"].split(",")[0]  # without the number of decoded layers, which has a separate column
        kind = kind.upper() if kind != "bf16" else kind
        yield f"step {options}", [b["arch"], ", ".join(x for x in (kind, note) if x),
                        f"{b['tokens'] // b['seq']} x {b['seq']}", str(b["rank"]), [round(b["tok_s"]), "tokens/s"],
                        [round(b["step_ms"], 1), "ms"],
                        [round(b["floor_ms"], 1), "ms"], [round(b["roof_pct"]), "%"], b["recompute"],
                        f"{b['decoded_layers']} of {b['layers']}", gib(b["peak_bytes"]), gib(b["plan_bytes"]),
                        f"{b['step_ms_min']:.1f} to {b['step_ms_max']:.1f} ms"]


def step_ops_values(folder):
    b = load(folder, "20b") or {"ops": []}
    total = sum(o["us"] for o in b["ops"])
    for o in sorted(b["ops"], key=lambda o: -o["us"])[:12]:
        yield f"step {STEPS[0][2]}", [f"{o['op']} {o['part'] or ''}".strip(), str(o["calls"]),
                            [round(o["us"] / 1e3, 1), "ms"], [round(100 * o["us"] / total, 1), "%"],
                            [round(o["tflops"]), "TFLOP/s"], [round(100 * o["floor_us"] / o["us"]), "%"]]


def lora_values(folder):
    for row in (load(folder, LORA) or {"rows": []})["rows"]:
        x = row["layer"]
        yield "lora", [f"{row['arch']}, {row['quant']}", f"{row['tokens']:,}", [round(x["base_ms"], 2), "ms"],
                       [round(x["overhead_pct"]), "%"], [round(x["fwd_ms"] - x["fwd_base_ms"], 2), "ms"],
                       [round(x["dx_lora_ms"], 2), "ms"], [round(x["dab_ms"], 2), "ms"]]


def quant_values(folder):
    loops = {(r["op"], r["experts"], r["out"]): r["ms"] for r in (load(folder, TORCH) or {"rows": []})["rows"]}
    for row in (load(folder, QUANT) or {"rows": []})["rows"]:
        loop = loops.get((row["op"], row["experts"], row["out"]))
        yield "quant", [row["op"], f"{row['experts']} x [{row['out']}, {row['in']}]", [round(row["gbs"]), "GB/s"],
                        [round(row["same_copy_pct"]), "%"], [round(row["copy_pct"]), "%"],
                        [round(row["loop_ratio"], 1), "times"], [round(loop / row["ms"]), "times"] if loop else None]


COLLECTED = {"step": step_values, "step_ops": step_ops_values, "lora": lora_values, "quant": quant_values}


def collect(folder):
    machine = load(folder, "machine")
    gpu = machine["gpu"].split(",")[0].replace("NVIDIA ", "")
    for name, values in COLLECTED.items():
        rows = [{"commit": machine["commit"], "gpu": gpu, "date": machine["date"], "run": f"moetrain bench {run}",
                 "values": v} for run, v in values(folder)]
        if rows:
            table = load(TABLES, name)
            lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
            with open(os.path.join(TABLES, name + ".json"), "w", encoding="utf-8") as f:
                f.write(f'{{\n"columns": {json.dumps(table["columns"])},\n"rows": [\n{lines}\n]\n}}\n')
    return 0


# ---- from tests/results/ to pages

def value_of(tables, value):
    """A text or [number, unit]. {"row": [table, row, column]} is a value of another table; {"ratio": [table, row, row,
    column]} divides the value of one row by that of another."""
    if not isinstance(value, dict):
        return value or ""
    if "row" in value:
        name, row, column = value["row"]
        return tables[name]["rows"][row]["values"][column]
    name, above, below, column = value["ratio"]
    rows = tables[name]["rows"]
    return [round(rows[above]["values"][column][0] / rows[below]["values"][column][0], 2), "times"]


def cell(value, column):
    if isinstance(value, str):
        return value
    number, unit = value
    return f"{number:,}" if unit == column else f"{number:,} {unit}"


def source(row):
    return f"{row['commit']}, {row['gpu']}, {row['date']}".rstrip(", ")


def render(tables, name, rows, columns):
    table = tables[name]
    chosen = [int(i) for i in columns.split(",")] if columns else range(len(table["columns"]))
    titles = [table["columns"][i] for i in chosen]
    lines = ["| " + " | ".join(titles + ["commit, GPU, date"]) + " |", "|" + "---|" * (len(titles) + 1)]
    for row in [table["rows"][int(i)] for i in rows.split(",")] if rows else table["rows"]:
        cells = [cell(value_of(tables, row["values"][i]), table["columns"][i]) for i in chosen]
        lines.append("| " + " | ".join(cells + [source(row)]) + " |")
    return "\n".join(lines) + "\n"


def load_tables():
    return {os.path.basename(p)[:-5]: load(TABLES, os.path.basename(p)[:-5])
            for p in sorted(glob.glob(os.path.join(TABLES, "*.json")))}


def load_pages():
    paths = [os.path.join(ROOT, "README.md"), os.path.join(ROOT, "tests", "RESULTS.md")]
    pages = {}
    for path in paths + sorted(glob.glob(os.path.join(NOTEBOOK, "*.md"))):
        with open(path, encoding="utf-8") as f:
            pages[os.path.relpath(path, ROOT)] = f.read()
    return pages


def write():
    tables = load_tables()
    for path, text in load_pages().items():
        def fill(mark):
            head = mark.group(0).split("\n", 1)[0]
            return head + "\n" + render(tables, *mark.group(1, 2, 3)) + "<!-- end -->"
        written = MARK.sub(fill, text)
        if written != text:
            with open(os.path.join(ROOT, path), "w", encoding="utf-8") as f:
                f.write(written)
    return 0


def problems(tables, pages):
    """What is wrong in the pages, a line each."""
    used = set()
    for path, text in pages.items():
        for mark in MARK.finditer(text):
            used.add(mark.group(1))
            if mark.group(1) not in tables:
                yield f"{path}: no table tests/results/{mark.group(1)}.json"
            elif mark.group(4) != render(tables, *mark.group(1, 2, 3)):
                yield f"{path}: table {mark.group(1)} differs from its figures: python3 tests/results.py write"
    for name, table in tables.items():
        if name not in used:
            yield f"tests/results/{name}.json: no page has this table"
        for row in table["rows"]:
            complete = all(row.get(key) for key in ("commit", "gpu", "date", "run"))
            if not complete or len(row["values"]) != len(table["columns"]):
                yield f"tests/results/{name}.json: a row without commit, gpu, date, run or a value: {row['values'][0]}"
    known = "\n".join(cell(value_of(tables, v), None) for t in tables.values() for r in t["rows"] for v in r["values"])
    for figure in FIGURE.findall(pages["README.md"]):
        if not re.search(r"(?<![\d.,])" + re.escape(figure), known):
            yield f"README.md: {figure} is in no table of tests/results/"
    words = len(pages["tests/RESULTS.md"].split())
    if words > RESULTS_WORDS:
        yield f"tests/RESULTS.md: {words:,} words, over {RESULTS_WORDS:,}"
    index = pages["tests/notebook/README.md"]
    listed = {"tests/notebook/" + name for name in re.findall(r"^\| \[(\w+\.md)\]", index, re.M)}
    there = {path for path in pages if path.startswith("tests/notebook/")} - {"tests/notebook/README.md"}
    for path in sorted(listed ^ there):
        yield f"tests/notebook/README.md: {path} " + ("has no row" if path in there else "is no file")


def check():
    tables, pages = load_tables(), load_pages()
    found = list(problems(tables, pages))
    # Proof: each kind of fault is found.
    results, readme = pages["tests/RESULTS.md"], pages["README.md"]
    for fault, path, text in (
            ("differs from its figures", "tests/RESULTS.md", results.replace(MARK.search(results).group(4), "", 1)),
            ("is in no table", "README.md", readme + "\n98,765 tokens/s\n"),
            ("no table", "README.md", readme + "<!-- table: none -->\n<!-- end -->"),
            ("words, over", "tests/RESULTS.md", results + " word" * RESULTS_WORDS),
            ("has no row", "tests/notebook/new.md", "# New\n")):
        if not any(fault in line for line in problems(tables, {**pages, path: text})):
            found.append(f"results.py: its own proof failed: '{fault}' was not found")
    for line in found:
        print(line)
    print(f"results.py: {len(found)} problems")
    return 1 if found else 0


def main():
    words = sys.argv[1:]
    if len(words) >= 3 and words[0] == "measure":
        return measure(words[1], words[2], words[3:])
    if len(words) == 2 and words[0] == "collect":
        return collect(words[1])
    if words in (["write"], ["check"]):
        return write() if words == ["write"] else check()
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

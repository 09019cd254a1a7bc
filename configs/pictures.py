#!/usr/bin/env python3
"""pictures.py - draws the pictures of ARCHITECTURE.md and README.md from what the executable prints.

  python3 configs/pictures.py BINARY PLANNER DIR

BINARY runs the demo, PLANNER (a build with nvcc) plans for a GPU that need not be there. Their outputs are kept in DIR;
a run whose output is there already is skipped. The pictures are configs/*.svg, each with its source in its last line.
Python 3 and its standard library."""
import collections
import glob
import html
import json
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
GPU = "h200"
PLAN = ["--arch", "gpt-oss-20b", "--gpu", GPU, "--set", "lora.r=16", "--set", "data.seq_len=2048",
        "--set", "train.micro_batch=4"]
BLUE, ORANGE, GREEN, GREY, PURPLE = "#2563eb", "#e4572e", "#2a9d58", "#8d99ae", "#a855f7"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#d4a017", GREY, "#0ea5a5")


class Picture:
    def __init__(self, width, height, title, source):
        self.parts, self.size = [], (width, height)
        self.text(16, 26, title, size=16, weight=600)
        self.text(16, height - 12, source, size=11, fill="#667085")

    def text(self, x, y, words, size=12, anchor="start", fill="#1d2330", weight=400):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
                          f'font-weight="{weight}">{html.escape(words)}</text>')

    def box(self, x, y, width, height, fill="#f7f8fa", stroke="#c5cbd8"):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
                          f'fill="{fill}" stroke="{stroke}"/>')

    def arrow(self, x1, y1, x2, y2):
        self.parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#667085" fill="none" '
                          'marker-end="url(#head)"/>')

    def path(self, points, stroke="none", fill="none"):
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path d="M{line}" stroke="{stroke}" fill="{fill}" stroke-width="1.6"/>')

    def save(self, name):
        width, height = self.size
        with open(os.path.join(HERE, name), "w", encoding="utf-8") as f:
            f.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                    f'font-family="system-ui,sans-serif">\n<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
                    'markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#667085"/></marker>'
                    f'</defs>\n<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(self.parts) +
                    "\n</svg>\n")


def kept(path, command):
    """The output of a command, from `path` if it has run before."""
    if not os.path.exists(path):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        with open(path, "w", encoding="utf-8") as f:
            f.write(done.stdout + done.stderr)
    with open(path, encoding="utf-8") as f:
        return f.read()


def demo(binary, folder, name, *settings):
    """The output folder of a run of the demo."""
    out = os.path.join(folder, name)
    words = [w for s in (f"output.dir={out}", *settings) for w in ("--set", s)]
    kept(out + ".log", [binary, "configs/demo.ini", *words])
    return out


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def commit(binary, path):
    return re.search(r"commit +(\w{7})", kept(path, [binary, "version"])).group(1)


# ---- rooms: folders of the sources and their includes

def draw_rooms():
    includes, lines, files = collections.Counter(), collections.Counter(), collections.Counter()
    place = {"train": (250, 50), "model": (60, 150), "optim": (250, 150), "data": (440, 150), "kernels": (250, 250)}
    for room in place:
        for path in glob.glob(os.path.join(ROOT, room, "**", "*.*"), recursive=True):
            if path.endswith((".c", ".h", ".cu", ".cuh")):
                text = read(path)
                lines[room] += text.count("\n")
                files[room] += 1
                others = re.findall(r'#include "(\w+)/', text)
                includes.update((room, to) for to in others if to in place and to != room)
    p = Picture(640, 340, "Rooms: an arrow is an include, with the number of includes",
                "counted in the sources by configs/pictures.py; tests/lint.sh refuses other directions")
    for (a, b), n in includes.items():
        (xa, ya), (xb, yb) = place[a], place[b]
        side = ya == yb
        x1, y1 = (xa + (140 if xb > xa else 0), ya + 20) if side else (xa + 70 + (xb - xa) * .15, ya + 44)
        x2, y2 = (xb + (0 if xb > xa else 140), yb + 20) if side else (xb + 70 + (xa - xb) * .15, yb)
        if side and abs(xa - xb) > 200:  # past the room between them
            p.path([(xa + 40, ya + 44), (xa + 60, ya + 68), (xb + 60, ya + 68)], GREY)
            x1, y1, x2, y2 = xb + 60, ya + 68, xb + 60, yb + 45
        elif abs(ya - yb) > 150:  # train to kernels, past optim
            p.path([(xa + 120, ya + 44), (xa + 160, ya + 80), (xa + 160, yb - 30)], GREY)
            x1, y1, x2, y2 = xa + 160, yb - 30, xb + 120, yb
        p.arrow(x1, y1, x2, y2)
        p.text((x1 + x2) / 2 + 6, (y1 + y2) / 2 - 4, str(n), size=11, fill="#667085")
    for room, (x, y) in place.items():
        p.box(x, y, 140, 44)
        p.text(x + 70, y + 19, room + "/", anchor="middle", weight=600)
        p.text(x + 70, y + 36, f"{files[room]} files, {lines[room]:,} lines", size=11, anchor="middle")
    p.save("rooms.svg")


# ---- a profiled step of the demo

def events(folder):
    trace = json.loads(read(os.path.join(folder, "trace.json")))
    trace = trace["traceEvents"] if isinstance(trace, dict) else trace
    start = min(e["ts"] for e in trace if "ts" in e)
    ops = [(e["name"], (e["ts"] - start) / 1e3, e["dur"] / 1e3) for e in trace if e["ph"] == "X"]
    arenas = [((e["ts"] - start) / 1e3, e["args"]) for e in trace if e["ph"] == "C"]
    return ops, arenas


def draw_arenas(folder, source):
    ops, arenas = events(folder)
    p = Picture(760, 330, "Three arenas over a step of the demo", source)
    end = ops[-1][1] + ops[-1][2]
    most = max(sum(a.values()) for _, a in arenas) / 2**20
    x = lambda ms: 60 + 600 * ms / end
    y = lambda mib: 270 - 200 * mib / most
    marks = [next(o[1] for o in ops if o[0].startswith(n)) for n in ("linear_ce", "rmsnorm_bwd", "sumsq")]
    for name, a, b in zip(("forward", "loss", "backward", ""), [0, *marks], [*marks, end]):
        p.text((x(a) + x(b)) / 2, 58, name, anchor="middle", fill="#667085")
        p.path([(x(b), 64), (x(b), 270)], "#e6e8ee")
    below = [0] * len(arenas)
    for name, colour in (("weights", GREY), ("state", GREEN), ("work", BLUE)):
        above = [b + a[name] / 2**20 for b, (_, a) in zip(below, arenas)]
        edge = [(x(t), y(v)) for (t, _), (_, v) in zip(arenas[1:] + [(end, 0)], enumerate(above))]
        steps = []
        for i, (t, _) in enumerate(arenas):
            steps += [(x(t), y(above[i])), edge[i]]
        floor = []
        for i, (t, _) in enumerate(arenas):
            floor += [(x(t), y(below[i])), (edge[i][0], y(below[i]))]
        p.path(steps + floor[::-1], fill=colour)
        size = max(a[name] for _, a in arenas) / 2**20
        p.text(668, y((above[5] + below[5]) / 2) + 4 if name != "work" else 120, f"{name} {size:.0f} MiB", fill=colour)
        below = above
    for mib in (0, 40, 80, 120):
        if mib < most * 1.05:
            p.text(54, y(mib) + 4, f"{mib} MiB", size=11, anchor="end")
    p.text(60, 288, "0", size=11)
    p.text(660, 288, f"{end / 1e3:.1f} s", size=11, anchor="end")
    p.save("arenas.svg")


def draw_layer(folder, source):
    """The ops of the second layer: forward from its first norm to its combine, backward the other way."""
    ops, _ = events(folder)
    forward = [i for i, o in enumerate(ops) if o[0] == "moe_combine_fwd"]
    back = [i for i, o in enumerate(ops) if o[0] == "moe_down_bwd"]
    parts = (("forward", ops[forward[0] + 1:forward[1] + 1]), ("backward", ops[back[-2]:back[-1]]))
    p = Picture(760, 236, "One layer of the demo, op by op; widths are times", source)
    scale = 690 / max(o[-1][1] + o[-1][2] - o[0][1] for _, o in parts)
    for row, (name, chosen) in enumerate(parts):
        top = 50 + 80 * row
        p.text(16, top + 8, f"{name}, {chosen[-1][1] + chosen[-1][2] - chosen[0][1]:.0f} ms", fill="#667085")
        for op, start, took in chosen:
            left = 40 + (start - chosen[0][1]) * scale
            base = op.split(" ")[0].rsplit("_", 1)[0]
            colour = {"moe_up": BLUE, "moe_down": BLUE, "attn": ORANGE, "linear": GREEN}.get(base, GREY)
            p.box(left, top + 14, max(took * scale, 0.8), 26, colour, "#fff")
            if took * scale > 44:
                p.text(left + took * scale / 2, top + 31, base, size=11, anchor="middle", fill="#fff")
    p.text(40, 206, "thin grey: rmsnorm, rope, router, sort of rows by expert, combine", size=11, fill="#667085")
    p.save("layer.svg")


# ---- plans

UNITS = {"B": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}


def memory_of(plan):
    """Reads the table of a plan: returns {item: GiB in the backward pass} and the GiB of pinned host memory."""
    table = plan[plan.index("  memory  "):plan.index("\n  total ")]
    rows = re.findall(r"^  (\w.*?) {2,}(?:[\d.]+ \w+ +){2}([\d.]+) (\w+)", table, re.M)
    sums = collections.Counter()
    for what, n, unit in rows:
        what = what.replace("page tables of pinned memory", "context and libraries").replace(" embedding,", "")
        sums[what] += float(n) * UNITS[unit]
    host = re.search(r"^  ([\d.]+) (\w+) of pinned host memory", plan, re.M)
    return sums, float(host.group(1)) * UNITS[host.group(2)] if host else 0


def frontier(plan):
    rows = re.findall(r"^>? +([\d.]+) (\w+) +(\d+) % .*?of \d+ layers saved: (.*)$", plan, re.M)
    return [(float(n) * UNITS[u], int(speed), what) for n, u, speed, what in rows]


def draw_offload(free, limited, source):
    p = Picture(760, 330, "gpt-oss-20b, 4 x 2048 tokens: memory in a step without a limit and with 12 GiB", source)
    names = list(memory_of(free)[0])
    most = sum(memory_of(free)[0].values())
    for column, (title, plan) in enumerate((("no limit", free), ("train.memory_gb = 12", limited))):
        rows, host = memory_of(plan)
        left, top = 40 + 190 * column, 280.0
        for what, n in rows.items():
            height = 210 * n / most
            top -= height
            p.box(left, top, 90, height, COLOURS[names.index(what)], "#fff")
        p.text(left + 45, top - 6, f"{sum(rows.values()):.1f} GiB", anchor="middle", weight=600)
        p.text(left + 45, 296, title, anchor="middle", size=11)
        if host:
            height = 210 * host / most
            p.box(left + 120, 280 - height, 90, height, "#fff", "#667085")
            p.text(left + 165, 274 - height, f"{host:.1f} GiB", anchor="middle", weight=600)
            p.text(left + 165, 296, "host memory", anchor="middle")
    for i, what in enumerate(names):
        p.box(500, 70 + 24 * i, 12, 12, COLOURS[i], "#fff")
        p.text(520, 80 + 24 * i, what)
    p.save("offload.svg")


def draw_plan(plan, source):
    rows = frontier(plan)
    p = Picture(760, 360, "gpt-oss-20b, 4 x 2048 tokens: memory against speed", source)
    most = max(r[0] for r in rows)
    x = lambda gib: 60 + 640 * gib / most
    y = lambda speed: 300 - 2.2 * speed
    for gib in range(0, int(most) + 1, 10):
        p.text(x(gib), 318, f"{gib} GiB", size=11, anchor="middle")
        p.path([(x(gib), 80), (x(gib), 300)], "#e6e8ee")
    for speed in range(0, 101, 20):
        p.text(54, y(speed) + 4, f"{speed} %", size=11, anchor="end")
    p.path([(x(g), y(s)) for g, s, _ in rows], BLUE)
    for gib, speed, what in rows:
        p.parts.append(f'<circle cx="{x(gib):.1f}" cy="{y(speed):.1f}" r="3.5" fill="{BLUE}"/>')
        saved = re.search(r"mixer (\d+), network (\d+).*decoded: (\d+)", what)
        host = re.search(r"host memory ([\d.]+ \w+)", what)
        words = [f"{gib:.1f} GiB: {saved.group(1)} mixers, {saved.group(2)} networks saved"]
        words.append(", ".join(([f"{saved.group(3)} layers decoded"] if saved.group(3) != "0" else []) +
                               ([f"{host.group(1)} on the host"] if host else [])))
        last = gib > 0.9 * most
        for i, line in enumerate(w for w in words if w):
            p.text(x(gib) + (-8 if last else 8), y(speed) + (18 if last else 16) + 13 * i, line, size=10,
                   anchor="end" if last else "start") if rows.index((gib, speed, what)) % 2 == 0 or last else None
    p.save("plan.svg")


# ---- the way of the experts' weights

def draw_expert(plan, planner, source):
    table = subprocess.run([planner, "synth"], capture_output=True, text=True, check=False)
    size = re.search(r"^gpt-oss-20b +\d+ +[\d.]+ G +([\d.]+ GiB)", table.stdout + table.stderr, re.M).group(1)
    total = memory_of(plan)[0]["experts"]
    extra = float(re.search(r"decoded to bf16 \(([\d.]+) GiB more\)", plan).group(1))
    p = Picture(760, 250, "An expert's weights, from disk to the product (gpt-oss-20b)", source)
    boxes = ((16, 70, "safetensors on disk", f"whole model {size}", "codes 4 bits, scale per 32"),
             (206, 70, "weights arena", f"experts {total - extra:.1f} GiB packed", "hashed while copied"),
             (396, 30, "decoded layers", f"{extra:.1f} GiB more, once", "where memory is free"),
             (396, 110, "inside the product", "in shared memory", "up to 768 rows an expert"),
             (586, 70, "product", "tensor cores, f32 sums", "adapter in the same sums"))
    for x, y, *words in boxes:
        p.box(x, y + 10, 160, 64)
        for i, line in enumerate(words):
            size, weight = (11, 400) if i else (12, 600)
            p.text(x + 80, y + 30 + 17 * i, line, size=size, anchor="middle", weight=weight)
    p.arrow(176, 112, 206, 112)
    for y in (72, 152):
        p.arrow(366, 112, 396, y)
        p.arrow(556, y, 586, 112)
    p.box(206, 170, 160, 40, "#fff")
    p.text(286, 188, "or pinned host memory,", size=11, anchor="middle")
    p.text(286, 202, "copied one layer ahead", size=11, anchor="middle")
    p.arrow(286, 170, 286, 144)
    p.save("expert.svg")


# ---- the first charts of the demo's report

def draw_report(folder, source):
    page = read(os.path.join(folder, "report.html"))
    style = re.search(r"<style>(.*?)</style>", page, re.S).group(1)
    colours = dict(re.findall(r"--(\w+):([^;}]+)", re.search(r":root\{(.*?)\}", style).group(1)))
    style = "\n".join(rule for rule in style.splitlines() if rule.startswith((".mid", ".line", ".thin", ".c2", ".a{",
                                                                             ".cell", "svg text")))
    inner = r"(?:(?!</?svg).|<svg[^>]*>(?:(?!</svg).)*</svg>)*"
    charts = re.findall(r'<svg viewBox="0 0 1120 (\d+)" role="img">(' + inner + ")</svg>", page, re.S)
    parts, top = [], 56
    titles = ("Loss: steps (faint), smoothed (blue), held out (orange)", "Tokens per expert, by layer")
    for title, (height, chart) in zip(titles, charts):
        parts.append(f'<text x="16" y="{top - 12}" style="font-size:15px;fill:var(--fg)">{title}</text>'
                     f'<g transform="translate(0,{top})">{chart}</g>')
        top += int(height) + 56
    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1136 {top}" font-family="system-ui,sans-serif">'
           f'<style>{style}</style><rect width="1136" height="{top}" style="fill:var(--bg)"/>' + "".join(parts) +
           f'<text x="16" y="{top - 18}">{html.escape(source)}</text></svg>\n')
    with open(os.path.join(HERE, "report.svg"), "w", encoding="utf-8") as f:
        f.write(re.sub(r"var\(--(\w+)\)", lambda name: colours[name.group(1)], svg))


def main():
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    binary, planner, folder = sys.argv[1], sys.argv[2], os.path.abspath(sys.argv[3])
    os.makedirs(folder, exist_ok=True)
    profiled = demo(binary, folder, "profiled", "train.steps=4", "train.profile=3:3")
    trained = demo(binary, folder, "trained")
    config = "configs/gptoss_20b_qlora.ini"
    free = kept(os.path.join(folder, "plan.txt"), [planner, "plan", config, *PLAN])
    limited = kept(os.path.join(folder, "plan12.txt"), [planner, "plan", config, *PLAN, "--set", "train.memory_gb=12"])
    ran, planned = (commit(b, os.path.join(folder, n)) for b, n in ((binary, "binary.txt"), (planner, "planner.txt")))
    run = f"moetrain configs/demo.ini, CPU, two threads, commit {ran}"
    planned = f"moetrain plan --arch gpt-oss-20b --gpu {GPU}, r = 16, commit {planned}: computed, not measured"
    draw_rooms()
    draw_arenas(profiled, run + ", train.profile = 3:3")
    draw_layer(profiled, run + ", train.profile = 3:3")
    draw_offload(free, limited, planned)
    draw_plan(free, planned)
    draw_expert(free, planner, planned)
    draw_report(trained, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())

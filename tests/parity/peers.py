"""peers.py - speed and memory of moetrain and of other trainers, one after the other in one run on one machine: LoRA on
attention and all experts of a model of the gpt-oss family with random weights.

  python peers.py --moetrain build/moetrain [--arch gpt-oss-20b] [--shapes 4x2048,1x1024,4x4096] [--layers 4,8]
                  [--peers moetrain,moetrain-16gb,transformers,axolotl,unsloth-mxfp4,unsloth-4bit,unsloth-bf16]
                  [--limit 60,...] [--first] [--compile 120] [--steps 5] [--rank 16] [--device cuda|cpu] [--work DIR]

moetrain runs all layers (`bench step`). The peers load a checkpoint of `synth` with as many layers as the larger of
--layers, time every shape, drop layers until the smaller is left, and time again: peers_step.py. The checkpoint of
unsloth-mxfp4 has the published MXFP4 layout, which Unsloth keeps packed; that of the others is bf16. A peer has --limit
seconds in all (one number, or one for each of --peers); measurements made by then are used. The table has a row for the
whole model, extrapolated on the straight line through both numbers of layers. A row measured with all layers, or with
only one number of layers, has the measured value.

A peer that cannot be imported or that fails is skipped, and the reason is printed below the table. This script needs no
packages; each peer runs in a process of the Python of --python. Exit 1 when no peer was measured.

Time: importing, loading and compiling take most of a peer's seconds. Without --first, transformers + PEFT tries and
compiles three back ends. --compile first runs all peers at once for so many seconds, one step of each shape, for the
compile caches; measurements follow one after the other as always. Rows are printed as soon as a peer is done. SIGTERM
and Ctrl-C end the peer that runs, print what it measured, and leave out the rest. WORK/PEER.log has a peer's output.

Memory: `allocator` is the peak of the PyTorch allocator, of moetrain the plan; `card` is what the GPU has in use at the
end of the steps by nvidia-smi, with the context and what allocators hold.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
N_LAYER = {"gpt-oss-20b": 24, "gpt-oss-120b": 36, "gpt-oss-tiny": 4}
MOETRAIN = {"moetrain": [], "moetrain-16gb": ["--memory-gb", "16"]}  # options of `bench step`
PEERS = {"transformers": "bf16", "axolotl": "bf16", "unsloth-mxfp4": "mxfp4", "unsloth-4bit": "bf16",
         "unsloth-bf16": "bf16"}  # of peers_step.py: the format of the experts in the checkpoint


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moetrain", required=True)
    parser.add_argument("--arch", choices=N_LAYER, default="gpt-oss-20b")
    parser.add_argument("--shapes", type=shapes, default=shapes("4x2048,1x1024,4x4096"), help="BATCHxSEQ,...")
    parser.add_argument("--layers", type=layers, default=[4, 8], help="one or two even numbers of layers")
    parser.add_argument("--peers", type=peers, default=[*MOETRAIN, *PEERS])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--python", default=sys.executable, help="of the peers")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "moetrain-peers"))
    parser.add_argument("--limit", type=limits, default=[60], help="seconds for each peer")
    parser.add_argument("--first", action="store_true", help="peers use the back ends that were the fastest before")
    parser.add_argument("--compile", type=float, default=0, metavar="SECONDS", help="fill the compile caches before")
    for name, default in dict(steps=5, rank=16).items():
        parser.add_argument("--" + name, type=int, default=default)
    a = parser.parse_args(words)
    a.moetrain, a.work = os.path.abspath(a.moetrain), os.path.abspath(a.work)
    if len(a.limit) == 1:
        a.limit *= len(a.peers)
    if len(a.limit) != len(a.peers):
        parser.error(f"--limit: {len(a.limit)} numbers for {len(a.peers)} peers")
    return a


def limits(text):
    return [float(part) for part in text.split(",")]


def shapes(text):
    """[(batch, seq), ...]"""
    found = [tuple(int(n) for n in part.split("x")) for part in text.split(",")]
    if any(len(shape) != 2 or min(shape) < 1 for shape in found):
        raise argparse.ArgumentTypeError(f"{text}: expected BATCHxSEQ,...")
    return found


def layers(text):
    """Ascending. Even: sliding and full attention alternate."""
    found = sorted({int(n) for n in text.split(",")})
    if not 1 <= len(found) <= 2 or any(n < 2 or n % 2 for n in found):
        raise argparse.ArgumentTypeError(f"{text}: expected one or two even numbers")
    return found


def peers(text):
    found = text.split(",")
    for name in found:
        if name not in (*MOETRAIN, *PEERS):
            raise argparse.ArgumentTypeError(f"{name}: expected some of {', '.join((*MOETRAIN, *PEERS))}")
    return found


class Stopped(Exception):
    """SIGTERM or Ctrl-C: what was measured until now is printed."""


def stop(signum, frame):
    signal.signal(signum, signal.SIG_IGN)
    raise Stopped


def end(process):
    """Ends the group that the process leads."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(command, limit, **options):
    """(exit status, standard output, standard error); the status is None after `limit` seconds, "stopped" after a
    signal. The process leads its own group, which ends with it."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, **options)
        try:
            code = process.wait(timeout=max(limit, 0.1))
        except subprocess.TimeoutExpired:
            code = None
        except Stopped:
            code = "stopped"
        finally:
            end(process)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def why(code, err, limit):
    """One line."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    if code == "stopped":
        return "stopped by a signal"
    return f"stopped after {limit:g} s" if code is None else f"exit {code}: {last[:300]}"


# ---- measurements: {"layers", "shape", "ms", "allocator", "card", "note"}; sizes in bytes, None: not known


def measure_moetrain(a, name, limit):
    """(measurements, problems, whether a signal stopped it)"""
    done, problems, end_at = [], [], time.monotonic() + limit
    for batch, seq in a.shapes:
        left = end_at - time.monotonic()
        command = [a.moetrain, "bench", "step", "--arch", a.arch, "--tokens", str(batch * seq), "--seq", str(seq),
                   "--rank", str(a.rank), "--steps", str(a.steps), "--device", a.device, "--json", *MOETRAIN[name]]
        code, out, err = run(command, left)
        if code != 0:
            problems.append(f"{batch} x {seq}: {why(code, err, limit)}")
            if code == "stopped":
                return done, problems, True
            continue
        b = json.loads(out)
        done.append({"layers": b["layers"], "shape": [batch, seq], "ms": b["step_ms"], "allocator": b["plan_bytes"],
                     "card": b["peak_bytes"], "note": f"experts {b['experts']}"})
    return done, problems, False


def peer_command(a, name, limit):
    """(command, options of the process). Each peer has a separate working directory, since Unsloth writes sources
    there."""
    command = [a.python, os.path.join(HERE, "peers_step.py"), name, checkpoint_of(a, PEERS[name]), "--shapes",
               ",".join("x".join(map(str, shape)) for shape in a.shapes), "--layers", ",".join(map(str, a.layers)),
               "--steps", str(a.steps), "--rank", str(a.rank), "--device", a.device, "--limit", str(limit)]
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false",
                   "UNSLOTH_DISABLE_STATISTICS": "1"}
    os.makedirs(f"{a.work}/{name}", exist_ok=True)
    return command + ["--first"] * a.first, {"cwd": f"{a.work}/{name}", "env": os.environ | environment}


def measure_peer(a, name, limit):
    """(measurements, problems, whether a signal stopped it)"""
    command, options = peer_command(a, name, limit)
    code, out, err = run(command, limit, **options)
    with open(f"{a.work}/{name}.log", "w") as f:
        f.write(out + err)
    done, problems = [], []
    for line in out.splitlines():
        if line.startswith('{"shape"'):
            done.append(json.loads(line))
        if line.startswith('{"problem"'):
            problems.append(json.loads(line)["problem"])
    if code != 0:
        problems.append(why(code, err, limit))
    return done, problems, code == "stopped"


def fill_caches(a):
    """All peers at once for a.compile seconds; what they print is in WORK/PEER.compile.log."""
    start, processes = time.monotonic(), {}
    try:
        for name in (name for name in a.peers if name in PEERS):
            command, options = peer_command(a, name, a.compile)
            with open(f"{a.work}/{name}.compile.log", "w") as log:
                processes[name] = subprocess.Popen(command + ["--compile"], stdout=log, stderr=log,
                                                   start_new_session=True, **options)
        for name, process in processes.items():
            try:
                code = process.wait(timeout=max(0.1, start + a.compile - time.monotonic()))
                print(f"{name}: compiled, exit {code}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            except subprocess.TimeoutExpired:
                print(f"{name}: still compiling after {a.compile:g} s", file=sys.stderr, flush=True)
    finally:
        for process in processes.values():
            end(process)


def checkpoint_of(a, quant):
    """Unsloth keeps the experts packed only in a folder that is named like the published model."""
    return f"{a.work}/{quant}-{a.layers[-1]}/{a.arch}"


def make_checkpoints(a):
    """Writes checkpoints with the larger number of layers to WORK, one for each format of the peers; a later run reuses
    them."""
    for quant in sorted({PEERS[name] for name in a.peers if name in PEERS}):
        path = checkpoint_of(a, quant)
        if os.path.exists(path):
            continue
        print(f"writing {path}", file=sys.stderr, flush=True)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        subprocess.run([a.moetrain, "synth", a.arch, path, "--quant", quant, "--layers", str(a.layers[-1])],
                       check=True, stdout=subprocess.DEVNULL)


# ---- the table


def line_through(points, n):
    """The value at n layers of the straight line through [(layers, value), ...], of which there are one or two."""
    if len(points) == 1:
        return points[0][1] if points[0][0] == n else None
    (n0, v0), (n1, v1) = points
    return v0 + (v1 - v0) * (n - n0) / (n1 - n0)


def whole_model(done, shape, n_layer):
    """(ms, allocator, card, method) of all layers; None if the measurements do not suffice."""
    found = {m["layers"]: m for m in done if m["shape"] == list(shape)}
    if n_layer in found:
        m = found[n_layer]
        return m["ms"], m["allocator"], m["card"], f"{n_layer} layers"
    if len(found) < 2:
        return None
    ends = [found[min(found)], found[max(found)]]
    values = []
    for key in ("ms", "allocator", "card"):
        points = [(m["layers"], m[key]) for m in ends]
        values.append(line_through(points, n_layer) if all(p[1] is not None for p in points) else None)
    slope = (ends[1]["ms"] - ends[0]["ms"]) / (ends[1]["layers"] - ends[0]["layers"])
    how = f"{ends[0]['layers']} and {ends[1]['layers']} layers, {slope:.2f} ms a layer"
    return *values, how


def gib(n):
    return "" if n is None else f"{n / 2**30:.1f} GiB"


HEADER = """\
| trainer | tokens per step | tokens/s | step | allocator | card | measured | with |
|---|---|---|---|---|---|---|---|"""


def rows(name, done, wanted, n_layer):
    for shape in wanted:
        note = next((m["note"] for m in done if m["shape"] == list(shape)), "")
        whole = whole_model(done, shape, n_layer)
        if whole:
            ms, allocator, card, how = whole
            rate = f"{1e3 * shape[0] * shape[1] / ms:,.0f}" if ms > 0 else ""
            yield (f"| {name} | {shape[0]} x {shape[1]} | {rate} | {ms:.1f} ms | {gib(allocator)} | {gib(card)} | "
                   f"{how} | {note} |")
            continue
        for m in done:
            if m["shape"] == list(shape):
                yield (f"| {name}, {m['layers']} layers alone | {shape[0]} x {shape[1]} | | {m['ms']:.1f} ms | "
                       f"{gib(m['allocator'])} | {gib(m['card'])} | {m['layers']} layers | {note} |")


def measure(a, n_layer):
    """Prints the rows of each trainer as soon as it is done. Returns [(name, problem), ...] and the number of
    measurements."""
    problems, n_done = [], 0
    for name, limit in zip(a.peers, a.limit):
        start = time.monotonic()
        done, found, stopped = (measure_moetrain if name in MOETRAIN else measure_peer)(a, name, limit)
        problems += [(name, problem) for problem in found]
        n_done += len(done)
        print("".join(row + "\n" for row in rows(name, done, a.shapes, n_layer)), end="", flush=True)
        print(f"{name}: {len(done)} measurements in {time.monotonic() - start:.0f} s"
              + "".join(f"; {p}" for p in found), file=sys.stderr, flush=True)
        if stopped:
            break
    return problems, n_done


def main():
    a = arguments()
    os.makedirs(a.work, exist_ok=True)
    n_layer = N_LAYER[a.arch]
    if a.layers[-1] > n_layer:
        sys.exit(f"--layers {a.layers[-1]}: {a.arch} has {n_layer}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        make_checkpoints(a)
        if a.compile:
            fill_caches(a)
        print(f"{a.arch}, {n_layer} layers, LoRA r = {a.rank} on attention and all experts, random weights and tokens, "
              f"median of {a.steps} steps. A row with two numbers of layers lies on the straight line through both.\n")
        print(HEADER, flush=True)
        problems, n_done = measure(a, n_layer)
    except Stopped:
        sys.exit("stopped by a signal before the next measurement")
    for name, problem in problems:
        print(f"\n- {name}: {problem}", end="")
    print()
    sys.exit(0 if n_done else 1)


if __name__ == "__main__":
    main()

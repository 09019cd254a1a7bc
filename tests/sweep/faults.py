"""faults.py - makes each file call of a command fail once, fail from there on, or kill the process.

After each fault the run warns and continues, or ends with one error. All files with final names are complete. The same
command without faults then gives the bytes of an undisturbed run and leaves no other files."""
import errno
import filecmp
import os
import re
import shutil
import zlib

from runner import finite_metrics

ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES]
CANNOT = 77


def tree(folder, skip=()):
    found = []
    for at, _, names in os.walk(folder):
        rel = os.path.relpath(at, folder)
        found += [os.path.normpath(os.path.join(rel, n)) for n in names]
    return sorted(f for f in found if not any(re.search(p, f) for p in skip))


def different(a, b, skip=()):
    """The first difference between two folders, or None. Model cards hold the date of a run."""
    names, others = tree(a, skip), tree(b, skip)
    if names != others:
        return f"files {sorted(set(names) ^ set(others))[:4]}"
    for n in names:
        same = os.path.basename(n) == "README.md" or filecmp.cmp(os.path.join(a, n), os.path.join(b, n), shallow=False)
        if not same:
            return f"bytes of {n}"
    return None


def broken_checkpoint(folder):
    """What is wrong with a checkpoint compared with its manifest, or None."""
    for step in os.listdir(folder) if os.path.isdir(folder) else ():
        if step.startswith("."):
            continue
        try:
            with open(os.path.join(folder, step, "manifest.json")) as f:
                rows = re.findall(r'"(.*)": \{"size": (\d+), "crc32": "([0-9a-f]{8})"\}', f.read())
            for name, size, crc in rows:
                with open(os.path.join(folder, step, name), "rb") as f:
                    data = f.read()
                if len(data) != int(size) or zlib.crc32(data) != int(crc, 16):
                    return f"{step}: {name} is damaged"
            if len(rows) != 4:
                return f"{step}: {len(rows)} files"
        except OSError as e:
            return f"{step}: {e}"
    return None


class Scenario:
    """A command, the files it needs in its folder, and its output folder."""
    def __init__(self, name, words, out, copies=()):
        self.name, self.words, self.out, self.copies = name, words, out, copies

    def fresh(self, folder):
        for source in self.copies:
            to = os.path.join(folder, os.path.basename(source))
            if not os.path.exists(to):
                (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, to)

    def whole(self, folder, reference):
        """What is wrong with the output after a fault, or None: the output is complete or absent."""
        out = os.path.join(folder, self.out)
        return different(out, reference) if os.path.exists(out) else None

    def done(self, folder, reference):
        missing = None if os.path.exists(os.path.join(folder, self.out)) else "no result"
        return self.whole(folder, reference) or missing

    def finished(self, folder):
        """Whether the output exists; then the command refuses to write it again."""
        return os.path.exists(os.path.join(folder, self.out))

    def leftovers(self, folder, reference_folder):
        return different_names(folder, reference_folder, ())


class Training(Scenario):
    # Files that a run with a fault may have and the undisturbed run has not: an event file per start, checkpoints that
    # could not be deleted, archives of stopped runs.
    TIMES = (r"^out/tensorboard/", r"^out/checkpoints/step-", r"^out/archive-")
    # Missing if the run could not write its cache of packed weights but finished: the second run loads no weights.
    CACHE = "bf16/moetrain-cache/nf4.safetensors"

    def whole(self, folder, reference):
        out = os.path.join(folder, self.out)
        if wrong := broken_checkpoint(os.path.join(out, "checkpoints")):
            return wrong
        adapter = os.path.join(out, "adapter")
        return different(adapter, os.path.join(reference, "adapter")) if os.path.exists(adapter) else None

    def done(self, folder, reference):
        out = os.path.join(folder, self.out)
        if wrong := broken_checkpoint(os.path.join(out, "checkpoints")):
            return wrong
        for part in ("adapter", "best", "checkpoints/step-000003/adapter"):
            if wrong := different(os.path.join(out, part), os.path.join(reference, part)):
                return f"{part}: {wrong}"
        return None if finite_metrics(os.path.join(out, "metrics.jsonl")) else "a loss is not finite"

    def finished(self, folder):
        return False

    def leftovers(self, folder, reference_folder):
        skip = self.TIMES if os.path.exists(os.path.join(folder, self.CACHE)) else (*self.TIMES, f"^{self.CACHE}$")
        return different_names(folder, reference_folder, skip)


class Page(Scenario):
    """A command that replaces one file, the page of `compare`."""
    def whole(self, folder, reference):
        out = os.path.join(folder, self.out)
        return "the page differs" if os.path.exists(out) and not filecmp.cmp(out, reference, shallow=False) else None

    def finished(self, folder):
        return False


def different_names(folder, reference_folder, skip):
    a, b = tree(folder, skip), tree(reference_folder, skip)
    return None if a == b else f"files {sorted(set(a) ^ set(b))[:4]}"


def scenarios(s):
    s.synth("gpt-oss-tiny", "model")
    s.synth("qwen3-tiny", "bf16")
    rows = s.write_rows(n=6)
    sections = {
        "data": {"train": rows, "eval_split": "0.3", "seq_len": "32"},
        "lora": {"r": "2", "targets": "q_proj,experts"},
        "optim": {"lr": "1e-3"},
        "train": {"device": "cpu", "threads": "1", "steps": "3", "memory_gb": "1"},
        "eval": {"every": "1", "max_batches": "1"},
        "output": {"dir": "out", "save_every": "1", "keep": "1"},
        "log": {"tensorboard": "true"},
    }
    train = s.write_config("train.ini", model={"path": s.path("model")}, **sections)
    pack = s.write_config("pack.ini", model={"path": "bf16", "quantize": "nf4"}, **sections)
    r = s.run(["train.ini", "--set", "output.dir=run"], s.root)
    if r.code:
        raise RuntimeError(r.err)
    adapter, run = s.path("run", "adapter"), s.path("run")
    yield Training("train", [train], "out")
    yield Training("quantize", [pack], "out", [s.path("bf16")])
    for form in ("peft", "vllm", "gguf", "merged-mxfp4"):
        yield Scenario(f"export {form}", ["export", train, "--to", form, "--adapter", adapter, "--out", "made"], "made")
    yield Scenario("synth", ["synth", "gpt-oss-tiny", "made", "--layers", "1"], "made")
    yield Page("compare", ["compare", run, run, "--html", "page.html"], "page.html")


def sweep(s):
    fault = os.path.join(os.path.dirname(s.binary), "moetrain_fault")
    cases, references = [], {}
    for sc in scenarios(s):
        folder = s.path("reference " + sc.name)
        os.makedirs(folder)
        sc.fresh(folder)
        log = s.path("count")
        r = s.run(sc.words, folder, before=[fault, log, "0", "0"])
        if r.code == CANNOT:
            print(f"skip: {r.err.decode().strip()}: no faults", flush=True)
            return 0
        if r.code:
            raise RuntimeError(r.err)
        references[sc.name] = folder
        with open(log) as f:
            calls = int(re.search(r"calls (\d+)", f.read()).group(1))
        print(f"faults: {sc.name}: {calls} calls", flush=True)
        cases += [(mode, n, sc) for n in range(1, calls + 1) for mode in ("fail", "fail-on", "kill")]

    def do(case, folder):
        mode, n, sc = case
        log = s.path(os.path.basename(folder) + ".log")
        reference = os.path.join(references[sc.name], sc.out)
        sc.fresh(folder)
        how = "kill" if mode == "kill" else str(errno.EIO if mode == "fail-on" else ERRORS[n % len(ERRORS)])
        r = s.run(sc.words, folder, before=[fault, log, f"{n}+" if mode == "fail-on" else str(n), how])
        with open(log) as f:
            chosen = (f.readline().strip() + " ?").split(" ", 2)[2].replace(folder, "")
        os.remove(log)
        killed = mode == "kill" and r.code == 137
        wrong = None if killed else s.judge(r, codes=(0, 1))
        wrong = wrong or sc.whole(folder, reference)
        if not wrong and r.code == 0:
            wrong = sc.done(folder, reference)
            if wrong:
                wrong = "success was told, but: " + wrong
        name = f"{sc.name}: {mode} at call {n} ({chosen})"
        s.add(name, r, wrong)
        if wrong or sc.finished(folder):
            return
        r = s.run(sc.words, folder)
        wrong = s.judge(r, codes=(0,)) or sc.done(folder, reference) or sc.leftovers(folder, references[sc.name])
        s.add(name + ", then again", r, wrong)

    return s.all(cases, do)

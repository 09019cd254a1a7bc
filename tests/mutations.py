#!/usr/bin/env python3
"""mutations.py - changes the code in one place at a time; the tests that mutation_list.py names must then fail.

    python3 tests/mutations.py BUILD_DIR all               every mutation
    python3 tests/mutations.py BUILD_DIR turn              the few of this commit, for CI
    python3 tests/mutations.py BUILD_DIR data/loader.c     those whose file or old text contains the words
    python3 tests/mutations.py stale                       none: only checks the old texts, as lint does

BUILD_DIR is a finished build of this tree with Ninja. A mutation is a changed copy of one file in a scratch directory:
it is compiled there with the build's own command and linked there before the build's libraries. Neither the tree nor
the build changes. A mutation fails when it does not compile or when its tests pass (it survives); the same tests must
pass without it. The old text of every mutation must be in its file exactly once, whichever run."""
import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mutation_list import MUTATIONS  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PER_TURN = 6
SECONDS = 120  # limit of one run of tests: an endless loop is a failure too
ENV = dict(os.environ, OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="1")


class Build:
    def __init__(self, folder):
        self.folder = os.path.abspath(folder)
        if not os.path.exists(os.path.join(self.folder, "build.ninja")):
            sys.exit(f"mutations.py: {folder}: no build with Ninja: bash configs/setup.sh {folder}")
        lines = subprocess.run(["ninja", "-C", self.folder, "-t", "commands", "moetrain_test"], check=True, text=True,
                               capture_output=True).stdout.splitlines()
        self.lines = [line for line in lines if " -o " in line]

    def compile(self, file, scratch):
        """Compiles the changed copy of the file as the build does, once per object; for a header, every C file that
        includes it. Returns the objects."""
        objects, header = [], file.endswith(".h")
        for line in self.lines:
            words = shlex.split(line)
            path = os.path.relpath(words[-1], ROOT)
            if "-c" not in words or path != file and not (header and path.endswith(".c") and includes(path, file)):
                continue
            objects.append(os.path.join(scratch, f"{len(objects)}.o"))
            if header:
                words[next(i for i, w in enumerate(words) if w.startswith("-I")):0] = ["-I" + scratch]
            else:
                words[-1] = os.path.join(scratch, file)
            words[words.index("-o") + 1] = objects[-1]
            if "-MF" in words:
                words[words.index("-MF") + 1] = objects[-1] + ".d"
            self.do([w for w in words if w != "-Werror"] + ["-w"])
        if not objects:
            raise ValueError("the build does not compile this file")
        return objects

    def link(self, program, objects, scratch):
        """Links a program of the build. The objects come first, so that the linker takes them instead of those in the
        libraries."""
        out = os.path.join(scratch, program)
        line = next(t for t in self.lines if re.search(rf" -o {program} ", t))
        line = line.replace(f" -o {program} ", " -o " + shlex.join([out, *objects]) + " ")
        self.do(["sh", "-c", line])
        return out

    def do(self, words):
        r = subprocess.run(words, cwd=self.folder, capture_output=True, text=True)
        if r.returncode:
            raise ValueError((r.stderr or r.stdout).strip()[:600])


def tests_pass(folder, tests):
    """Whether all the tests pass: words GROUP or GROUP:PATTERN."""
    for word in tests.split():
        group, _, pattern = word.partition(":")
        only = ["--only", pattern] if pattern else []
        try:
            r = subprocess.run([f"{folder}/moetrain_test", "--fixtures", f"{ROOT}/tests/fixtures", "--binary",
                                f"{folder}/moetrain", *only, group],
                               env=ENV, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False
        if r.returncode:
            return False
    return True


def source(file):
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        return f.read()


def includes(file, header):
    return f'#include "{header}"' in source(file)


def outcome(build, mutation, scratch, passes):
    """What is wrong with the mutation, or None."""
    file, old, new, tests = mutation
    copy = os.path.join(scratch, file)
    os.makedirs(os.path.dirname(copy))
    with open(copy, "w", encoding="utf-8") as f:
        f.write(source(file).replace(old, new))
    try:
        objects = build.compile(file, scratch)
        for program in ("moetrain", "moetrain_test"):
            build.link(program, objects, scratch)
    except ValueError as e:
        return f"not compiled: {e}"
    if tests_pass(scratch, tests):
        return f"survives: {tests} passes"
    return None if passes(tests) else f"{tests} fails without the mutation too"


def stale():
    """The number of mutations whose old text is not in the file once."""
    counts = [(m[0], m[1], source(m[0]).count(m[1]) if os.path.exists(os.path.join(ROOT, m[0])) else 0)
              for m in MUTATIONS]
    for file, old, n in counts:
        if n != 1:
            print(f"FAIL {file}: the old text {old!r} is there {n} times: change mutation_list.py with the code")
    return sum(n != 1 for _, _, n in counts)


def chosen(words):
    if words == ["all"]:
        return MUTATIONS
    if words == ["turn"]:
        commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        turns = -(-len(MUTATIONS) // PER_TURN)
        return MUTATIONS[int(commit or "0", 16) % turns::turns]
    return [m for m in MUTATIONS if any(w in m[0] or w in m[1] for w in words)]


def main():
    p = argparse.ArgumentParser(description="changes the code in one place at a time; tests must then fail")
    p.add_argument("build", metavar="BUILD_DIR|stale")
    p.add_argument("which", nargs="*", metavar="all|turn|WORDS")
    p.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="mutations at a time")
    args = p.parse_args()
    if stale() or not (args.which or args.build == "stale"):
        return 1
    if args.build == "stale":
        return 0
    build, todo, root = Build(args.build), chosen(args.which), tempfile.mkdtemp(prefix="mutations-")
    passes = lru_cache(lambda tests: tests_pass(build.folder, tests))

    def one(item):
        i, mutation = item
        scratch, started = os.path.join(root, str(i)), time.monotonic()
        os.mkdir(scratch)
        wrong = outcome(build, mutation, scratch, passes)
        shutil.rmtree(scratch)
        print(f"{'FAIL' if wrong else 'ok'} {mutation[0]}: {mutation[2]!r:.70} ({mutation[3]}, "
              f"{time.monotonic() - started:.1f} s){': ' + wrong if wrong else ''}", flush=True)
        return bool(wrong)

    try:
        with ThreadPoolExecutor(args.jobs) as pool:
            failed = sum(pool.map(one, enumerate(todo)))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"mutations: {len(todo)} of {len(MUTATIONS)}, failed: {failed}")
    return 1 if failed or not todo else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""coverage.py - lines that ran, by room, from a build with -DMOETRAIN_COVERAGE=ON whose tests have run.

    python3 tests/coverage.py BUILD_DIR

A line counts once, also when it is compiled for several types. Lines that ran only in a process that a signal ended are
missing: such a process writes no counts. Exit status 1: no counts at all, or gcov fails.
"""
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict

ROOMS = ("data", "kernels", "model", "optim", "train")


def main(build):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    notes, n_counts = [], 0
    for folder, _, names in os.walk(os.path.abspath(build)):
        notes += [os.path.join(folder, n) for n in names if n.endswith(".gcno")]
        n_counts += sum(n.endswith(".gcda") for n in names)
    if not n_counts:
        sys.exit(f"coverage.py: {build} has no counts: build it with -DMOETRAIN_COVERAGE=ON and run its tests")
    ran = defaultdict(dict)  # file -> line -> did it run
    with tempfile.TemporaryDirectory() as out:
        gcov = subprocess.run(["gcov", "--json-format", "--hash-filenames", *notes], cwd=out, capture_output=True,
                              text=True)
        if gcov.returncode:
            sys.exit(f"coverage.py: gcov failed: {gcov.stderr.strip()}")
        for name in os.listdir(out):
            with gzip.open(os.path.join(out, name)) as f:
                report = json.load(f)
            for source in report["files"]:
                path = os.path.join(report["current_working_directory"], source["file"])
                path = os.path.relpath(path, root)
                if path.split(os.sep)[0] not in ROOMS:
                    continue
                for line in source["lines"]:
                    number = line["line_number"]
                    ran[path][number] = ran[path].get(number, False) or line["count"] > 0
    rooms = defaultdict(lambda: [0, 0])
    for path, lines in ran.items():
        for room in (os.path.dirname(path), "all"):
            rooms[room][0] += sum(lines.values())
            rooms[room][1] += len(lines)
    print(f"{'lines that ran':22}{'ran':>8}{'of':>8}{'%':>7}")
    for room in sorted(rooms, key=lambda r: (r == "all", r)):
        some, every = rooms[room]
        print(f"{room:22}{some:8}{every:8}{100 * some / every:7.1f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])

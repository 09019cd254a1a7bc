#!/usr/bin/env python3
"""sweep.py - every option at extreme values, every file call failing, and hostile files; see README.md.

    python3 tests/sweep/sweep.py build/moetrain                      all three, complete
    python3 tests/sweep/sweep.py build/moetrain options --every 100  each 100th case of one
"""
import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import faults  # noqa: E402
import files  # noqa: E402
import options  # noqa: E402
from runner import Sweep  # noqa: E402

SWEEPS = {"options": options.sweep, "faults": faults.sweep, "files": files.sweep}


def arguments():
    p = argparse.ArgumentParser(description="sweeps of extreme options, failing calls and hostile files")
    p.add_argument("binary")
    p.add_argument("sweeps", nargs="*", metavar="options|faults|files", help="default: all")
    p.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th case")
    p.add_argument("--first", type=int, default=0, metavar="N", help="start at case N; continues an interrupted sweep")
    p.add_argument("--only", metavar="TEXT", help="only cases whose name contains TEXT")
    p.add_argument("--jobs", type=int, default=2, help="runs at a time")
    p.add_argument("--timeout", type=float, default=60, help="seconds of one run")
    p.add_argument("--scratch", metavar="DIR", help="where the runs write; default: the system's temporary directory")
    p.add_argument("--keep", action="store_true", help="keep what the runs wrote")
    p.add_argument("--leaks", type=int, default=0, choices=(0, 1), help="1: LeakSanitizer too")
    args = p.parse_args()
    if bad := [s for s in args.sweeps if s not in SWEEPS]:
        p.error(f"no such sweep: {bad[0]}")
    return args


def main():
    args = arguments()
    failed = 0
    for name in args.sweeps or SWEEPS:
        s = Sweep(args, name)
        failed += SWEEPS[name](s)
        s.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

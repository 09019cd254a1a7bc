#!/usr/bin/env python3
"""turns.py - which tests of ctest run at a commit of CI, where not all of them fit into its time.

    python3 tests/turns.py BUILD_DIR sanitized|plain N
    python3 tests/turns.py sanitizer N

N is the number of commits. The first form prints the tests that run, as a regular expression of `ctest -R`, and the
names of the others. The longest tests, most of them in the emulator, run at every sixth commit, all others at each: at
two of three commits a fifth of the groups, another one for each N, with AddressSanitizer and UBSan, the rest without.
At each third commit ThreadSanitizer takes their place; the second form prints which it is: address or thread."""
import json
import re
import subprocess
import sys

# Tests that run without sanitizers. matrix, configs, plan_advice and the comparisons with PyTorch repeat what other
# groups run under sanitizers, with more or larger cases. Of the groups of single ops, ops_kl runs, and qat runs the op
# of fakequant.
PLAIN = re.compile(
    r"ops_(?!kl).*|fakequant|parity|qat_parity|matrix|configs|plan_advice"
    r"|lint|results|ci|setup|symbols|package|emulat.*")
SHARE = 5  # no multiple of 3: at each third commit ThreadSanitizer is in turn
LONGEST = [  # each at every sixth commit
    "emulated_hopper_ops_moe", "emulated_turn_ops_moe", "emulated_turn_ops_dense",
    "emulated_turn_ops_delta", "emulated_turn_ops_attn", "emulated_turn_ops_experts",
    "emulated_turn_ops_kl", "emulated_hopper_ops_shared_attn", "emulated_hopper_ops_hyper",
    "emulated_hopper_ops_branch", "emulated_hopper_ops_entries", "emulated_hopper_ops_prefix",
    "emulated_hopper_ops_preference", "emulated_hopper_ops_decode",
    "plan_advice", "matrix", "configs", "package"]
LONGEST_SHARE = 6


def cost(test):
    return next((float(p["value"]) for p in test.get("properties", []) if p["name"] == "COST"), 0.0)


def sanitizer(number):
    return "address" if number % 3 else "thread"


def chosen(tests, kind, number):
    """The names of the tests that run, of those that ctest describes."""
    names = [t["name"] for t in sorted(tests, key=lambda t: (-cost(t), t["name"]))]
    groups = [n for n in names if not PLAIN.fullmatch(n)]
    sanitized = {n for i, n in enumerate(groups) if (i + number) % SHARE == 0 and sanitizer(number) == "address"}
    if kind == "sanitized":
        return sanitized
    wait = {n for i, n in enumerate(LONGEST) if (i + number) % LONGEST_SHARE}
    return set(names) - sanitized - wait


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "sanitizer" and sys.argv[2].isdecimal():
        print(sanitizer(int(sys.argv[2])))
        return
    if len(sys.argv) != 4 or sys.argv[2] not in ("sanitized", "plain") or not sys.argv[3].isdecimal():
        sys.exit(__doc__)
    shown = subprocess.run(["ctest", "--test-dir", sys.argv[1], "--show-only=json-v1"], check=True, capture_output=True)
    tests = json.loads(shown.stdout)["tests"]
    run = chosen(tests, sys.argv[2], int(sys.argv[3]))
    print(f"^({'|'.join(sorted(run))})$")
    print(*sorted({t["name"] for t in tests} - run))


if __name__ == "__main__":
    main()

"""turns_program.py MODE [N] - an environment for tests: an episode ends at the third turn, or at a turn with an "e"
(three: only at the third); each turn is worth its length / 10. At request N it does what MODE says instead."""
import json
import os
import sys
import time

mode, n = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
out = os.fdopen(1, "wb", buffering=0)
turns, count = {}, 0


def odd(r):
    """False: it goes on as usual."""
    if mode == "exit":
        sys.exit(3)
    if mode == "hang":
        time.sleep(100)
    if mode == "deaf":
        os.close(0)
        time.sleep(100)
    lines = {"garbage": b"thinking about it ...\n",
             "utf8": b'{"id": %d, "messages": [{"role": "user", "content": "\xff"}]}\n',
             "id": b'{"id": 99%d, "messages": []}\n', "role": b'{"id": %d, "messages": [{"role": "user"}]}\n',
             "long": b'{"id": %d, "messages": [{"role": "user", "content": "' + b"word " * 200000 + b'"}]}\n'}
    if mode not in lines:
        return False
    line = lines[mode]
    out.write(line % r["id"] if b"%d" in line else line)
    return True


for line in sys.stdin:
    r = json.loads(line)
    count += 1
    if r["op"] == "close":
        turns.pop(r["id"])
        continue
    if (count >= n if mode in ("exit", "long") else count == n) and n and odd(r):
        if r["op"] == "reset":
            turns[r["id"]] = 0
        continue
    reply = {"id": r["id"], "messages": [{"role": "user", "content": "more"}]}
    if r["op"] == "reset":
        turns[r["id"]] = 0
        if mode != "reset":
            reply["messages"] = []
        elif r["columns"]["n"] % 2:  # some samples of a prompt begin alike, others do not
            reply["messages"][0]["content"] = str(r["id"] % 2)
    else:
        turns[r["id"]] += 1
        if mode != "endless" and (turns[r["id"]] == 3 or ("e" in r["text"] and mode != "three")):
            reply["done"] = True
            del turns[r["id"]]
        reply["reward"] = len(r["text"]) / 10
    out.write(json.dumps(reply).encode() + b"\n")

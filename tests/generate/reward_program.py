"""reward_program.py MODE [N] - a reward for tests: the length of the completion, or what MODE does instead."""
import json
import os
import sys
import time

mode, n = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
rows, count = [], 0


def write(text):
    os.write(1, text.encode() if isinstance(text, str) else text)


def answer(row, reward=None, **more):
    write(json.dumps({"id": row["id"], "reward": len(row["completion"]) if reward is None else reward, **more}) + "\n")


if mode == "crash":
    sys.exit("no module named x")
for line in sys.stdin:
    row = json.loads(line)
    if "end" in row:
        if mode in ("reverse", "once"):
            for r in reversed(rows):
                answer(r)
        if mode == "once":
            sys.exit(0)
        if mode == "twice":
            time.sleep(0.1)
            answer(rows[0])
        rows = []
        continue
    assert list(row) == ["id", "step", "prompt", "completion", "completion_ids", "finish_reason", "columns"], row
    count += 1
    rows.append(row)
    if mode in ("reverse", "once"):
        continue
    last = count == n
    if mode == "hang" and last:
        time.sleep(100)
    elif mode == "child" and last:  # a process of its group outlives it and holds its pipes
        if not os.fork():
            with open(sys.argv[3], "w") as f:
                f.write(str(os.getpid()))
            time.sleep(100)
        time.sleep(0.2)
        sys.exit(3)
    elif mode == "exit" and last:
        sys.stderr.write("bye\nlast words")
        sys.exit(3)
    elif mode == "kill" and last:
        os.kill(os.getpid(), 9)
    elif mode == "half" and last:
        write('{"id": 3, "rew')
        sys.exit(0)
    elif mode == "bytes":
        for b in json.dumps({"reward": 0.25, "id": row["id"]}).encode() + b"\r\n\n":
            write(bytes([b]))
    elif mode == "say" and last:
        write(sys.argv[3].replace("ID", str(row["id"])) + "\n")
    elif mode == "null" and last:
        write('{"id": %d, "reward": null}\n' % row["id"])
    elif mode == "metrics":
        answer(row, metrics={"double": 2 * len(row["completion"]), "none": None})
    elif mode == "columns":
        answer(row, reward=row["columns"]["x"]["y"][1] + len(row["prompt"]) + len(row["completion_ids"]) + row["step"])
    elif mode == "long":
        write('{"id": 0, "reward": 1, "x": "' + "x" * (17 << 20))
    elif mode == "noisy":
        sys.stderr.write("\n" * 100000 * (count == 1))  # more than a pipe holds
        answer(row)
    elif mode == "meet" and last:  # needs another program that runs meanwhile
        open(sys.argv[3], "w").close()
        while not os.path.exists(sys.argv[4]):
            time.sleep(0.01)
        answer(row)
    elif mode == "deaf" and last:  # answers, but reads nothing more for a while
        answer(row)
        time.sleep(0.3)
    else:
        answer(row)
if mode == "stay":
    time.sleep(100)

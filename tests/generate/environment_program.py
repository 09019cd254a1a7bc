"""environment_program.py MODE [N] - an environment for tests: it echoes turns, and ends an episode at the third
turn, with the reward 3. MODE says what it does instead, most modes at request N only."""
import json
import sys
import time

mode, n = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
turns, held, count = {}, [], 0
for line in sys.stdin:
    r = json.loads(line)
    count += 1
    if mode == "hang" and count == n:
        time.sleep(100)
    if mode == "exit" and count == n:
        sys.exit(2)
    if r["op"] == "close":
        del turns[r["id"]]
        print(f"closed {r['id']}", file=sys.stderr, flush=True)
        continue
    if r["op"] == "reset":
        assert list(r) == ["op", "id", "columns"], r
        turns[r["id"]] = 0
        out = {"id": r["id"], "messages": [{"role": "user", "content": r["columns"]["task"]}],
               "tools": [{"type": "function", "function": {"name": "f"}}]}
    else:
        assert list(r) == ["op", "id", "message", "text"] and r["message"]["role"] == "assistant", r
        turns[r["id"]] += 1
        done = turns[r["id"]] == 3
        out = {"id": r["id"], "messages": [{"role": "tool", "content": r["text"]}], "done": done,
               "reward": 3 if done else None}
    if mode == "say" and count == n:
        print(sys.argv[3].replace("ID", str(r["id"])), flush=True)
        continue
    held.append(out)
    if mode != "two" or len(held) == 2:  # two replies in reverse
        for reply in reversed(held):
            print(json.dumps(reply), flush=True)
        held = []
    if out.get("done"):
        del turns[out["id"]]

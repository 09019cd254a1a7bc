"""peft_reload.py - checks that PEFT reads an adapter of moetrain correctly. Loads checkpoint and adapter with
transformers + PEFT, recomputes the loss of the held-out `text` rows, and compares it with the last evaluation of the
run.

  python peft_reload.py CHECKPOINT RUN ROWS.jsonl --seq-len N      RUN: the run's output.dir (adapter/, metrics.jsonl)

Exit 1 when the two differ by more than 1e-4 relative, or when the adapter changes nothing.
"""
import argparse
import json
import os
import sys

from peft import PeftModel, __version__ as peft_version

import peer

TOLERANCE = 1e-4


def last_evaluation(run):
    with open(os.path.join(run, "metrics.jsonl")) as f:
        events = [json.loads(line) for line in f]
    return [e for e in events if e["event"] == "eval"][-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("run")
    parser.add_argument("rows")
    parser.add_argument("--seq-len", type=int, required=True)
    a = parser.parse_args()

    ours = last_evaluation(a.run)["loss"]
    tokenizer = peer.load_tokenizer(a.checkpoint)
    documents = [peer.encode(tokenizer, row, a.seq_len) for row in peer.read_rows(a.rows)]
    model = peer.load_model(a.checkpoint)
    base = peer.held_out_loss(model, documents)
    model = PeftModel.from_pretrained(model, os.path.join(a.run, "adapter"))
    theirs = peer.held_out_loss(model, documents)

    difference = abs(ours - theirs) / theirs
    print(f"held-out loss over {sum(len(d) - 1 for d in documents)} tokens, PEFT {peft_version}")
    print(f"  base model, transformers     {base:.8f}")
    print(f"  adapter, transformers + PEFT {theirs:.8f}")
    print(f"  adapter, moetrain            {ours:.8f}   difference {difference:.1e}, allowed {TOLERANCE:.0e}")
    if base == theirs:
        sys.exit("the adapter changes nothing: PEFT loaded none of it")
    if not difference <= TOLERANCE:
        sys.exit("the two do not agree")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""log_wandb.py - sends metrics.jsonl to Weights & Biases: log.command = python3 configs/log_wandb.py

Needs `pip install wandb`. WANDB_PROJECT (default moetrain), WANDB_API_KEY, WANDB_MODE and the other variables of wandb
apply. OUTPUT_DIR/wandb_run has the id of the run, so that a continued run adds to it.
"""
import json
import os
import secrets
import sys

import wandb

GROUPS = {"step": "train", "eval": "eval", "rollouts": "rollouts"}  # events and the first part of their names


def run_id():
    """Returns the id of the earlier run in this directory, or makes a new id and stores it for later runs."""
    path = os.path.join(os.environ["MOETRAIN_OUTPUT_DIR"], "wandb_run")
    if os.environ["MOETRAIN_RESUMED"] == "1" and os.path.exists(path):
        with open(path) as f:
            return f.read().strip()
    new = secrets.token_hex(8)
    with open(path + ".tmp", "w") as f:
        f.write(new + "\n")
    os.replace(path + ".tmp", path)
    return new


def values(event):
    """All numbers of an event; null is not one."""
    group = GROUPS[event["event"]]
    return {f"{group}/{'tokens_per_second' if key == 'tok_s' else key}": value for key, value in event.items()
            if type(value) in (int, float) and key != "step"}


def main():
    start = json.loads(sys.stdin.readline())
    run = wandb.init(project=os.environ.get("WANDB_PROJECT", "moetrain"), name=os.environ["MOETRAIN_RUN_NAME"],
                     id=run_id(), resume="allow", config={k: v for k, v in start.items() if k != "event"})
    # W&B's own step cannot go back. A separate metric `step` allows a continued run to send steps again.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    for line in sys.stdin:
        event = json.loads(line)
        if event["event"] in GROUPS:
            run.log({"step": event["step"], **values(event)})
    run.finish()


if __name__ == "__main__":
    main()

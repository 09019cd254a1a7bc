#!/usr/bin/env python3
"""log_mlflow.py - sends metrics.jsonl to MLflow: log.command = python3 configs/log_mlflow.py

Needs `pip install mlflow-skinny` or mlflow. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME (default moetrain) and the
other variables of MLflow apply. OUTPUT_DIR/mlflow_run has the id of the run, so that a continued run adds to it.
"""
import json
import os
import sys

import mlflow

GROUPS = {"step": "train", "eval": "eval", "rollouts": "rollouts"}  # events and the first part of their names
ID_FILE = os.path.join(os.environ["MOETRAIN_OUTPUT_DIR"], "mlflow_run")


def open_run(start):
    """Continues the earlier run in this directory, or starts a run and stores its id for later runs."""
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "moetrain"))
    if os.environ["MOETRAIN_RESUMED"] == "1" and os.path.exists(ID_FILE):
        with open(ID_FILE) as f:
            return mlflow.start_run(run_id=f.read().strip())
    run = mlflow.start_run(run_name=os.environ["MOETRAIN_RUN_NAME"])
    with open(ID_FILE + ".tmp", "w") as f:
        f.write(run.info.run_id + "\n")
    os.replace(ID_FILE + ".tmp", ID_FILE)
    # MLflow refuses empty parameters, and parameters that change, so a continued run sends no parameters.
    settings = {key: value[:500] for key, value in start.get("config", {}).items() if value}
    for first in range(0, len(settings), 100):  # at most 100 a call
        mlflow.log_params(dict(list(settings.items())[first:first + 100]))
    mlflow.set_tags({key: start[key] for key in ("model", "data", "device", "version")})
    return run


def values(event):
    """All numbers of an event; null is not one."""
    group = GROUPS[event["event"]]
    return {f"{group}/{'tokens_per_second' if key == 'tok_s' else key}": value for key, value in event.items()
            if type(value) in (int, float) and key != "step"}


def main():
    with open_run(json.loads(sys.stdin.readline())):
        for line in sys.stdin:
            event = json.loads(line)
            if event["event"] in GROUPS:
                mlflow.log_metrics(values(event), step=event["step"])


if __name__ == "__main__":
    main()

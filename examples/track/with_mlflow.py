"""Tracks a job with MLflow. An attempt after a restart continues the run of the attempt before.

    shoal run --retries 3 --env MLFLOW_TRACKING_URI=http://tracker:5000 -- python with_mlflow.py

MLflow chooses the ids of its runs, so the run is found by the tag that Shoal has set. (Weights &
Biases takes an id: `wandb.init(id=os.environ["SHOAL_RUN_ID"], resume="allow")`.)
"""

from __future__ import annotations

import os
from pathlib import Path

import mlflow

STEPS = 6


def run_of_this_job() -> mlflow.ActiveRun:
    mine = f"tags.`shoal.run_id` = '{os.environ['SHOAL_RUN_ID']}'"
    found = mlflow.search_runs(filter_string=mine, output_format="list")
    return mlflow.start_run(run_id=found[0].info.run_id if found else None)


def main() -> None:
    saved = Path(os.environ["SHOAL_CHECKPOINT_DIR"]) / "step"
    first = int(saved.read_text()) if saved.exists() else 0
    with run_of_this_job():
        for step in range(first, STEPS):
            mlflow.log_metric("loss", 1 / (1 + step), step=step)
            saved.write_text(str(step + 1))
            if step == 2 and os.environ["SHOAL_ATTEMPT"] == "1":
                os._exit(1)  # in place of a node that dies


if __name__ == "__main__":
    main()

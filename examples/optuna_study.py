"""Optuna chooses the values, and Shoal runs the trials.

pip install optuna
shoal up --nodes 2 --gpus 0
python examples/optuna_study.py

Each trial of the study is a job. What it reports is passed on to Optuna, whose pruner says which to
stop. The study is in a file (Optuna's own storage): run the script again, and it goes on.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import shoal

LOOK_S = 0.5
EVERY = 10  # steps: Optuna compares trials at the same ones, and samples come when they come


def train(steps: int) -> None:
    """Stands for your training script: it reports a loss after each step."""
    from shoal.train.beats import Beats

    beats, rate = Beats(), float(os.environ["LR"])
    for step in range(1, steps + 1):
        time.sleep(0.05)
        beats.log({"loss": 0.1 + 10 * math.exp(-rate * step)})
        beats.send(step=step, steps=step, compute_us=50_000 * step, steps_total=steps)


def drive(study: optuna.Study, trials: int, at_a_time: int, steps: int) -> None:
    """Keep so many trials running until this many have ended."""
    running: dict[str, tuple[optuna.Trial, int]] = {}  # by job: the trial, and its last step
    command = [sys.executable, os.path.abspath(__file__), "--train", str(steps)]
    with shoal.Client() as cluster:
        while trials or running:
            while trials and len(running) < at_a_time:
                trials -= 1
                trial = study.ask()
                rate = trial.suggest_float("lr", 1e-3, 1.0, log=True)
                env = {"LR": str(rate), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
                job = cluster.run(command, name=f"trial-{trial.number}", env=env).id
                trial.set_user_attr("job", job)
                running[job] = trial, 0
            time.sleep(LOOK_S)
            for job, (trial, seen) in list(running.items()):
                over = cluster.job(job).finished_ms is not None  # before the last look at its curve
                points = cluster.job_series(job, members=False).points
                before = seen
                for point in points:
                    for mark in range(seen + EVERY, point.step + 1, EVERY):
                        if point.loss is not None:
                            trial.report(point.loss, mark)
                            seen = mark
                running[job] = trial, seen
                if not over and seen > before and trial.should_prune():
                    cluster.cancel(job)
                    study.tell(trial, state=TrialState.PRUNED)
                    del running[job]
                elif over:
                    losses = [one.loss for one in points if one.loss is not None]
                    if cluster.job(job).state == "succeeded" and losses:
                        study.tell(trial, min(losses))
                    else:
                        study.tell(trial, state=TrialState.FAIL)
                    del running[job]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, metavar="STEPS", help="be a trial")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--study", type=Path, default=Path("study.journal"))
    given = parser.parse_args()
    if given.train:
        train(given.train)
        return
    study = optuna.create_study(
        study_name="lr",
        storage=JournalStorage(JournalFileBackend(str(given.study))),
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    drive(study, given.trials, given.at_a_time, given.steps)
    best = study.best_trial
    print(f"best: {best.user_attrs['job']} with loss {best.value:.4g}, lr={best.params['lr']:.4g}")


if __name__ == "__main__":
    main()

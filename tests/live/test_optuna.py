"""A real Optuna study whose trials are jobs: its pruner stops some, its storage has them all."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from shoal.api.web import FOLDER
from tests.live.cluster import live_cluster
from tests.needs import need

need("optuna")

EXAMPLE = Path(__file__).parents[2] / "examples" / "optuna_study.py"


def test_a_study_of_optuna_runs_its_trials_as_jobs_and_prunes_the_bad_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna

    spec = importlib.util.spec_from_file_location("optuna_study", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    study = optuna.create_study(
        study_name="lr", storage=url, pruner=optuna.pruners.MedianPruner(n_startup_trials=2)
    )
    for rate in (0.2, 0.1, 0.001):  # two good ones, then one that is worse at every step
        study.enqueue_trial({"lr": rate})
    with live_cluster(nodes=1, gpus=0) as live:
        monkeypatch.setenv("SHOAL_HOME", str(live.home.path))
        monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent.parent))
        monkeypatch.chdir(tmp_path)
        example.drive(study, trials=3, at_a_time=1, steps=80)
        stored = optuna.load_study(study_name="lr", storage=url)  # as another process would
        states = [trial.state.name for trial in stored.trials]
        assert states == ["COMPLETE", "COMPLETE", "PRUNED"]
        assert stored.best_trial.params["lr"] == pytest.approx(0.2)
        jobs = [trial.user_attrs["job"] for trial in stored.trials]
        assert [live.wait(job) for job in jobs] == ["succeeded", "succeeded", "cancelled"]
        reported = stored.trials[2].intermediate_values
        assert reported
        assert max(reported) < 80

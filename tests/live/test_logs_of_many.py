"""The output of several jobs and members at once, from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.live.cluster import Live, live_cluster


def shoal(live: Live, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shoal.main", *args, "--home", str(live.home.path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_several_jobs_print_with_names_are_searched_followed_and_downloaded(
    tmp_path: Path,
) -> None:
    script = "echo here is $SHOAL_MEMBER; echo loss {loss}; echo done"
    with live_cluster(nodes=2) as live:
        one = live.run(script.format(loss=1), labels={"run": "a"}, name="train-1")
        two = live.run(script.format(loss=2), labels={"run": "a"}, members=2)
        other = live.run("echo loss of another", labels={"run": "b"})
        for job in (one, two, other):
            live.wait(job)
        lines = shoal(live, "logs", "--label", "run=a", "--grep", "loss").splitlines()
        assert sorted(lines) == [f"[{one}] loss 1", f"[{two}.0] loss 2", f"[{two}.1] loss 2"]
        assert shoal(live, "logs", f"{two}.1", "--grep", "here") == "here is 1\n"
        followed = shoal(live, "logs", one, two, "-f", "--since", "1h").splitlines()
        assert sorted(followed)[:3] == [
            f"[{one}] {text}" for text in ("done", "here is 0", "loss 1")
        ]
        assert len(followed) == 9
        shoal(live, "logs", one, two, "--output", f"{tmp_path}/logs/")
        assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
            f"{one}.0.log",
            f"{two}.0.log",
            f"{two}.1.log",
        ]
        assert (tmp_path / "logs" / f"{one}.0.log").read_text() == "here is 0\nloss 1\ndone\n"
        (tmp_path / "many.yaml").write_text("{name: many, array: 0-2, command: 'echo at {index}'}")
        shoal(live, "run", "--wait", f"{tmp_path}/many.yaml")
        many = shoal(live, "logs", "--name", "many").splitlines()
        assert sorted(line.partition("] ")[2] for line in many) == ["at 0", "at 1", "at 2"]
        listed = shoal(live, "ps", "--name", "train-*", "--state", "succeeded", "--labels")
        assert one in listed
        assert two not in listed
        shoal(live, "label", one, "best=yes", "run-")
        shoal(live, "note", one, "this one")
        assert one in shoal(live, "ps", "-a", "--label", "best")
        assert one not in shoal(live, "ps", "-a", "--label", "run")
        assert "this one" in shoal(live, "note", one)
        live.kill_controller()
        assert "this one" in shoal(live, "note", one)
        for verb in ("why", "explain"):
            said = shoal(live, verb, one)
            assert "labels: best=yes" in said
            assert "note by a user: this one" in said.partition("WHEN")[0]
        events = shoal(live, "events", "--since", "1h", "--label", "best=yes")
        assert f"{one} was labeled best=yes, run-" in events
        assert two not in events

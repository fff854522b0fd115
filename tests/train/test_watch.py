"""A script that does not use `shoal.train` is watched, and what limits it is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core.answers.bound import judge
from shoal.model.progress import spent_of
from shoal.train.waits import Quickest, Stalls
from tests.needs import need
from tests.train.gangs import Gang, Listener

need("torch")


@pytest.mark.outside("it compares times that real processes need")
@pytest.mark.parametrize(
    "kind", [pytest.param("compute", marks=pytest.mark.soak), "input", "network"]
)
def test_what_limits_a_plain_script_is_found(kind: str, listener: Listener) -> None:
    listener.listen()
    each = [listener.env(f"j1.1.{rank}") for rank in range(2)]
    with Gang("limited.py", kind, each=each) as gang:
        gang.succeed()
    last = {int(ref[-1]): beats[-1] for ref, beats in listener.heard().items()}
    found = judge({member: spent_of(beat) for member, beat in last.items()}, ["n1", "n2"])
    assert found is not None
    # Where others use the cores, too, a part of what a collective takes is waiting for a late peer.
    kinds = {kind, "imbalance"} if kind == "network" else {kind}
    assert found.kind.value in kinds, (found, last)
    if kind == "network":
        shares = found.shares
        assert shares.network_milli > shares.compute_milli + shares.input_milli, (found, last)
    assert all(beat.busy for beat in last.values()), "a long evaluation is not a hang"


def test_one_late_peer_does_not_make_a_collective_long() -> None:
    quickest = Quickest()
    for wait in (9, 0, 5, 50, 7, 6, 0, 8, 40, 5, 11):  # nine with a wait: a block, and one more
        quickest.add(wait)
    assert quickest.ns == 8 * 5 + 11
    quickest.add(3)
    assert quickest.ns == 8 * 5 + 2 * 3


def test_stalls_are_counted_from_the_first_look(tmp_path: Path) -> None:
    file = tmp_path / "io.pressure"
    file.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=700\nfull total=3\n")
    stalls = Stalls(file)
    assert stalls.us == 0
    file.write_text("some avg10=9.00 avg60=0.00 avg300=0.00 total=900\nfull total=3\n")
    assert stalls.us == 200
    assert Stalls(tmp_path / "nothing").us == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["main.py", "a b"], 3, "['main.py', 'a b'] beside"),
        (["nothing.py"], 1, "there is no script 'nothing.py'"),
        ([], 1, "usage: python -m shoal.train.watch SCRIPT"),
    ],
)
def test_a_script_run_through_it_sees_what_it_would_see_alone(
    arguments: list[str], code: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "other.py").write_text("word = 'beside'")
    text = "import sys, other\nif __name__ == '__main__': print(sys.argv, other.word); sys.exit(3)"
    (tmp_path / "main.py").write_text(text)
    command = [sys.executable, "-m", "shoal.train.watch", *arguments]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, words in ended.stdout + ended.stderr) == (code, True), ended


def test_a_script_has_the_main_module_that_python_would_give_it(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import os, pickle, sys, threading\n"
        "class Thing: pass\n"
        "os.chdir('/')\n"
        "print(__file__, __name__, __package__, __spec__, sys.argv)\n"
        "def later():\n"
        "    threading.main_thread().join()\n"  # the script has ended by now
        "    print(type(pickle.loads(pickle.dumps(Thing()))).__module__)\n"
        "threading.Thread(target=later).start()\n"
    )
    alone, watched = (
        subprocess.run(
            [sys.executable, *way, "main.py", "x"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for way in ([], ["-m", "shoal.train.watch"])
    )
    assert watched == alone

"""Whatever goes wrong is one line and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import errors
from shoal.cli.app import OTHER_WORDS, call
from shoal.cli.first_page import VERBS
from shoal.client import ShoalError, Unreachable
from shoal.control.lifecycle import LifecycleError
from shoal.forms import failure


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (failure.Failure("no"), 1, "error: no"),
        (failure.Failure("no", failure.USAGE), 2, "error: no"),
        (ShoalError("is too many", "gpus", 422), 1, "error: gpus: is too many"),
        (Unreachable("nobody answers"), 3, "error: nobody answers"),
        (LifecycleError("it is\nbroken"), 1, "error: it is\\nbroken"),
        (FileNotFoundError(2, "No such file", "x.yaml"), 1, "error: x.yaml: No such file"),
        (OSError(28, "No space"), 1, "error: cannot write the output: no space left on device"),
    ],
)
def test_what_is_raised_is_told(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert errors.exit_code_of(fail) == code
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("run --gpu 1 -- x", "no such option '--gpu'; did you mean --gpus?"),
        ("run --memry 1 -- x", "did you mean --memory or "),
        ("stop j7", "unknown verb 'stop'; did you mean: shoal cancel JOB"),
        ("kill j7", "unknown verb 'kill'; did you mean: shoal cancel JOB"),
        ("jobs", "unknown verb 'jobs'; did you mean: shoal ps"),
        ("queue", "unknown verb 'queue'; did you mean: shoal ps"),
        ("log j7", "did you mean: shoal logs"),
    ],
)
def test_the_closest_word_is_suggested(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(words.split()) == 2
    assert line in capsys.readouterr().err


def test_words_of_other_tools_lead_to_verbs() -> None:
    assert not OTHER_WORDS.keys() & VERBS.keys()
    assert {hint.split()[0] for hint in OTHER_WORDS.values()} <= VERBS.keys()


def test_an_interrupt_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert errors.exit_code_of(interrupt) == 130
    assert capsys.readouterr().err == ""


def test_the_unexpected_leaves_its_trace_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)

    def fail() -> None:
        raise ZeroDivisionError("division by zero")

    assert errors.exit_code_of(fail) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    (crash,) = tmp_path.glob("crash-*.txt")
    assert str(crash) in err
    assert "in fail" in crash.read_text()


def test_debugging_shows_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setenv("SHOAL_DEBUG", "1")

    def fail() -> None:
        raise failure.Failure("no")

    assert errors.exit_code_of(fail) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    script = (
        "from shoal.cli.errors import exit_code_of\n"
        "import sys\n"
        "def act():\n"
        "    for number in range(100_000): print(number)\n"
        "sys.exit(exit_code_of(act))\n"
    )
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        os.read(reader, 10)
        os.close(reader)
        _, err = process.communicate(timeout=120)
    assert process.returncode == errors.PIPE_CLOSED
    assert err == b""


def test_a_full_disk_is_told() -> None:
    script = "import sys; from shoal.cli.app import run; run(['--help'])"
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert run.returncode == 1
    assert run.stderr.splitlines()[0] == ("error: cannot write the output: no space left on device")

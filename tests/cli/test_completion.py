"""Completion as real shells ask for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.waiting import until

from shoal.client import contexts
from tests.live.cluster import Live
from tests.needs import need_program

# Each prints one suggestion per line for the words in $@.
SHELLS = {
    "bash": r"""
eval "$(shoal completion bash)" || exit 1
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shoal_completion shoal
printf '%s\n' "${COMPREPLY[@]}"
""",
    "zsh": r"""
compdef() { }
eval "$(shoal completion zsh)" || exit 1
_describe() { print -l -- ${${(P)3}%%:*} }
compadd() { print -l -- ${(P)@[-1]} }
words=("$@"); CURRENT=$#
_shoal_completion
""",
    "fish": r"""
shoal completion fish | source
complete --do-complete "$argv" | string replace --regex '\t.*' ''
""",
}


def suggestions(shell: str, *words: str, env: dict[str, str]) -> list[str]:
    need_program(shell)
    start = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    given = [" ".join(words)] if shell == "fish" else [shell, *words]
    done = subprocess.run(
        [shell, *start, "-c", SHELLS[shell], *given],
        env={**env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == "", done.stderr
    return done.stdout.split()


@pytest.fixture
def env(cluster: Live, tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "SHOAL_HOME": str(cluster.home.path), "TERM": "dumb"}


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_verbs_flags_and_names(
    shell: str, cluster: Live, env: dict[str, str]
) -> None:
    job = cluster.run("true")
    cluster.wait(job)
    assert {"logs", "login", "logout"} <= set(suggestions(shell, "shoal", "lo", env=env))
    assert "--follow" in suggestions(shell, "shoal", "logs", "--f", env=env)
    # A shell waits only for a moment for names: on a busy machine, one presses Tab again.
    until(lambda: job in suggestions(shell, "shoal", "logs", "j", env=env))
    until(lambda: suggestions(shell, "shoal", "drain", "n1", env=env)[:1] == ["n1"])
    assert "show" in suggestions(shell, "shoal", "policy", "s", env=env)


def test_contexts_tenants_and_secrets_are_known_too(
    cluster: Live, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", env["HOME"])
    with contexts.changing() as known:
        known.contexts["lab"] = contexts.Context(url="http://127.0.0.1:1", token="x")
    env = {**env, "XDG_CONFIG_HOME": env["HOME"]}
    assert suggestions("bash", "shoal", "ps", "--context", "l", env=env) == ["lab", "local"]
    cluster.client.add_tenant("studio")
    cluster.client.set_secret("PASSWORD", b"1")
    until(lambda: "studio" in suggestions("bash", "shoal", "tenant", "remove", "", env=env))
    until(lambda: "PASSWORD" in suggestions("bash", "shoal", "run", "--secret", "", env=env))
    cluster.client.remove_secret("PASSWORD")
    cluster.client.remove_tenant("studio")


def test_a_cluster_that_does_not_answer_costs_a_moment_and_no_line(tmp_path: Path) -> None:
    """It listens and never says anything; and there is none at all; and its answer is a lie."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        with contexts.changing() as known:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            known.contexts["mute"] = contexts.Context(url=url, token="x")
        env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
        began = time.monotonic()
        assert suggestions("bash", "shoal", "logs", "--context", "mute", "", env=env) == []
        assert time.monotonic() - began < 60
    assert suggestions("bash", "shoal", "logs", "j", env=env) == []
    assert suggestions("bash", "shoal", "nonsense", "", env=env) == []
    (tmp_path / "shoal" / "contexts.json").write_text("nonsense")
    assert suggestions("bash", "shoal", "logs", "j", env=env) == []


def test_completing_a_verb_imports_no_verb(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['shoal']\n"
        "from shoal.cli import app\n"
        "try:\n    app.run()\n"
        "finally:\n    print(*sorted(m for m in sys.modules if m.startswith('shoal')))\n"
    )
    words = {"COMP_WORDS": "shoal lo", "COMP_CWORD": "1", "_SHOAL_COMPLETE": "bash_complete"}
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], **words}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[:-1] == ["plain,logs", "plain,login", "plain,logout"]
    loaded = set(lines[-1].split())
    assert not [name for name in loaded if ".verbs." in name]
    assert "shoal.client" not in loaded

"""Secrets at the API and at the command line: set, listed by name, removed, and never shown."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from shoal.api.principal import THE_OPERATOR, Principal
from shoal.api.problems import Refusal
from shoal.api.secrets import _tenant
from shoal.calls.call import declared_in
from shoal.calls.people import SecretCalls
from shoal.client import Client, ShoalError
from shoal.model.identity import Role
from shoal.model.secret import SECRET_BYTES_MAX
from tests.live.cluster import Live, live_cluster

CANARY = "canary-8d1f"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=0) as cluster:
        yield cluster


def shoal(live: Live, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "shoal.main", *words, "--home", str(live.home.path)],
        input=stdin,
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_it_is_set_listed_and_removed_at_the_command_line(live: Live) -> None:
    assert b"token is set: version 1" in shoal(live, "secret", "set", "token", stdin=b"x").stdout
    said = shoal(live, "secret", "set", "token", stdin=CANARY.encode())
    assert said.stdout == b"token is set: version 2\n"
    job = live.run("sleep 600", secrets=("token",))
    listed = shoal(live, "secret", "list")
    head, row = listed.stdout.decode().splitlines()
    assert head.split() == ["NAME", "VERSION", "SET", "BY", "LIVE", "JOBS"]
    assert [row.split()[i] for i in (0, 1, 3, 4)] == ["token", "2", "operator", "1"]
    assert CANARY.encode() not in listed.stdout + shoal(live, "secret", "--json").stdout
    live.client.cancel(job)
    assert b"token is removed" in shoal(live, "secret", "remove", "token").stdout
    again = shoal(live, "secret", "remove", "token")
    assert (again.returncode, again.stdout) == (1, b"")
    assert b"default has no secret 'token'; see: shoal secret list" in again.stderr


def test_a_terminal_is_asked_and_does_not_show_the_answer(live: Live) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.main", "secret", "set", "typed", "--home", live.home.path],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    seen = b""
    while b"value of typed: " not in seen:
        seen += os.read(ours, 1024)
    os.write(ours, CANARY.encode() + b"\n")
    try:
        while more := os.read(ours, 1024):
            seen += more
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    assert b"typed is set: version 1" in seen
    assert CANARY.encode() not in seen


@pytest.mark.parametrize(
    ("words", "stdin", "line"),
    [
        (["set"], b"", "set: needs a name; write: shoal secret set NAME"),
        (["set", f"k={CANARY}"], b"", "NAME: give the value on standard input, not as NAME=VALUE"),
        (["set", "1x"], b"", "NAME: begins with a letter"),
        (["set", "k"], b"", "the value is empty"),
        (["set", "k"], b"x" * (SECRET_BYTES_MAX + 1), "the value is longer than 64 KiB"),
        (["set", "k", "--file", "/nowhere"], b"", "--file: cannot read /nowhere"),
        (["list", "k"], b"", "list: takes no name"),
        (["show"], b"", "unknown command 'shoal secret show'; use one of set, list, remove"),
    ],
)
def test_wrong_usage_is_one_line_without_the_value(
    live: Live, words: list[str], stdin: bytes, line: str
) -> None:
    said = shoal(live, "secret", *words, stdin=stdin)
    (only,) = said.stderr.decode().splitlines()
    assert line in only
    assert CANARY not in only
    assert said.returncode == 2


def test_a_job_with_an_unknown_secret_is_refused(live: Live) -> None:
    with pytest.raises(ShoalError, match="secrets: default has no secret nope; set it with"):
        live.run("true", secrets=("nope=NOPE",))
    live.client.set_secret("short-lived", b"x")
    job = live.run("true", secrets=("short-lived",))
    live.wait(job)
    live.client.remove_secret("short-lived")
    with pytest.raises(ShoalError, match="has no secret short-lived"):
        live.client.requeue(job)


def test_the_api_refuses_what_is_no_secret(live: Live) -> None:
    for name, value, status in [
        ("a/../b", b"x", 404),
        ("%2e%2e", b"x", 422),
        (".hidden", b"x", 422),
        ("n" * 64, b"x", 422),
        ("k", b"", 422),
        ("k", b"x" * (SECRET_BYTES_MAX + 1), 413),
        ("k", b"x" * (SECRET_BYTES_MAX + 2), 413),
    ]:
        with pytest.raises(ShoalError) as caught:
            live.client.set_secret(name, value)
        assert caught.value.status in (status, 422), name
    assert not [one for one in live.client.secrets() if one.name == "k"]
    with pytest.raises(ShoalError, match="tenant"):
        live.client.set_secret("k", b"x", tenant="../x")


def test_a_tenant_acts_for_itself_and_an_admin_for_any() -> None:
    member = Principal(user="ada", tenant="a", role=Role.MEMBER, token="t")
    assert [_tenant(member, asked) for asked in ("", "a")] == ["a", "a"]
    with pytest.raises(Refusal, match="your token is for the tenant a"):
        _tenant(member, "b")
    assert [_tenant(THE_OPERATOR, asked) for asked in ("", "a")] == ["default", "a"]
    viewer = Principal(user="bo", tenant="a", role=Role.VIEWER, token="t")
    assert not any(viewer.may(call.may) for call in declared_in(SecretCalls))


def test_a_stranger_gets_nothing(live: Live) -> None:
    with Client(live.client.url, "shoal_00000000_wrong") as stranger:
        for call in (stranger.secrets, lambda: stranger.set_secret("k", b"x")):
            with pytest.raises(ShoalError, match="the token is missing or wrong"):
                call()

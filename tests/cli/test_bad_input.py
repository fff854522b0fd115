"""Every verb, given what is missing, malformed, huge or hostile: one clear line, never a trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Shoal, assert_one_clear_line

HUGE = "9" * 10_000
HOSTILE_JOBS = [
    "",
    " ",
    "x",
    "j",
    "j0x",
    "J1",
    "j1\nj2",
    "j1%2F..",
    "../j1",
    "j" + HUGE,
    "-1",
    "j1;ls",
    "j\udcff",
]
HOSTILE_NODES = [
    "",
    "../n1",
    "n1/..",
    "N1",
    "n\n1",
    "%2e%2e",
    "x" * 10_000,
    "n1\0",
    "n\udcff",
]

USAGE = [
    ["nosuchverb"],
    ["rum"],
    ["a\nb\x1b[2J"],
    ["x" * 10_000],
    ["--nosuchoption"],
    ["ps", "--nosuchoption"],
    ["ps", "extra"],
    ["ps", "--limit", "0"],
    ["ps", "--limit", "x"],
    ["ps", "--limit", HUGE],
    ["ps", "--limit"],
    ["status", "extra"],
    ["nodes", "extra"],
    ["nodes", "--tree"],
    ["down", "extra"],
    ["demo", "extra"],
    ["logs"],
    ["logs", "j1", "-m", "-1"],
    ["logs", "j1", "-m", "x"],
    ["logs", "j1", "--attempt", "0"],
    ["logs", "j1", "--tail", "-1"],
    ["logs", "j1", "--tail", HUGE],
    ["logs", "j1", "--label", "run=a"],
    ["logs", "j1", "--tail", "1", "--since", "1h"],
    ["logs", "--label", "=a"],
    ["ps", "--state", "odd"],
    ["ps", "--since", "5"],
    ["notify", "odd"],
    ["notify", "add"],
    ["notify", "list", "--everyone"],
    ["note", "j1", "--remove", "text"],
    ["label", "j1"],
    ["why"],
    ["why", "j1", "j2"],
    ["cancel"],
    ["cordon"],
    ["drain"],
    ["drain", "n1", "--at", "soon"],
    ["drain", "n1", "--at", "25:00"],
    ["drain", "n1", "--at", "2001-01-01T08:00"],
    ["drain", "n1", "--at", "9999-12-31T23:59"],
    ["drain", "n1", "--at", HUGE],
    ["drain", "n1", "--in", "5"],
    ["drain", "n1", "--in", "-5m"],
    ["drain", "n1", "--in", "900d"],
    ["drain", "n1", "--in", "2h", "--at", "18:30"],
    ["ends"],
    ["ends", "--in", "2m", "--never"],
    ["ends", "--in", "later"],
    ["uncordon"],
    ["events", "-n", "-1"],
    ["events", "-n", "x"],
    ["events", "--job", "../x"],
    ["events", "--node", "../x"],
    ["policy", "nosuchaction"],
    ["policy", "fair"],
    ["policy", "a\nb"],
    ["policy", "x" * 10_000],
    ["policy", "show", "nosuch"],
    ["policy", "show", "no\nsuch"],
    ["policy", "show", "\udcff"],
    ["policy", "show", "x" * 10_000],
    ["policy", "show", "fair", "fifo"],
    ["policy", "check"],
    ["policy", "check", "nosuch"],
    ["policy", "check", "fair", "fifo"],
    ["policy", "check", "--shipped"],
    ["policy", "diff"],
    ["policy", "diff", "fair", "nosuch"],
    ["policy", "diff", "fair", "fifo", "srtf"],
    ["policy", "set"],
    ["policy", "set", "nosuch"],
    ["policy", "set", "fair", "--nosuchoption"],
    ["sim", "trace.csv", "--nodes", "1", "--policy", "nosuch"],
    ["up", "--nodes", "-1"],
    ["up", "--nodes", "1000000000"],
    ["up", "--nodes", "x"],
    ["up", "--nodes", "2", "--gpus", "-1"],
    ["up", "--nodes", "2", "--gpus", HUGE],
    ["up", "--nodes", "2", "--cpus", "a"],
    ["up", "--nodes", "2", "--cpus", "-1"],
    ["up", "--nodes", "2", "--memory", "5"],
    ["up", "--nodes", "2", "--memory", "5X\n"],
    ["up", "--nodes", "2", "--gpus", "1", "--gpu-memory", "80"],
    ["up", "--nodes", "2", "--gpu-memory", "80G"],
    ["up", "--nodes", "2", "--gpu-model", "A100"],
    ["up", "--this-machine", "--gpu-model", "A100"],
    ["up", "--nodes", "2", "--topology", "2x2"],
    ["up", "--nodes", "2", "--topology", "../.."],
    ["up", "--port", "99999"],
    ["up", "--port", "-1"],
    ["up", "--domain", "127.0.0.1"],
    ["up", "--domain", "a b"],
    ["up", "--this-machine", "--nodes", "2"],
    ["up", "extra"],
    ["run"],
    ["run", "--"],
    ["run", "--", ""],
    ["run", "--gpus", "-1", "--", "true"],
    ["run", "--gpus", "x", "--", "true"],
    ["run", "--gpus", HUGE, "--", "true"],
    ["run", "--gpus", "1.5", "--", "true"],
    ["run", "--gpus", "0.00001", "--", "true"],
    ["run", "--gpus", "lots\n", "--", "true"],
    ["run", "--gpus", "0G", "--", "true"],
    ["run", "--gpus", HUGE + "G", "--", "true"],
    ["run", "--gpus", "nan", "--", "true"],
    ["run", "--gpus", "-0.5", "--", "true"],
    ["run", "--gpu-memory", "40G", "--", "true"],
    ["run", "--gpus", "1", "--gpu-memory", "40", "--", "true"],
    ["run", "--gpus", "20G", "--gpu-memory", "40G", "--", "true"],
    ["run", "--gpu-model", "A100", "--", "true"],
    ["run", "--gpus", "1", "--gpu-model", "", "--", "true"],
    ["run", "--gpus", "1", "--gpu-model", "\udcff", "--", "true"],
    ["run", "--members", "8..2", "--", "true"],
    ["run", "--members", "2..", "--", "true"],
    ["run", "--members", "..", "--", "true"],
    ["run", "--members", "2..\n", "--", "true"],
    ["run", "--members", HUGE, "--", "true"],
    ["run", "--members", "1.." + HUGE, "--", "true"],
    ["run", "--members", "-2", "--", "true"],
    ["run", "--members", "1.5", "--", "true"],
    ["run", "--within", "house", "--", "true"],
    ["run", "--within", "", "--", "true"],
    ["run", "--strict", "--", "true"],
    ["run", "--within", "anywhere", "--strict", "--", "true"],
    ["run", "-n", "4", "--per-node", "3", "--", "true"],
    ["run", "--per-node", "x", "--", "true"],
    ["run", "--tenant", "a b", "--", "true"],
    ["run", "--tenant", "", "--", "true"],
    ["run", "--checkpoint-every", "10", "--", "true"],
    ["run", "--estimate", "9999d", "--", "true"],
    ["run", "--members", "0", "--", "true"],
    ["run", "--members", "99999999", "--", "true"],
    ["run", "--cpus", "-1", "--", "true"],
    ["run", "--cpus", "lots", "--", "true"],
    ["run", "--memory", "5X", "--", "true"],
    ["run", "--memory", HUGE + "G", "--", "true"],
    ["run", "--name", "a/b", "--", "true"],
    ["run", "--name", "a\nb", "--", "true"],
    ["run", "--name", "x" * 100_000, "--", "true"],
    ["run", "--priority", "5000", "--", "true"],
    ["run", "--env", "=x", "--", "true"],
    ["run", "--env", "A-B=1", "--", "true"],
    ["run", "--env", "A\nB=1", "--", "true"],
    ["run", "--env", "NOT_SET_ANYWHERE", "--", "true"],
    ["run", "--env", "A=" + "x" * 10_000_000, "--", "true"],
    ["run", "--env", "A=\udcff", "--", "true"],
    ["run", "--restart", "sometimes", "--", "true"],
    ["run", "--restart", "never", "--retries", "2", "--", "true"],
    ["run", "--retries", "-1", "--", "true"],
    ["run", "--time-limit", "10", "--", "true"],
    ["run", "--time-limit", "soon", "--", "true"],
    ["run", "--backoff", "-1s", "--", "true"],
    ["run", "--stop-grace", "2h", "--", "true"],
    ["run", "--workdir", "", "--", "true"],
    ["run", "--workdir", "a\0b", "--", "true"],
    ["run", "--", "tr\0ue"],
    ["run", "--", "\udcff"],
    ["run", "--", "x" * 200_000],
    ["run", "--nosuchoption", "--", "true"],
    ["run", "job.yaml", "extra"],
    ["serve"],
    ["serve", "chat"],
    ["serve", "chat", "--"],
    ["serve", "chat", "--", ""],
    ["serve", "--", "chat"],
    ["serve", "Chat", "--", "true"],
    ["serve", "chat-", "--", "true"],
    ["serve", "a/b", "--", "true"],
    ["serve", "x" * 64, "--", "true"],
    ["serve", "j7", "--", "true"],
    ["serve", "a\nb", "--", "true"],
    ["serve", "\udcff", "--", "true"],
    ["serve", "service.yaml", "extra"],
    ["serve", "chat", "--nosuchoption", "--", "true"],
    ["serve", "chat", "--members", "0", "--", "true"],
    ["serve", "chat", "--members", "2..4", "--", "true"],
    ["serve", "chat", "--replicas", "8..1", "--", "true"],
    ["serve", "chat", "--replicas", "0", "--", "true"],
    ["serve", "chat", "--replicas", "0..0", "--", "true"],
    ["serve", "chat", "--replicas", "-1", "--", "true"],
    ["serve", "chat", "--replicas", "1..", "--", "true"],
    ["serve", "chat", "--replicas", "1.." + HUGE, "--", "true"],
    ["serve", "chat", "--replicas", "20000", "--", "true"],
    ["serve", "chat", "--replicas", "--", "true"],
    ["serve", "chat", "--target", "0", "--", "true"],
    ["serve", "chat", "--target", "x", "--", "true"],
    ["serve", "chat", "--idle", "5", "--", "true"],
    ["serve", "chat", "--idle", "0", "--", "true"],
    ["serve", "chat", "--drain", "2d", "--", "true"],
    ["serve", "chat", "--ready-within", "soon", "--", "true"],
    ["serve", "chat", "--probe", "health", "--", "true"],
    ["serve", "chat", "--probe", "/a b", "--", "true"],
    ["serve", "chat", "--probe", "/a\r\nX: y", "--", "true"],
    ["serve", "chat", "--probe", "", "--", "true"],
    ["serve", "chat", "--route", "random", "--", "true"],
    ["serve", "chat", "--route", "sticky", "--", "true"],
    ["serve", "chat", "--route", "p2c", "--sticky-header", "x-user", "--", "true"],
    ["serve", "chat", "--sticky-header", "a", "--sticky-cookie", "b", "--", "true"],
    ["serve", "chat", "--sticky-header", "a b", "--", "true"],
    ["serve", "chat", "--sticky-cookie", "", "--", "true"],
    ["serve", "chat", "--queue", "0", "--", "true"],
    ["serve", "chat", "--rate", "-1", "--", "true"],
    ["serve", "chat", "--port", "0", "--", "true"],
    ["serve", "chat", "--port", "99999", "--", "true"],
    ["serve", "chat", "--certificate", "/x.pem", "--", "true"],
    ["serve", "chat", "--certificate", "a b.pem", "--port", "8443", "--", "true"],
    ["serve", "chat", "--gpus", "lots", "--", "true"],
    ["serve", "chat", "--priority", "5000", "--", "true"],
    ["serve", "chat", "--env", "A-B=1", "--", "true"],
    ["services", "extra"],
    ["service"],
    ["service", "a", "b"],
    ["service", "a", "--stop", "--rollback"],
    ["service", "a", "--to", "3"],
    ["service", "../a"],
    ["service", "j7"],
    ["service", "a\nb"],
    ["service", "x" * 10_000],
]


@pytest.mark.parametrize(
    "args", USAGE, ids=lambda args: " ".join(args)[:50].encode("unicode_escape").decode()
)
def test_wrong_usage_is_refused_before_anybody_is_asked(args: list[str], shoal: Shoal) -> None:
    result = shoal(*args)
    assert_one_clear_line(result)
    assert result.code == 2


@pytest.mark.parametrize("verb", ["logs", "why", "cancel"])
@pytest.mark.parametrize("job", HOSTILE_JOBS, ids=lambda job: repr(job)[:20])
def test_what_is_no_job_id_is_refused(verb: str, job: str, shoal: Shoal) -> None:
    result = shoal(verb, "--", job)
    assert_one_clear_line(result)
    may_be_a_name = job in ("x", "j", "j0x", "J1")
    assert result.code == (3 if may_be_a_name else 2)


@pytest.mark.parametrize("verb", ["cordon", "drain", "uncordon"])
@pytest.mark.parametrize("node", HOSTILE_NODES, ids=lambda node: repr(node)[:20])
def test_what_is_no_node_id_is_refused(verb: str, node: str, shoal: Shoal) -> None:
    result = shoal(verb, "--", node)
    assert_one_clear_line(result)
    assert result.code == 2


BOMB = "l0: &l0 x\n" + "\n".join(
    f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 9)}]" for n in range(20)
)
FILES: list[tuple[str, bytes, str]] = [
    ("empty.yaml", b"", "is empty"),
    ("blank.yaml", b"\n \n", "is empty"),
    ("binary.yaml", bytes(range(256)), "is not text"),
    ("elf.json", b"\x7fELF\x02\x01\x01\0\0\0", "not JSON"),
    ("nul.yaml", b"command: x\0y", "not YAML"),
    ("tab.yaml", b"command: x\n\tgpus: 1\n", "line 2: a tab"),
    ("bomb.yaml", BOMB.encode(), "aliases"),
    ("deep.yaml", b"command: " + b"[" * 20_000, "nested too deeply"),
    ("deep.json", b"[" * 200_000, "nested too deeply"),
    ("deep.toml", b"command = " + b"[" * 20_000, "nested too deeply"),
    ("huge.yaml", b"command: x\nenv: {A: " + b"x" * 10_000_000 + b"}", "is larger than 4 MiB"),
    ("large.yaml", b"command: x\nenv: {A: " + b"x" * 200_000 + b"}", "env: "),
    ("words.yaml", b"hello there", "must hold fields"),
    ("typo.toml", b"command = 'x'\ngpuz = 1", "did you mean 'gpus'?"),
    ("none.json", b"{}", "command: is missing"),
    ("negative.yaml", b"command: x\ngpus: -1", "gpus: must be from 0"),
    ("latin1.yaml", "command: größe".encode("latin-1"), "is not text"),
    ("code.yaml", b"!!python/object/apply:os.system ['touch /tmp/owned']", "not YAML"),
]


@pytest.mark.parametrize(("name", "data", "part"), FILES, ids=[name for name, _, _ in FILES])
def test_a_bad_job_file_is_refused(
    name: str, data: bytes, part: str, shoal: Shoal, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    result = shoal("run", str(tmp_path / name))
    assert_one_clear_line(result)
    assert part in result.err
    assert name in result.err
    assert result.code == 1


@pytest.mark.parametrize(("name", "data"), [(name, data) for name, data, _ in FILES])
@pytest.mark.parametrize("verb", [["policy", "check"], ["sim", "trace.csv", "-n", "1", "--policy"]])
def test_a_bad_policy_file_is_refused(
    name: str, data: bytes, verb: list[str], shoal: Shoal, tmp_path: Path
) -> None:
    """What is no job file is no policy file either."""
    (tmp_path / name).write_bytes(data.replace(b"{}", b"[]"))
    result = shoal(*verb, str(tmp_path / name))
    assert_one_clear_line(result)
    assert name in result.err
    assert result.code == 1


def test_what_is_no_file_at_all_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name in ("folder.yaml", "pipe.yaml", "loop.yaml", "missing.yaml", "x" * 5000 + ".yaml"):
        assert_one_clear_line(shoal("run", str(tmp_path / name)))
        assert_one_clear_line(shoal("policy", "set", str(tmp_path / name)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_job_file_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("command: x")
    (tmp_path / "secret.yaml").chmod(0)
    assert_one_clear_line(shoal("run", str(tmp_path / "secret.yaml")))


@pytest.mark.parametrize(
    "args",
    [
        ["status"],
        ["ps"],
        ["ps", "--json"],
        ["nodes"],
        ["logs", "j1"],
        ["logs", "-f", "j1", "--attempt", "1", "--home", "/nowhere"],
        ["why", " j1 "],
        ["cancel", "j1", "j2"],
        ["cordon", "n1"],
        ["drain", "n1"],
        ["uncordon", "n1"],
        ["events"],
        ["policy"],
        ["policy", "set", "fair"],
        ["policy", "diff", "fair"],
        ["run", "--", "true"],
        ["run", "--wait", "--", "true"],
        ["--home", "/nowhere/at/all", "ps"],
        ["ps", "--home", "/dev/null/x"],
        ["ps", "--home", "a\0b"],
        ["ps", "--home", "x" * 5000],
    ],
    ids=lambda args: " ".join(args)[:40],
)
def test_without_a_cluster_there_is_a_line_that_says_so(
    args: list[str], shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.cluster.RETRY_S", 0)
    result = shoal(*args)
    assert_one_clear_line(result)
    assert result.code in (1, 2, 3)


@pytest.mark.parametrize(
    ("controller", "token"),
    [(b"", b"t"), (b"{}", b"t"), (b"\xff", b"t"), (b'{"url": "ftp://x", "pid": 1}', b"t")],
)
def test_a_damaged_home_is_told(
    controller: bytes, token: bytes, shoal: Shoal, tmp_path: Path
) -> None:
    (tmp_path / "controller.json").write_bytes(controller)
    (tmp_path / "token").write_bytes(token)
    assert_one_clear_line(shoal("ps", home=tmp_path))


def test_a_controller_that_is_gone_is_told_with_code_3(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    for socket in ("", ', "socket": "controller.sock"'):
        text = f'{{"url": "http://127.0.0.1:1", "pid": 1{socket}}}'
        (tmp_path / "controller.json").write_text(text)
        result = shoal("status", home=tmp_path)
        assert_one_clear_line(result)
        assert result.code == 3


def test_a_damaged_configuration_is_told_by_up(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"nodes": [')
    assert_one_clear_line(shoal("up", home=tmp_path))


@pytest.mark.parametrize("home", ["/dev/null/x", "/proc/nowhere", "x" * 5000])
def test_a_home_that_cannot_be_is_told(home: str, shoal: Shoal) -> None:
    assert_one_clear_line(shoal("up", "--nodes", "1", "--port", "0", "--home", home))


def test_a_user_without_a_home_directory_is_asked_for_one(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an unknown user id
    result = shoal("ps", "--home", "~/.shoal")
    assert_one_clear_line(result)
    assert "set HOME or SHOAL_HOME, or give --home DIR" in result.err


def test_down_without_a_cluster_is_no_error(shoal: Shoal) -> None:
    result = shoal("down")
    assert result.code == 0
    assert "nothing to do" in result.out
    assert shoal("down", "--json").out == '{\n  "stopped": 0\n}\n'

"""`shoal join` and `shoal leave` against a real cluster with TLS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import WAIT_S, until

from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import take_down
from shoal.link.wire import LinkFile
from shoal.machine.files import LINK_FILE, held
from shoal.model.joining import KeyView
from shoal.model.views import NodeView
from tests.cli.conftest import Result, Shoal, assert_one_clear_line
from tests.live.cluster import Live, live_cluster, virtual_nodes
from tests.needs import need_root

SHOAL = (sys.executable, "-m", "shoal.main")


@pytest.fixture(scope="module")
def head() -> Iterator[Live]:
    config = ClusterConfig(nodes=virtual_nodes(1), host="0.0.0.0", port=0)
    with live_cluster(config=config) as live:
        live.client.set_policy(msgspec.structs.replace(live.client.policy(), silent_after_ms=3_000))
        yield live


@pytest.fixture
def home() -> Iterator[Path]:
    """Of a machine that joins; nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="shoal-join-") as scratch:
        path = Path(scratch) / "home"
        yield path
        take_down(Home(path), lambda _: None)


def url(head: Live) -> str:
    return f"https://localhost:{head.client.url.rpartition(':')[2]}"


def token(head: Live) -> str:
    return head.home.join_token.read_text().strip()


@pytest.fixture
def machine(
    head: Live, home: Path, shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """The command line on the machine that joins; the join token is in its environment."""

    def run(*words: str, shown: str | None = None) -> Result:
        monkeypatch.setenv("SHOAL_JOIN_TOKEN", token(head) if shown is None else shown)
        return shoal(*words, home=home)

    return run


def keys(head: Live) -> list[KeyView]:
    return head.client.keys()


def node(head: Live, name: str) -> NodeView | None:
    return next((one for one in head.client.nodes() if one.id == name), None)


def state(head: Live, name: str) -> str:
    found = node(head, name)
    return found.state if found is not None else ""


def health(head: Live, name: str) -> str:
    found = node(head, name)
    return found.health if found is not None else ""


def test_a_machine_joins_runs_jobs_and_leaves(
    head: Live, home: Path, machine: Callable[..., Result]
) -> None:
    flags = ("--name", "gpu7", "--gpus", "3", "--label", "pool=a100", "--place", "b1/r2")
    joined = machine("join", url(head), *flags)
    assert joined.code == 0, joined.err
    assert joined.out.startswith(f"gpu7 joined the cluster at {url(head)}: 3 GPUs")
    until(lambda: state(head, "gpu7") == "ready")
    seen = node(head, "gpu7")
    assert seen is not None and (seen.gpus, seen.place) == (3, "b1/r2")
    job = head.run("echo on $SHOAL_NODE", gpus=3)
    assert (head.wait(job), head.output(job)) == ("succeeded", "on gpu7\n")
    lock = home / "nodes" / "gpu7" / "starter.lock"
    os.kill(int(lock.read_text()), signal.SIGKILL)
    until(lambda: not held(lock))
    again = json.loads(machine("join", url(head), "--json").out)
    until(lambda: held(lock), "a starter that was killed is started again")
    assert (again["already"], again["node"]["labels"]) == (True, {"pool": "a100"})
    (key,) = [key for key in keys(head) if key.node == "gpu7"]
    left = machine("leave")
    assert (left.code, left.out) == (0, f"gpu7 left the cluster at {url(head)}\n")
    until(lambda: key.id not in {one.id for one in keys(head)})
    assert not (home / "nodes" / "gpu7" / LINK_FILE).exists()
    assert "not in a cluster" in machine("leave").out


def test_a_machine_comes_back_with_its_own_key_and_another_cannot_take_its_name(
    head: Live,
    home: Path,
    machine: Callable[..., Result],
    shoal: Shoal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert machine("join", url(head), "--name", "m1").code == 0
    monkeypatch.setenv("SHOAL_JOIN_TOKEN", token(head))
    other = shoal("join", url(head), "--name", "m1", "--json", home=tmp_path / "other")
    assert_one_clear_line(other)
    assert "name: m1 is taken by the machine at 127.0.0.1; choose another with --name" in other.err
    assert machine("down").code == 0  # as a machine that is switched off, and reports it
    until(lambda: state(head, "m1") == "lost")
    back = machine("join", url(head), "--name", "m1", shown="")
    assert back.code == 0, back.err
    until(lambda: state(head, "m1") == "ready")
    assert machine("leave", "--now").code == 0


def test_a_node_whose_key_was_removed_is_silent_until_it_joins_again(
    head: Live, home: Path, machine: Callable[..., Result], shoal: Shoal
) -> None:
    assert machine("join", url(head), "--name", "m2").code == 0
    (key,) = [key for key in keys(head) if key.node == "m2"]
    removed = shoal("token", "remove", key.id, home=head.home.path)
    assert removed.out == f"removed the key {key.id}; it no longer grants access\n"
    until(lambda: state(head, "m2") == "silent")
    problem = home / "nodes" / "m2" / "link.problem"
    until(lambda: problem.exists() and "join again" in problem.read_text())
    gone = machine("down")
    assert gone.code == 0, gone.err
    refused = machine("join", url(head), shown="")
    assert "the head does not accept this node's key" in refused.err.splitlines()[-1]
    again = machine("join", url(head))
    assert again.code == 0, again.err
    until(lambda: state(head, "m2") == "ready")
    assert machine("leave", "--now").code == 0


def test_in_the_foreground_a_machine_stays_until_it_is_ended_and_reports_its_end(
    head: Live, home: Path
) -> None:
    words = ("join", url(head), "--foreground", "--name", "lot1", "--home", str(home))
    env = {**os.environ, "SHOAL_JOIN_TOKEN": token(head)}
    # Without an order: the head sends a node away at once that is of an order it never placed.
    more = ("--origin", "spot", "--taint", "spot", "--ends-in", "3600")
    process = subprocess.Popen([*SHOAL, *words, *more], env=env, stderr=subprocess.DEVNULL)
    until(lambda: health(head, "lot1") == "ready")
    folder = home / "nodes" / "lot1"
    spec = json.loads((folder / "spec.json").read_text())
    assert (spec["origin"], spec["taints"]) == ("spot", ["spot"])
    assert json.loads((folder / "ends.json").read_text())["why"] == "its time limit"
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    until(lambda: health(head, "lot1") == "lost")
    marks = [os.fsencode(f"SHOAL_AGENT_DIR={folder}"), os.fsencode(f"SHOAL_NODE_DIR={folder}")]
    assert not [pid for pid in pids() if any(mark in environment(pid) for mark in marks)]


def test_an_ordinary_user_joins(head: Live) -> None:
    need_root()
    with tempfile.TemporaryDirectory(prefix="shoal-user-") as scratch:
        os.chmod(scratch, 0o755)
        place = Path(scratch) / "theirs"
        place.mkdir()
        os.chown(place, 65_534, 65_534)
        # It may read everything, because the interpreter may be in root's home, and nothing else.
        right = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
        user = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *right)
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "SHOAL_JOIN_TOKEN": token(head),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }

        def theirs(*words: str) -> subprocess.CompletedProcess[str]:
            argv = [*user, *SHOAL, *words]
            return subprocess.run(argv, env=env, cwd=place, capture_output=True, text=True)

        done = theirs("join", url(head), "--name", "theirs", "--gpus", "9")
        assert done.returncode == 0, done.stderr
        try:
            job = head.run("id -u", gpus=9)
            assert (head.wait(job), head.output(job)) == ("succeeded", "65534\n")
        finally:
            assert theirs("leave", "--now").returncode == 0


REFUSALS = [
    (("join", "https://192.0.2.1:99999"), "is not an address like https://head:7700"),
    (("join", "http://192.0.2.1:7700"), "is not encrypted"),
    (("join", "localhost:1"), "no response from http://localhost:1"),
    (("join", "{url}", "--label", "pool"), "--label: write NAME=VALUE"),
    (("join", "{url}", "--label", "a b=c"), "--label: names and values"),
    (("join", "{url}", "--label", "node=x"), "--label: node is the node's own name"),
    (("join", "{url}", "--taint", "a b"), "--taint: write a word such as spot"),
    (("join", "{url}", "--name", "A B"), "--name: 'A B' is not a name"),
    (("join", "{url}", "--name", "n1"), "n1 is taken by one of the head's own nodes"),
    (("join", "{url}", "--order", "x" * 20), "--order: is set by an engine"),
    (("join", "{url}", "--gpus", "1000"), "--gpus: must be from 0 to 256"),
    (("join", "{url}", "--place", "a b"), "--place: write block/rack"),
    (("join", "{url}", "--node-ip", "here"), "--node-ip: 'here' is not an address"),
    (("join", "{url}", "--ends-in", "5", "--ends-at", "6"), "--ends-at: cannot be combined"),
    (
        ("join", "{url}", "--token-file", "/no/such"),
        "--token-file: /no/such: No such file or directory\n",
    ),
    (("join", "{plain}"), "this port speaks TLS; use https:// instead of http://"),
]


@pytest.mark.parametrize(("words", "text"), REFUSALS, ids=[text for _, text in REFUSALS])
def test_what_is_wrong_with_a_join_is_one_clear_line(
    head: Live, machine: Callable[..., Result], words: tuple[str, ...], text: str
) -> None:
    plain = f"http://localhost:{url(head).rpartition(':')[2]}"
    given = [word.format(url=url(head), plain=plain) for word in words]
    result = machine(*given, "--json")
    assert_one_clear_line(result)
    assert text in result.err


TOKENS = [
    (lambda text: "", "a join token is needed: copy the file join-token of the head's home"),
    (lambda text: "secret", "this is not a join token"),
    (lambda text: text.replace("_", "_x", 2), "the join token or key is wrong"),
    (lambda text: f"{text[:-4]}0000", "is not the one of the join token"),
    (lambda text: text.partition(".")[0], "this system does not trust the certificate"),
]


@pytest.mark.parametrize(("change", "text"), TOKENS, ids=[text for _, text in TOKENS])
def test_what_is_wrong_with_a_join_token_is_one_clear_line(
    head: Live,
    machine: Callable[..., Result],
    change: Callable[[str], str],
    text: str,
) -> None:
    result = machine("join", url(head), "--name", "odd", "--json", shown=change(token(head)))
    assert_one_clear_line(result)
    assert text in result.err


def test_a_certificate_for_other_names_is_refused_with_the_fix(
    head: Live, machine: Callable[..., Result]
) -> None:
    result = machine("join", url(head).replace("localhost", "127.0.0.2"), "--json")
    assert_one_clear_line(result)
    assert "on the head: shoal up --node-address 127.0.0.2" in result.err


def test_a_head_is_not_a_member_and_a_member_is_not_a_head(
    head: Live, home: Path, machine: Callable[..., Result], shoal: Shoal
) -> None:
    inside = shoal("join", url(head), "--json", home=head.home.path)
    assert_one_clear_line(inside)
    assert "a cluster is up in" in inside.err
    assert "stop the cluster with: shoal down" in shoal("leave", home=head.home.path).err
    assert machine("join", url(head), "--name", "m3").code == 0
    assert "is in another cluster as m3" in machine("up", "--nodes", "1", "--port", "0").err
    assert "is in that cluster as m3" in machine("join", url(head), "--name", "m4").err
    assert machine("leave", "--now").code == 0


def test_the_join_token_is_replaced_and_keys_are_listed(head: Live, shoal: Shoal) -> None:
    before = token(head)
    made = shoal("token", "rotate", "join", home=head.home.path)
    assert made.out.strip() == token(head) != before
    assert before.partition(".")[2] == token(head).partition(".")[2]
    listed = shoal("token", "keys", home=head.home.path)
    assert "(join token)" in listed.out
    assert token(head).split("_")[2] not in listed.out
    file = msgspec.json.encode(keys(head))
    assert token(head).split("_")[2].encode() not in file


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_a_key_is_private(head: Live, home: Path, machine: Callable[..., Result]) -> None:
    assert machine("join", url(head), "--name", "m5").code == 0
    path = home / "nodes" / "m5" / LINK_FILE
    key = msgspec.json.decode(path.read_bytes(), type=LinkFile).key.encode()
    assert path.stat().st_mode & 0o077 == 0
    secret, own = token(head).partition(".")[0].encode(), os.fsencode(path.parent)
    agents = [environment(pid) for pid in pids() if own in environment(pid)]
    assert agents, "its keeper and its agent carry the folder"
    for found in agents:
        assert key not in found and secret not in found
    log = b"".join(file.read_bytes() for file in path.parent.glob("*.log"))
    assert key not in log and token(head).encode() not in log
    assert key not in head.home.controller_log.read_bytes()
    job = head.run("env", gpus=0)
    head.wait(job)
    assert "SHOAL_JOIN_TOKEN" not in head.output(job)
    assert machine("leave", "--now").code == 0

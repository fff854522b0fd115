"""Two real clusters with TLS between them: jobs go there and come back, once, whatever dies or is
cut in between; and neighbors that lie harm nobody else."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from harness.waiting import WAIT_S, until

from shoal import __version__
from shoal.client import Address, ShoalError
from shoal.control.home import ClusterConfig
from shoal.model.identity import Role
from shoal.model.kept import Kind as Folder
from shoal.model.neighbor import Neighbor
from shoal.model.neighbor_views import NewNeighbor
from shoal.model.people import NewToken
from shoal.model.session import Kind, SessionRequest
from shoal.sessions import forward
from tests.live.cluster import Live, live_cluster, virtual_nodes

WEST = "west"


class Cable:
    """What lies between the clusters. While it is cut, nothing passes and nobody is told. A trap
    catches the next large message of home, which is a submission: offers say only how large a job
    is. It is lost, or only the answer to it is."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = threading.Event()
        self._whole.set()
        self._trap = ""
        self.caught = threading.Event()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._trap = ""
        self.caught.clear()
        self._whole.set()

    def trap(self, what: str) -> None:
        self._trap = what

    def close(self) -> None:
        self.mend()
        self._door.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            near.close()
            return
        for one, other, outward in ((near, far, True), (far, near, False)):
            threading.Thread(target=self._pass, args=(one, other, outward), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, outward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self._whole.wait()
                if outward and self._trap and len(data) > LARGE:
                    trap, self._trap = self._trap, ""
                    if trap == ANSWER:
                        other.sendall(data)
                    self.cut()
                    self.caught.set()
                    if trap == QUESTION:
                        self._whole.wait()
                        break
                    continue
                other.sendall(data)
            self._whole.wait()
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


QUESTION, ANSWER = "question", "answer"
LARGE = 10_000  # bytes


class Pair(NamedTuple):
    home: Live
    west: Live
    cable: Cable
    token: str

    def add(self, name: str = WEST) -> None:
        known(self.home, name, f"https://127.0.0.1:{self.cable.port}", self.token)

    def submit(self, script: str, **fields: Any) -> str:
        return self.home.run(script, cluster=WEST, **fields)

    def away(self, job: str) -> str:
        """Its name there; empty if it is not known there yet, or is not there."""
        shown = [one for view in self.home.client.neighbors() for one in view.jobs]
        return next((one.id for one in shown if one.job == job), "")

    def until_there(self, job: str) -> str:
        return until(lambda: self.away(job), f"{job} has not been taken")

    def until_handed(self, job: str) -> None:
        def is_away() -> bool:
            return self.home.client.job(job).state == "away"

        until(is_away, f"{job} was not handed over")

    def ended(self, job: str) -> str:
        return self.home.wait(job)


def known(live: Live, name: str, url: str, token: str) -> None:
    live.client.set_neighbor(name, NewNeighbor(url=url, token=token))


def invited(west: Live, name: str = "home") -> tuple[int, str]:
    """The port of its API, and the token with the fingerprint, as `neighbor invite` prints it."""
    west.client.add_tenant(name)
    west.client.add_user(name, {name: Role.MEMBER})
    made = west.client.add_token(
        NewToken(user=name, tenant=name, role=Role.MEMBER, only="neighbor")
    )
    address = msgspec.json.decode(west.home.address.read_bytes(), type=Address)
    port = int(address.url.rpartition(":")[2])
    return port, f"{made.secret}.{address.fingerprint.removeprefix('sha256:')}"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    there = ClusterConfig(nodes=virtual_nodes(1), host="0.0.0.0", port=0)
    with live_cluster(nodes=1) as home, live_cluster(config=there) as west:
        port, token = invited(west)
        cable = Cable(port)
        found = Pair(home, west, cable, token)
        found.add()
        try:
            yield found
        finally:
            cable.close()


@pytest.fixture
def seen() -> Iterator[Path]:
    """Where jobs of any tenant write what they did. Each tenant has a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-seen-", dir="/run" if os.geteuid() == 0 else None))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def once(path: Path, *more: str) -> str:
    """A script that writes a line when it runs."""
    return "; ".join([f"echo run >> {path}", *more])


def runs(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def packed(**files: str) -> tuple[str, bytes]:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name.replace("_", "."))
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return hashlib.sha256(body.getvalue()).hexdigest(), body.getvalue()


def test_a_job_goes_there_with_what_it_needs_and_comes_back_with_what_it_made(pair: Pair) -> None:
    home, west = pair.home.client, pair.west.client
    package, archive = packed(data_txt="from home\n")
    home.put_package(package, archive)
    home.set_secret("hf-token", b"a secret of home")
    job = pair.submit(
        'cat data.txt; echo "${#HF} $(wc -c < $SHOAL_SECRETS/key) bytes"; '
        "echo result > $SHOAL_OUTPUT/out.txt; sleep 0.5; exit 3",
        package=package,
        secrets=("hf-token=HF", "hf-token=/key"),
        name="train",
        if_cut_ms=3_600_000,
    )
    there = pair.until_there(job)
    shown = west.job(there)
    assert shown.tenant == "home"
    lease_ms = 3_600_000 // 2
    assert isinstance(shown.until_ms, int) and 0 < shown.until_ms - shown.submitted_ms <= lease_ms
    assert pair.ended(job) == "failed"
    ended = home.job(job)
    assert (ended.code, ended.attempt, "west" in ended.why) == (3, 1, True), ended.why
    assert pair.home.output(job) == "from home\n16 16 bytes\n"
    assert [file.path for file in home.files(job).files] == ["out.txt"]
    assert home.file_part(job, "out.txt").data == b"result\n"

    def secrets() -> list[str]:
        return [one.name for one in west.secrets(tenant="home")]

    until(lambda: not secrets(), "its secret stays there", secrets)


def test_output_is_followed_from_home_and_a_cancel_reaches_the_job(pair: Pair) -> None:
    home = pair.home.client
    job = pair.submit("echo begun; sleep 600")
    there = pair.until_there(job)
    until(lambda: home.logs(job, wait_s=2).data == b"begun\n", "no output")
    home.cancel(job)
    assert pair.ended(job) == "cancelled"
    assert pair.west.wait(there) == "cancelled"


def test_a_gang_that_tried_twice_there_has_one_log_for_each_member_here(
    pair: Pair, seen: Path
) -> None:
    script = f"""
        echo member $SHOAL_MEMBER
        if [ $SHOAL_MEMBER = 0 ]; then [ -e {seen}/once ] || {{ touch {seen}/once; exit 1; }}
        touch {seen}/done; fi
        until [ -e {seen}/done ]; do sleep 0.05; done"""
    job = pair.submit(script, members=2, restart="on-failure", retries=1, backoff_ms=10)
    assert pair.ended(job) == "succeeded"
    assert pair.west.client.jobs(finished=True)[0].attempt == 2
    assert pair.home.output(job, 0) == "member 0\n" * 2
    assert set(pair.home.output(job, 1).splitlines()) == {"member 1"}


@pytest.mark.parametrize("lost", [QUESTION, ANSWER])
def test_home_dies_while_it_hands_over(pair: Pair, seen: Path, lost: str) -> None:
    ran = seen / "ran"
    pair.cable.trap(lost)
    job = pair.submit(once(ran), env={"LARGE": "x" * 2 * LARGE})
    assert pair.cable.caught.wait(WAIT_S)
    assert pair.home.client.job(job).state == "away"
    if lost == ANSWER:
        until(lambda: runs(ran), "it has not come")
    pair.home.kill_controller()
    pair.cable.mend()
    assert pair.ended(job) == "succeeded"
    assert runs(ran) == 1


def test_home_dies_while_the_job_runs_there_and_before_its_end_is_stored(
    pair: Pair, seen: Path
) -> None:
    ran, ends = seen / "ran", seen / "ends"
    job = pair.submit(once(ran, f"until [ -e {ends} ]; do sleep 0.05; done", "echo done"))
    there = pair.until_there(job)
    pair.home.kill_controller()
    pair.cable.cut()
    ends.touch()
    assert pair.west.wait(there) == "succeeded"
    assert pair.home.client.job(job).state == "away"
    pair.home.kill_controller()
    pair.cable.mend()
    assert pair.ended(job) == "succeeded"
    assert (runs(ran), pair.home.output(job)) == (1, "done\n")


def test_the_host_dies_while_it_is_given_a_job_and_while_it_runs_it(pair: Pair, seen: Path) -> None:
    ran, ends = seen / "ran", seen / "ends"
    job = pair.submit(once(ran, f"until [ -e {ends} ]; do sleep 0.05; done"))
    pair.until_handed(job)
    pair.west.kill_controller()
    there = pair.until_there(job)
    until(lambda: runs(ran), "it does not run")
    pair.west.kill_controller()
    ends.touch()
    assert pair.ended(job) == "succeeded"
    assert pair.west.client.job(there).state == "succeeded"
    assert runs(ran) == 1


def test_a_cut_while_it_is_given_a_job_and_a_cancel_meanwhile(pair: Pair, seen: Path) -> None:
    """Both are cancelled at home while nothing passes: one runs there, the other may be there."""
    ran, late = seen / "ran", seen / "late"
    runs_there = pair.submit(once(ran, "sleep 600"))
    there = pair.until_there(runs_there)
    until(lambda: runs(ran), "it does not run")
    on_its_way = pair.submit(once(late, "sleep 600"))
    pair.until_handed(on_its_way)
    pair.cable.cut()
    for job in (runs_there, on_its_way):
        pair.home.client.cancel(job)
        assert pair.home.client.job(job).state == "away"  # nobody knows yet
    assert pair.west.client.job(there).finished_ms is None
    pair.cable.mend()
    assert pair.ended(runs_there) == pair.ended(on_its_way) == "cancelled"
    assert pair.west.wait(there) == "cancelled"
    assert runs(ran) == 1 and runs(late) <= 1
    live = pair.west.client.jobs()
    assert not live, live


def test_neighbors_are_refused_that_cannot_be_neighbors(pair: Pair) -> None:
    url = f"https://127.0.0.1:{pair.cable.port}"
    for name, at, token, why in (
        ("again", url, pair.token, "is a neighbor already, as west"),
        ("any", url, pair.token, "not a name"),
        ("other", url, f"{pair.token[:-4]}0000", "not the one that the token names"),
        ("other", url, "shoal_00000000_wrong", "does not trust"),
        ("other", "http://192.0.2.1:7700", pair.token, "not encrypted"),
    ):
        with pytest.raises(ShoalError, match=why):
            known(pair.home, name, at, token)
    with pytest.raises(ShoalError, match="is this cluster itself"):
        known(pair.west, "self", url, pair.token)


ANSWERS = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    with listener.accept()[0] as end:
        end.sendall(b"from there\\n")
"""


TRAINS = """
cd $SHOAL_CHECKPOINT_DIR; n=$(cat step 2>/dev/null || echo 0); echo "begins at $n"
head -c 9000000 /dev/urandom > weights
until [ -e {end} ]; do n=$((n + 1)); echo $n > .new; mv .new step; sleep 0.1; done"""


class Trained(NamedTuple):
    """A job that trains at home, then elsewhere, then at home."""

    pair: Pair
    job: str

    def saved(self) -> list[str]:
        """What of it is at the head of home."""
        found = self.pair.home.client.files(self.job, kind=Folder.CHECKPOINT).files
        return [file.path for file in found]

    def begun(self) -> list[int]:
        """The steps at which it began, by attempts of home: here, there, and here again."""
        home = self.pair.home.client
        numbers = range(1, home.job(self.job).attempt + 1)
        logs = [home.logs(self.job, attempt=number) for number in numbers]
        return [int(log.data.split()[-1]) for log in logs if log.data]

    def until_begun(self, times: int) -> None:
        home = self.pair.home.client
        until(lambda: len(self.begun()) == times, "not begun", lambda: home.job(self.job).why)


def trained(pair: Pair, end: Path, **fields: Any) -> Trained:
    made = Trained(pair, pair.home.run(TRAINS.format(end=end), cluster="any", gpus=1, **fields))
    until(lambda: "step" in made.saved(), "nothing of it is at the head", made.saved)
    return made


@pytest.mark.parametrize("dies", [False, True])
def test_saved_work_goes_there_and_comes_back(pair: Pair, seen: Path, *, dies: bool) -> None:
    """A node here is drained, then the host ends the job: each time it goes on where it was, also
    if both controllers are killed while its work is on its way."""
    home, west = pair.home.client, pair.west.client
    one = trained(pair, seen / "end")
    if dies:
        pair.cable.trap(QUESTION)
    home.change_node("n1", "drain")
    if dies:
        assert pair.cable.caught.wait(WAIT_S)
        pair.home.kill_controller()
        pair.west.kill_controller()
        pair.cable.mend()
    there = pair.until_there(one.job)
    one.until_begun(2)
    until(lambda: west.files(there, kind=Folder.CHECKPOINT).files, "nothing of it is at the host")
    home.change_node("n1", "uncordon")
    west.cancel(there)
    one.until_begun(3)
    (seen / "end").touch()
    assert pair.ended(one.job) == "succeeded"
    first, second, third = one.begun()
    assert first == 0 < second < third
    assert "step" in one.saved() and "weights" in one.saved()


@pytest.mark.soak
def test_a_cut_loses_the_work_of_half_a_minute(pair: Pair, seen: Path) -> None:
    """What it saved there before is here, and it goes on from that when its lease is over."""
    home = pair.home.client
    one = trained(pair, seen / "end", if_cut_ms=60_000)
    home.change_node("n1", "drain")
    there = pair.until_there(one.job)
    one.until_begun(2)
    before = {file.path: file for file in home.files(one.job, kind=Folder.CHECKPOINT).files}

    def newer() -> bool:
        found = home.files(one.job, kind=Folder.CHECKPOINT).files
        return any(before[file.path] != file for file in found if file.path == "step")

    until(newer, "nothing came back")
    pair.cable.cut()
    assert pair.west.wait(there) == "cancelled"  # by itself
    home.change_node("n1", "uncordon")
    one.until_begun(3)
    pair.cable.mend()
    (seen / "end").touch()
    assert pair.ended(one.job) == "succeeded"
    first, second, third = one.begun()
    assert first == 0 < second < third


def test_a_job_there_is_entered_from_here(pair: Pair) -> None:
    """By commands, and by a port that is forwarded. Nobody else's meeting leads there."""
    job = pair.home.client.submit(pair.home.spec(sys.executable, "-c", ANSWERS, cluster=WEST)).id
    there = pair.until_there(job)
    port = int(until(lambda: pair.home.output(job), "it does not run"))
    for words, code in (("echo $SHOAL_REF", 0), ("exit 3", 3)):
        exec_ = ["-m", "shoal.main", "exec", job, "--", "sh", "-c", words]
        done = subprocess.run(
            [sys.executable, *exec_],
            env={**os.environ, "SHOAL_HOME": str(pair.home.home.path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert done.stdout == (f"{there}.1.0\n" if not code else ""), done.stderr
    with forward(pair.home.client, job, port) as forwarded:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", forwarded.port), 60) as end:
                assert end.makefile().readline() == "from there\n"
    asked = SessionRequest(kind=Kind.EXEC, meeting="0" * 32, key="0" * 32)
    assert pair.home.client.open_session(job, asked).node == WEST  # which nobody will enter
    pair.home.client.cancel(job)
    assert pair.ended(job) == "cancelled"


def test_tenants_that_do_not_trust_each_other_are_two_tenants_there(pair: Pair) -> None:
    home, west = pair.home.client, pair.west.client
    home.add_tenant("lab")
    policy = home.policy()
    home.set_policy(
        msgspec.structs.replace(policy, neighbors=(Neighbor(name="west-lab", tenants=("lab",)),))
    )
    _, token = invited(pair.west, "home-lab")
    known(pair.home, "west-lab", f"https://127.0.0.1:{pair.cable.port}", token)
    try:
        job = pair.home.run("id -u", cluster="west-lab", tenant="lab")
        there = pair.until_there(job)
        assert west.job(there).spec.tenant == "home-lab"
        own = pair.submit("id -u")
        assert pair.ended(own) == pair.ended(job) == "succeeded"
        alike = pair.home.output(own) == pair.home.output(job)
        assert alike is (os.geteuid() != 0)
        kept = pair.home.run("id -u", cluster=WEST, tenant="lab")
        why = "west: the policy names no tenants for it"
        until(lambda: home.job(kept).why.startswith(why), why, lambda: home.job(kept).why)
        home.cancel(kept)
    finally:
        home.remove_neighbor("west-lab")
        home.set_policy(policy)


def test_a_neighbor_is_declared_gone(pair: Pair, seen: Path) -> None:
    """Its jobs of ours wait here again. If it comes back, what it still runs of them is ended."""
    ran = seen / "ran"
    job = pair.submit(once(ran, "sleep 600"))
    there = pair.until_there(job)
    until(lambda: runs(ran), "it does not run")
    home = pair.home.client
    with pytest.raises(ShoalError, match="1 job of ours is there"):
        home.remove_neighbor(WEST)
    pair.cable.cut()
    assert any(job in line and "twice" in line for line in home.neighbor_gone(WEST).lines)
    assert home.remove_neighbor(WEST, gone=True).note == "1 of our jobs were there"
    until(lambda: home.job(job).state == "waiting", "it is not back")
    assert not home.neighbors()
    home.cancel(job)
    assert pair.ended(job) == "cancelled"
    pair.cable.mend()
    pair.add()
    assert pair.west.wait(there) == "cancelled"


# -- hosts that lie --------------------------------------------------------------------------------


class Liar(BaseHTTPRequestHandler):
    """Answers as a host does, but for what it was told to do otherwise."""

    protocol_version = "HTTP/1.1"
    does: str
    cluster: str
    ours: str

    def do_GET(self) -> None:
        """A list of what it has of ours, with a job that another host runs."""
        row = {"id": "j1", "state": "running", "labels": {"home": self.ours}, "tenant": "root"}
        self._answer([row] if self.does == "talks-nonsense" else [])

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", "0"))
        asked = msgspec.json.decode(self.rfile.read(size) or b"[]")
        if self.path == "/v1/offers":
            if self.does == "hangs" and asked:
                time.sleep(3600)
            offers = [{"start_ms": 0, "price": 0.0, "why": "\x1b[31m"}] * (len(asked) + 5)
            self._answer(
                {
                    "offers": offers,
                    "now_ms": -(10**15),
                    "version": __version__,
                    "gpus": 10**18,
                    "gpus_free": -1,
                    "cluster": self.cluster,
                    "labels": {"region" * 1000: "\x1b[31m"},
                }
            )
        elif self.does == "floods":
            self.send_response(201)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            piece = b"10000\r\n" + b"[" * 0x10000 + b"\r\n"
            with contextlib.suppress(OSError):
                for _ in range(300 << 4):
                    self.wfile.write(piece)
        else:
            self._answer(
                {"id": "j7\n", "state": "nonsense", "finished_ms": 5, "attempt": -(10**30)}
            )

    def _answer(self, body: Any) -> None:
        data = msgspec.json.encode(body)
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_hosts_that_lie_flood_or_hang_harm_nobody_else(pair: Pair, seen: Path) -> None:
    home, ran = pair.home.client, seen / "ran"
    good = pair.submit(once(ran, "sleep 1"))
    pair.until_there(good)
    cluster = (pair.home.home.path / "cluster-id").read_text().strip()
    servers = []
    for number, does in enumerate(("hangs", "floods", "talks-nonsense")):
        ours = f"{cluster}.{good}.1"
        kind = type("Kind", (Liar,), {"does": does, "cluster": f"0000000{number}", "ours": ours})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), kind))
        servers[-1].daemon_threads = True
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{servers[-1].server_port}"
        known(pair.home, does, url, "shoal_00000000_whatever")
    bad = [
        home.submit(pair.home.spec("true", cluster=one)).id for one in ("floods", "talks-nonsense")
    ]
    asked = home.submit(pair.home.spec("true", cluster="hangs")).id
    for job in bad:
        pair.until_handed(job)
    assert pair.ended(good) == "succeeded"
    assert runs(ran) == 1
    job = pair.submit(once(ran))
    assert pair.ended(job) == "succeeded"

    def well() -> list[str]:
        return [one.name for one in home.neighbors() if not one.problem]

    until(lambda: well() == [WEST], "who is well", well)
    assert home.job(asked).state == "waiting"
    for job, name in zip(bad, ("floods", "talks-nonsense"), strict=True):
        home.remove_neighbor(name, gone=True)
        home.cancel(job)
        assert pair.ended(job) == "cancelled"
    home.remove_neighbor("hangs")
    home.cancel(asked)
    for server in servers:
        server.shutdown()
        server.server_close()

"""Sessions of tenants with jobs on a machine that joined, over TLS: who gets in, and what they are
there."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.waiting import WAIT_S, until

from shoal.client import Client, ShoalError
from shoal.control.home import ClusterConfig
from shoal.engines.linked.joining import prepare
from shoal.model.identity import Role
from shoal.model.node import JOINED, NodeSpec
from shoal.model.people import NewToken
from shoal.model.session import Kind
from shoal.sessions import Forward
from shoal.sessions.session import Session
from tests.live.cluster import Live, live_cluster, virtual_nodes
from tests.needs import need_root

GOOD, EVIL = 61_901, 61_902
LISTEN = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    listener.accept()[0].sendall(b"hello")
"""


class Site:
    """Two tenants with a job each on the same joined node, which listens on a port."""

    def __init__(self, live: Live) -> None:
        self.live = live
        live.client.add_tenant("good", uid=GOOD)
        live.client.add_tenant("evil", uid=EVIL)
        self.good = self.client("anna", "good", Role.MEMBER)
        self.evil = self.client("eve", "evil", Role.MEMBER)
        self.viewer = self.client("vera", "good", Role.VIEWER)
        self.job, self.port = self.listening(self.good)
        self.other, self.other_port = self.listening(self.evil)

    def client(self, user: str, tenant: str, role: Role) -> Client:
        self.live.client.add_user(user, {tenant: role})
        made = self.live.client.add_token(NewToken(user=user, tenant=tenant, role=role))
        port = self.live.client.url.rpartition(":")[2]
        certificate = (self.live.home.path / "tls" / "ca.pem").read_text()
        return Client(f"https://127.0.0.1:{port}", made.secret, certificate=certificate)

    def listening(self, client: Client) -> tuple[str, int]:
        spec = self.live.spec(sys.executable, "-c", LISTEN, cpu_milli=20_000)
        job = client.submit(spec).id
        until(lambda: client.logs(job).data.endswith(b"\n"), more=lambda: client.job(job))
        return job, int(client.logs(job).data)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    need_root()
    config = ClusterConfig(nodes=virtual_nodes(1), host="0.0.0.0", port=0)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-far-") as scratch,
        live_cluster(config=config) as live,
    ):
        spec = NodeSpec(id="far", cpu_milli=64_000, memory_mb=1_000, gpus=2, origin=JOINED)
        token = live.home.join_token.read_text().strip()
        port = live.client.url.rpartition(":")[2]
        folder = prepare(Path(scratch) / "home", f"https://127.0.0.1:{port}", token, spec)
        command = [sys.executable, "-m", "shoal.agent.starter", str(folder), "--foreground"]
        starter = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until(lambda: is_ready(live))
            yield Site(live)
        finally:
            starter.terminate()
            starter.wait(WAIT_S)


def is_ready(live: Live) -> bool:
    return any(one.id == "far" and one.health == "ready" for one in live.client.nodes())


def entered(client: Client, job: str, *command: str, terminal: str = "") -> tuple[int, str]:
    """Its exit code and output."""
    session = Session(client, Kind.EXEC, command=command, terminal=terminal)
    try:
        session.begin(job)
        first, got = session.fixed[0], b""

        async def read() -> bytes:
            return await first.read()

        with contextlib.suppress(ConnectionResetError):
            while data := session._thread.call(read()).result(WAIT_S):
                got += data
        assert session.over.wait(WAIT_S)
        return session.ended.code if session.ended else -1, got.decode()
    finally:
        session.close()


def test_a_tenants_session_is_its_own_user_in_its_own_files(site: Site) -> None:
    script = "id -u; echo $SHOAL_NODE $HOME; cat /proc/1/environ 2>&1 | head -1; echo > $HOME/made"
    code, said = entered(site.good, site.job, "sh", "-c", f"{script}; ls {site.live.home.path}")
    lines = said.splitlines()
    assert (code != 0, lines[0], lines[1].split()[0]) == (True, str(GOOD), "far")
    home = Path(lines[1].split()[1])
    assert (home / "made").stat().st_uid == GOOD
    assert "Permission denied" in lines[2] and "shoal.db" not in said
    code, said = entered(
        site.good, site.job, "sh", "-c", "tty; : </dev/tty && id -u", terminal="xterm"
    )
    assert (code, said.split()[1]) == (0, str(GOOD))


def test_others_do_not_get_in_and_every_session_is_in_the_audit_log(site: Site) -> None:
    for client, status in ((site.evil, 404), (site.viewer, 403)):
        with pytest.raises(ShoalError) as refused:
            entered(client, site.job, "true")
        assert refused.value.status == status
    entered(site.good, site.job, "true")
    entries = site.live.client.audit(limit=100).entries
    mine = [(one.who, one.on) for one in entries if one.verb == "sessions.open"]
    assert ("anna", f"{site.job}.0 exec") in mine
    assert ("eve", f"{site.job}.0 exec") not in mine


def test_a_tenant_reaches_its_own_port_and_not_its_neighbors(site: Site) -> None:
    told: list[str] = []

    def target() -> tuple[str, int]:
        return site.job, 0

    ports = [(0, site.port), (0, site.other_port)]
    with Forward(site.good, target, ports, told.append) as made:
        for port, wanted in zip(made.ports, (b"hello", b""), strict=True):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as end:
                got = b""
                with contextlib.suppress(ConnectionResetError):
                    got = end.recv(100)
                assert got == wanted
        until(lambda: len(told) == 1)
        assert f"no process of {site.job}.0 listens on port {site.other_port}" in told[0]

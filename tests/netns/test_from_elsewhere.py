"""People use a cluster from machines that share no disk with its head: over TLS, with tokens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hosts import Host, Net
from harness.waiting import WAIT_S

from shoal.control import certificates

SHOAL = (sys.executable, "-m", "shoal.main")
# Answers the way the head does, and even offers the head's own CA, which is no secret. But its
# certificate for the same address is its own, because the key of the head's stays on the head.
IMPOSTOR = """
import ssl, socket, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1])
listener = socket.create_server((sys.argv[2], int(sys.argv[3])))
print("up", flush=True)
while True:
    link, _ = listener.accept()
    link.settimeout(10)
    try:
        with context.wrap_socket(link, server_side=True) as secure:
            print(secure.recv(4096), flush=True)
            body = open(sys.argv[4], "rb").read()
            head = f"HTTP/1.1 200 OK\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n"
            secure.sendall(head.encode() + body)
    except OSError:
        pass
"""


class Site:
    """A head, and laptops that cannot see its files."""

    def __init__(self, net: Net) -> None:
        self.head, self.ann, self.bob = (net.add(name) for name in ("head", "ann", "bob"))
        for laptop in (self.ann, self.bob):
            for other in (self.head, self.ann, self.bob):
                if other is not laptop:
                    hidden = laptop.run("mount", "-t", "tmpfs", "none", str(other.home))
                    assert hidden.returncode == 0, hidden.stderr
        told = self.ok(
            self.head, "up", "--nodes", "1", "--gpus", "2", "--host", self.head.address, "--json"
        )
        self.url = json.loads(told)["url"]
        self.login = self.ok(self.head, "login", "--show").split()[1:]

    def call(self, host: Host, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Laptops have no home of a cluster."""
        env = {} if host is self.head else {"SHOAL_HOME": ""}
        return host.run(*SHOAL, *words, env=env, stdin=stdin, timeout_s=WAIT_S)

    def ok(self, host: Host, *words: str, stdin: str = "") -> str:
        done = self.call(host, *words, stdin=stdin)
        assert done.returncode == 0, f"{host.name}: shoal {' '.join(words)}: {done.stderr}"
        return done.stdout

    def refused(self, host: Host, *words: str, stdin: str = "") -> str:
        """The one line that says why."""
        done = self.call(host, *words, stdin=stdin)
        assert done.returncode != 0, done.stdout
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        return lines[0]

    def token(self, user: str, *more: str) -> str:
        made = json.loads(self.ok(self.head, "token", "add", user, *more, "--json"))
        return str(made["secret"])


@pytest.fixture(scope="module")
def site(net: Net) -> Iterator[Site]:
    made = Site(net)
    made.ok(made.head, "tenant", "add", "lab")
    made.ok(made.head, "user", "add", "ann", "--tenant", "lab")
    made.ok(made.head, "user", "add", "bob", "--tenant", "lab", "--role", "viewer")
    made.ok(made.ann, *made.login, "--context", "lab", stdin=made.token("ann"))
    yield made
    made.ok(made.head, "down")


def test_the_two_share_no_disk(site: Site) -> None:
    seen = site.ann.run("find", str(site.head.home), str(site.bob.home))
    assert seen.stdout.split() == [str(site.head.home), str(site.bob.home)]


def test_a_user_works_from_another_machine(site: Site) -> None:
    ann = site.ann
    assert json.loads(site.ok(ann, "whoami", "--json"))["user"] == "ann"
    job = site.ok(
        ann, "run", "-g", "1", "--", "sh", "-c", "for i in 1 2 3; do echo $i; done"
    ).strip()
    assert site.ok(ann, "logs", "-f", job).split() == ["1", "2", "3"]
    assert job in site.ok(ann, "ps", "-a")
    assert "JOB" in site.ok(ann, "top").upper()
    assert job in site.ok(ann, "events")
    assert site.ok(ann, "run", "--wait", "--", "hostname").strip() == "head"


def test_a_link_from_there_opens_the_page_over_tls(site: Site) -> None:
    link, _, code = site.ok(site.ann, "page").strip().partition("#code=")
    assert link == f"{site.url}/"
    context = ssl.create_default_context(cadata=(site.head.home / ".shoal/tls/ca.pem").read_text())
    body = json.dumps({"code": code}).encode()
    sign_in = urllib.request.Request(
        f"{link}v1/session", body, {"Content-Type": "application/json"}
    )
    with site.ann.network():
        with urllib.request.urlopen(link, timeout=60, context=context) as page:
            assert page.status == 200
        with urllib.request.urlopen(sign_in, timeout=60, context=context) as answer:
            cookie = answer.headers["set-cookie"]
    assert "; secure" in cookie.lower(), "a browser never sends it in plain"


def test_a_viewer_looks_but_does_not_cancel(site: Site) -> None:
    job = site.ok(site.ann, "run", "--", "sleep", "600").strip()
    site.ok(site.bob, *site.login, stdin=site.token("bob"))
    assert job in site.ok(site.bob, "ps")
    assert "viewer" in site.refused(site.bob, "cancel", job)
    assert "viewer" in site.refused(site.bob, "run", "--", "true")
    site.ok(site.ann, "cancel", job)


def test_a_token_that_was_removed_or_has_expired_is_refused(site: Site) -> None:
    made = json.loads(site.ok(site.head, "token", "add", "bob", "--json"))
    site.ok(site.bob, *site.login, "--context", "gone", stdin=made["secret"])
    site.ok(site.head, "token", "remove", made["token"]["id"])
    assert "token" in site.refused(site.bob, "ps", "--context", "gone")
    short = site.token("bob", "--expires", "1s")
    deadline = time.monotonic() + WAIT_S
    while site.call(site.bob, *site.login, "--context", "short", stdin=short).returncode == 0:
        assert time.monotonic() < deadline, "it does not expire"
    assert "token" in site.refused(site.bob, *site.login, "--context", "short", stdin=short)


SLOWLY = "import time\ndef slowly(x):\n    time.sleep(0.05)\n    return x + 1\n"


def test_a_map_from_there_meets_its_workers_at_the_head_whatever_is_cut_off(site: Site) -> None:
    """Nobody can connect to the laptop. Its cable is pulled in the middle, and the controller is
    killed; each result is there once."""
    ann, project = site.ann, site.ann.home / "project"
    project.mkdir()
    (project / "work.py").write_text(SLOWLY)
    (project / "in.jsonl").write_text("".join(f"{number}\n" for number in range(300)))
    closed = ("-A", "INPUT", "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP")
    ann._iptables(*closed)
    words = ("map", "work.py:slowly", "in.jsonl", "-o", "out.jsonl", "--cluster", "-n", "2")
    start = ("sh", "-c", 'cd "$0" && exec "$@"', str(project), *SHOAL, *words)
    mapping = ann.start(*start, env={"SHOAL_HOME": ""})
    done = project / "out.jsonl.part"

    def reach(lines: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done.exists() or done.read_bytes().count(b"\n") < lines:
            assert time.monotonic() < deadline, (ann.home.parent / "ann.log").read_text()
            assert mapping.poll() is None, (ann.home.parent / "ann.log").read_text()
            time.sleep(0.05)

    reach(20)
    ann.cut()
    time.sleep(1.0)  # for packets to be lost
    ann.mend()
    ann._iptables(*closed)
    reach(80)
    pid = json.loads((site.head.home / ".shoal/controller.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    assert mapping.wait(WAIT_S) == 0, (ann.home.parent / "ann.log").read_text()
    found = (project / "out.jsonl").read_text().split()
    assert found == [str(number + 1) for number in range(300)]
    ann.mend()


@contextlib.contextmanager
def impostor(site: Site, certificate: Path) -> Iterator[Path]:
    """The head is cut off, and another machine answers at its address."""
    other, log = site.bob, site.bob.home.parent / "bob.log"
    port = site.url.rpartition(":")[2]
    site.head.cut()
    other.run("ip", "address", "add", f"{site.head.address}/24", "dev", "eth0")
    before = log.stat().st_size if log.exists() else 0
    copy, stolen = other.home / "impostor.pem", other.home / "ca.pem"
    copy.write_bytes(certificate.read_bytes())
    stolen.write_bytes((site.head.home / ".shoal/tls/ca.pem").read_bytes())
    words = (sys.executable, "-c", IMPOSTOR, str(copy), site.head.address, port, str(stolen))
    process = other.start(*words)
    try:
        deadline = time.monotonic() + WAIT_S
        while b"up" not in log.read_bytes()[before:]:
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.05)
        for host in (site.ann, site.bob):
            host.run("ip", "neigh", "flush", "all")
        yield log
    finally:
        process.kill()
        process.wait(WAIT_S)
        other.run("ip", "address", "delete", f"{site.head.address}/24", "dev", "eth0")
        site.head.mend()
        site.ann.run("ip", "neigh", "flush", "all")


def test_whoever_answers_in_place_of_the_head_with_its_stolen_certificate_gets_no_token(
    site: Site, tmp_path: Path
) -> None:
    theirs = certificates.own(tmp_path / "tls", [site.head.address])
    with impostor(site, theirs.chain) as log:
        line = site.refused(site.ann, "ps")
        assert site.login[-1] in line, "the fingerprint that was expected"
        assert "someone is in between" in line
        assert "between" in site.refused(site.ann, *site.login, stdin=site_token(site))
        assert b"Bearer" not in log.read_bytes()
    assert site.ok(site.ann, "status", "--json")


def site_token(site: Site) -> str:
    kept = json.loads((site.ann.home / ".config/shoal/contexts.json").read_text())
    return str(kept["contexts"]["lab"]["token"])

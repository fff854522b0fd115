"""`shoal forward`: a port of this machine that leads to a port of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, verb

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.client import Client

PORT_MAX = 65_535
PORTS_MAX = 32


@verb(
    Argument("words", "JOB[.MEMBER] PORT[:PORT]...", "A job, and its ports.", nargs=-1),
    Option("--service", metavar="NAME", help="A service's newest replica instead of a job."),
)
def forward(words: tuple[str, ...], service: str | None, json: bool, home: Path) -> int:
    """Forward ports of this machine to ports of a running job.

    PORT is the same on both sides; LOCAL:PORT differs, and LOCAL may be 0 for
    any that is free. Without a port, the job's own $PORT is meant. The port
    is open on 127.0.0.1 only, and the connections go through the head, so
    nothing but the API has to be reachable. They reach only ports on which a
    process of that member listens. Ctrl-C ends it. If the job or the head is
    restarted, new connections work again.

    Examples:
      shoal forward j7 8888
      shoal forward j7 0:8888
      shoal forward j7.1 6006 8080:80
      shoal forward --service chat 8000:
    """
    from shoal.cli import cluster
    from shoal.cli.screen.show import note
    from shoal.forms.failure import USAGE, Failure
    from shoal.sessions import Forward

    given = list(words)
    if service is None and not given:
        raise Failure("JOB: name a job, or a service with --service; see: shoal ps", USAGE)
    job = "" if service is not None else given.pop(0)
    ports = [read_ports(word) for word in given] or [(0, 0)]
    if len(ports) > PORTS_MAX:
        raise Failure(f"PORT: at most {PORTS_MAX} at once, not {len(ports)}", USAGE)
    with cluster.connect(home) as client:
        target = target_of(client, job, service)
        name = service or job
        with Forward(client, target, ports, note) as made:
            for local, (_, remote) in zip(made.ports, ports, strict=True):
                show(name, local, remote, made.node, json)
            wait()
    return 0


def target_of(client: Client, job: str, service: str | None) -> Callable[[], tuple[str, int]]:
    """Which job and member are meant, each time a session begins."""
    from shoal.cli import cluster
    from shoal.cli.naming import named

    if service is not None:
        name = cluster.service_name(service)
        return lambda: (cluster.replica_of(client, name), 0)
    word = cluster.spelled(client, job)
    found = named(word, lambda one: cluster.on_job(client, one, lambda c: c.job(one)))
    return lambda: (found.job, found.member or 0)


def read_ports(word: str) -> tuple[int, int]:
    """The local port and the job's."""
    from shoal.forms import units
    from shoal.forms.failure import USAGE, Failure

    local, colon, remote = word.partition(":")
    parts = [local, remote] if colon else [local, local]
    if not all((part.isdecimal() and int(part[:6]) <= PORT_MAX) or not part for part in parts):
        raise Failure(
            f"PORT: {units.quoted(word)} is not a port like 8888, or two like 8080:80", USAGE
        )
    return int(parts[0] or 0), int(parts[1] or 0)


def show(name: str, local: int, remote: int, node: str, json: bool) -> None:
    if json:
        from shoal.cli.screen.show import as_json

        found = {"address": f"127.0.0.1:{local}", "job": name, "port": remote, "node": node}
        as_json(found, lines=True)
        return
    where = f"port {remote}" if remote else "$PORT"
    print(f"http://127.0.0.1:{local} -> {where} of {name} on {node}", flush=True)


def wait() -> None:
    """Until Ctrl-C."""
    import signal
    import threading

    over = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: over.set())
    try:
        while not over.wait(3600):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)

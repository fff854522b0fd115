"""This machine's part of Ray, seen from outside: configured, started, inspected, ended."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.engines.ray.render import (
    FIRST_PORTS,
    HEAD_OFFSETS,
    OFFSETS,
    RayNode,
    token_path,
)
from shoal.files import held, write_private
from shoal.kernel import claim
from shoal.ports import EngineError

Progress = Callable[[str], None]

ANSWER_TIMEOUT_S = 90.0
POLL_S = 0.1


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise EngineError("Ray is not installed here; install it with: pip install 'shoal[ray]'")


def read_node(home: Path) -> RayNode | None:
    try:
        return msgspec.json.decode((home / "ray" / "node.json").read_bytes(), type=RayNode)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise EngineError(f"{home / 'ray' / 'node.json'} is damaged ({error}); remove it") from None


def write_node(home: Path, node: RayNode) -> None:
    (home / "ray").mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(home / "ray" / "node.json", msgspec.json.format(msgspec.json.encode(node)))


def make_token(home: Path) -> None:
    """The cluster's: made by its head once, and given to each machine that joins."""
    (home / "ray").mkdir(mode=0o700, parents=True, exist_ok=True)
    if not token_path(home).exists():
        write_private(token_path(home), secrets.token_hex(32).encode())


def keep_token(home: Path, token: str) -> None:
    (home / "ray").mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(token_path(home), token.encode())


def head_of(home: Path, ip: str, node: str) -> RayNode:
    """How to start the head of this home. It keeps its old address, so that the others find it."""
    before = read_node(home)
    known = before is not None and before.leads
    first = before.first_port if before is not None and known else free_ports(home)
    return RayNode(head=f"{ip}:{first}", ip=ip, first_port=first, leads=True, node=node)


def member_of(home: Path, head: str, ip: str, node: str) -> RayNode:
    """How this machine joins the cluster whose head is there."""
    before = read_node(home)
    known = before is not None and before.head == head and not before.leads
    first = before.first_port if before is not None and known else free_ports(home)
    return RayNode(head=head, ip=ip, first_port=first, node=node)


def free_ports(home: Path) -> int:
    """The first of a hundred that nobody uses. Another home of this machine that chooses before our
    Ray listens must see that they are taken: they are, while this process and our home last."""
    for past in [known for known in _chosen if not known.exists()]:
        _chosen.pop(past)[1].close()
    if home in _chosen:
        return _chosen[home][0]
    offsets = [*OFFSETS.values(), *HEAD_OFFSETS.values()]
    for first in FIRST_PORTS:
        if all(_is_free(first + offset) for offset in offsets):
            claimed = claim(f"ray-{first}")
            if claimed is not None:
                _chosen[home] = (first, claimed)
                return first
    raise EngineError(
        f"no free ports for Ray: it needs a hundred in a row from {FIRST_PORTS[0]} on"
    )


_chosen: dict[Path, tuple[int, socket.socket]] = {}


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def start_keeper(home: Path) -> None:
    if held(home / "ray" / "starter.lock"):
        return
    with (home / "ray" / "starter.log").open("ab") as output:
        subprocess.run(
            [sys.executable, "-m", "shoal.engines.ray.starter", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            check=True,
        )


def wait_for_head(home: Path, node: RayNode, progress: Progress) -> None:
    host, _, port = node.head.rpartition(":")
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    progress("starting Ray")
    while time.monotonic() < deadline:
        if answers(host, int(port), 1.0):
            return
        time.sleep(POLL_S)
    raise EngineError(f"Ray did not start within {ANSWER_TIMEOUT_S:.0f} s; see {home}/ray/ray.log")


def answers(host: str, port: int, timeout_s: float) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=timeout_s):
        return True
    return False

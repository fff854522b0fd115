"""Brings this version to hosts whose nodes are in the cluster. The first failure stops the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from shoal.database.formats import packed_version
from shoal.hosts import bring
from shoal.hosts.bring import AT_ONCE_MAX, RemoteError, Ssh, Tell, Wheel, install, look, run_shoal
from shoal.hosts.spec import Facts, HostSpec, Receipt, Software, Unfit, check

REPLACE_S = 240.0


class HostVersion(msgspec.Struct, frozen=True, kw_only=True):
    """`installed`: the version on the host's disk. `runs`: that of its agent. `state`: upgraded,
    unchanged, busy, failed or untouched; empty if nobody asked for a change."""

    node: str
    host: str
    installed: str = ""
    runs: str = ""
    state: str = ""
    why: str = ""


class Cluster(Protocol):
    """Both raise Unfit."""

    def runs(self, node: str) -> str:
        """The version of the node's agent; empty before 0.6.0."""

    def replace(self, node: str, act: Callable[[], str]) -> str:
        """Calls `act` while nothing runs on the node, and waits until it is back; returns why it is
        busy. `act` returns what runs there."""


class Looking(NamedTuple):
    """What a look at any host needs."""

    cluster: Cluster
    python: str  # the version that is preferred on hosts
    tell: Tell


class Task(NamedTuple):
    """What all hosts get."""

    looking: Looking
    software: Software
    wheel: Wheel


class _Part(msgspec.Struct, frozen=True):
    """What `shoal upgrade` on the host says about a node."""

    part: str
    state: str = ""
    why: str = ""


def look_at(looking: Looking, hosts: Sequence[HostSpec], ssh: Ssh) -> list[HostVersion]:
    """What is there; changes nothing."""

    def one(spec: HostSpec) -> HostVersion:
        return _guarded(looking, spec, lambda: _found(spec, *_look(looking, spec, ssh)))

    with ThreadPoolExecutor(AT_ONCE_MAX, thread_name_prefix="host") as pool:
        return list(pool.map(one, hosts))


def upgrade(task: Task, hosts: Sequence[HostSpec], ssh: Ssh, at_once: int = 1) -> list[HostVersion]:
    """In the order of the file. After a failure no other host is begun."""
    results: dict[str, HostVersion] = {}
    waiting, lock, stop = iter(hosts), threading.Lock(), threading.Event()

    def work() -> None:
        while True:
            with lock:
                spec = None if stop.is_set() else next(waiting, None)
            if spec is None:
                return
            result = _guarded(task.looking, spec, partial(_upgrade_one, task, spec, ssh))
            results[spec.target] = result
            if result.state == "failed":
                stop.set()

    with ThreadPoolExecutor(at_once, thread_name_prefix="host") as pool:
        try:
            for done in [pool.submit(work) for _ in range(min(at_once, len(hosts)))]:
                done.result()
        finally:
            stop.set()  # also if the user interrupts it
    return [
        results.get(spec.target) or HostVersion(node=spec.node, host=spec.target, state="untouched")
        for spec in hosts
    ]


def _guarded(looking: Looking, spec: HostSpec, act: Callable[[], HostVersion]) -> HostVersion:
    try:
        result = act()
    except (RemoteError, Unfit) as error:
        result = HostVersion(node=spec.node, host=spec.target, state="failed", why=str(error))
    if result.state:
        words = f"{result.state}: {result.why}" if result.why else result.state
        looking.tell(spec.node, words)
    return result


def _look(looking: Looking, spec: HostSpec, ssh: Ssh) -> tuple[Facts, str]:
    looking.tell(spec.node, "connecting")
    facts = look(ssh, spec, looking.python)
    if spec.node not in facts.nodes:
        there = f"{', '.join(facts.nodes)} has" if facts.nodes else "no node has"
        raise Unfit(
            f"{there} joined from {facts.home} there; set name: to the node's name in the cluster, "
            "or let it join with: shoal up --hosts"
        )
    return facts, looking.cluster.runs(spec.node)


def _found(spec: HostSpec, facts: Facts, runs: str) -> HostVersion:
    return HostVersion(node=spec.node, host=spec.target, installed=facts.shoal, runs=runs)


def _upgrade_one(task: Task, spec: HostSpec, ssh: Ssh) -> HostVersion:
    cluster, _, tell = task.looking
    facts, runs = _look(task.looking, spec, ssh)
    found, version = _found(spec, facts, runs), task.software.shoal
    check(spec, task.software, facts)
    newest = max(runs, facts.shoal, key=packed_version)
    if packed_version(newest) > packed_version(version):
        raise Unfit(f"it has Shoal {newest}, and this head is {version}; upgrade the head first")
    installs = not _is_installed(task, spec, facts)
    if not installs and runs == version:
        return msgspec.structs.replace(found, state="unchanged")

    def act() -> str:
        """Only now is anything installed: an agent whose jobs run keeps the code that it is of."""
        if installs:
            tell(spec.node, f"installing Shoal {version}")
            install(ssh, spec, facts, task.wheel)
        tell(spec.node, "replacing its agent")
        busy = _replace_there(spec, ssh)
        if not busy and installs and facts.receipt is not None:
            software = msgspec.structs.replace(task.software, digest=task.wheel.digest)
            receipt = Receipt(software, facts.receipt.join)
            ssh.run(spec, bring.NOTE, stdin=msgspec.json.encode(receipt))
        return busy

    tell(spec.node, "looking whether anything runs there")
    why = cluster.replace(spec.node, act)
    if why:
        return msgspec.structs.replace(found, state="busy", why=why)
    return msgspec.structs.replace(found, installed=version, runs=version, state="upgraded")


def _is_installed(task: Task, spec: HostSpec, facts: Facts) -> bool:
    version = task.software.shoal
    if spec.python:
        if facts.shoal != version:
            raise Unfit(
                f"python: {spec.python} has Shoal {facts.shoal} there; install this version with: "
                f"{spec.python} -m pip install 'shoal=={version}'"
            )
        return True
    if not facts.shoal:
        raise Unfit(
            f"{facts.home}/venv has no Shoal there; name the node's interpreter with python: PATH, "
            "or install it with: shoal up --hosts"
        )
    if facts.receipt is None:
        return facts.shoal == version
    return facts.receipt.software == Software(version, task.wheel.digest)


def _replace_there(spec: HostSpec, ssh: Ssh) -> str:
    """What runs there, if its agent could not be replaced."""
    said = run_shoal(ssh, spec, "upgrade", "--json", timeout_s=REPLACE_S)
    try:
        parts = msgspec.json.decode(said, type=list[_Part])
    except msgspec.DecodeError:
        raise RemoteError(f"`shoal upgrade` there printed no JSON: {said[:100]!r}") from None
    one = next((part for part in parts if part.part == spec.node), None)
    if one is None:
        raise RemoteError(f"{spec.node} does not run there; start it there with: shoal join")
    return one.why if one.state == "busy" else ""

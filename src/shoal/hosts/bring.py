"""Brings hosts to the state that the file asks for, many at a time; a failure affects one host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import msgspec

from shoal.hosts import scripts
from shoal.hosts.spec import Act, Facts, HostSpec, Outcome, Receipt, Software, Unfit, plan
from shoal.hosts.ssh import RemoteError, Ssh
from shoal.hosts.wheel import Wheel

AT_ONCE_MAX = 16
INSTALL_S = 1_200.0  # a host's connection to a registry may be slow
JOIN_S = 180.0
LEAVE_S = 1_800.0  # its jobs move elsewhere first
VERIFY_S = 120.0
VERIFY_PAUSE_S = 0.5

Tell = Callable[[str, str], None]  # (node, action)


class Head(Protocol):
    """The cluster that the hosts join."""

    url: str
    token: str

    def state(self, node: str) -> str:
        """The node's health in the cluster; empty if there is no node of this name."""


class Task(NamedTuple):
    """What all hosts have in common."""

    head: Head
    software: Software
    python: str  # the version that is preferred on hosts, because functions are sent there
    wheel: Wheel
    tell: Tell


def bring(
    task: Task, wanted: Sequence[HostSpec], unwanted: Sequence[HostSpec], ssh: Ssh
) -> list[Outcome]:
    """One outcome for each host, in the order of the file, then the hosts that leave."""

    def join(spec: HostSpec) -> Outcome:
        return _guarded(task, spec, lambda begun: _bring_one(task, spec, ssh, begun))

    def leave(spec: HostSpec) -> Outcome:
        return _guarded(task, spec, lambda begun: _dismiss(task, spec, ssh, begun))

    with ThreadPoolExecutor(AT_ONCE_MAX, thread_name_prefix="host") as pool:
        # Hosts that leave go first: another host may take over a name or a machine.
        left = list(pool.map(leave, unwanted))
        return [*pool.map(join, wanted), *left]


def join_words(spec: HostSpec, url: str) -> tuple[str, ...]:
    """The arguments of `shoal` on the host; the token is sent through stdin."""
    words = ["join", url, "--name", spec.node]
    if spec.place is not None:
        words += ["--place", spec.place]
    if spec.gpus is not None:
        words += ["--gpus", str(spec.gpus)]
    for name, value in sorted(spec.labels.items()):
        words += ["--label", f"{name}={value}"]
    return tuple(words)


def _guarded(task: Task, spec: HostSpec, act: Callable[[list[Act]], str]) -> Outcome:
    """`act` returns the state, and records what it has begun."""
    begun: list[Act] = []
    why = ""
    try:
        state = act(begun)
    except (RemoteError, Unfit) as error:
        state, why = "failed", str(error)
    task.tell(spec.node, f"{state}: {why}" if why else state)
    return Outcome(host=spec.target, node=spec.node, state=state, did=tuple(begun), why=why)


def _bring_one(task: Task, spec: HostSpec, ssh: Ssh, begun: list[Act]) -> str:
    task.tell(spec.node, "connecting")
    software = task.software
    facts = look(ssh, spec, task.python)
    digest = "" if spec.python else task.wheel.digest
    wanted = Receipt(
        msgspec.structs.replace(software, digest=digest), join_words(spec, task.head.url)
    )
    in_cluster = task.head.state(spec.node) not in ("", "lost")
    acts = plan(spec, wanted, facts, in_cluster=in_cluster)
    for act in acts:
        begun.append(act)
        match act:
            case Act.LEAVE:
                task.tell(spec.node, "leaving: its jobs move elsewhere first")
                run_shoal(ssh, spec, "leave", timeout_s=LEAVE_S)
            case Act.INSTALL:
                task.tell(spec.node, f"installing Shoal {software.shoal}")
                install(ssh, spec, facts, task.wheel)
            case Act.JOIN:
                task.tell(spec.node, "joining")
                run_shoal(ssh, spec, *wanted.join, token=task.head.token, timeout_s=JOIN_S)
    if not acts:
        return "unchanged"
    task.tell(spec.node, "waiting until the node is ready")
    _verify(task.head, spec)
    ssh.run(spec, scripts.NOTE, stdin=msgspec.json.encode(wanted))
    return "joined"


def _dismiss(task: Task, spec: HostSpec, ssh: Ssh, begun: list[Act]) -> str:
    task.tell(spec.node, "leaving: it is no longer in the file")
    begun.append(Act.LEAVE)
    run_shoal(ssh, spec, "leave", timeout_s=LEAVE_S)
    ssh.run(spec, scripts.FORGET)
    return "left"


def look(ssh: Ssh, spec: HostSpec, python: str) -> Facts:
    return scripts.read_facts(ssh.run(spec, scripts.LOOK, python, spec.python or ""))


def install(ssh: Ssh, spec: HostSpec, facts: Facts, wheel: Wheel) -> None:
    ssh.run(spec, scripts.INSTALL, facts.python, wheel.name, stdin=wheel.data, timeout_s=INSTALL_S)


def run_shoal(ssh: Ssh, spec: HostSpec, *words: str, token: str = "", timeout_s: float) -> str:
    """Shoal's own command, with the host's interpreter."""
    given = spec.python or ""
    return ssh.run(
        spec, scripts.SHOAL, given, *words, stdin=f"{token}\n".encode(), timeout_s=timeout_s
    )


def _verify(head: Head, spec: HostSpec) -> None:
    deadline = time.monotonic() + VERIFY_S
    while head.state(spec.node) != "ready":
        if time.monotonic() > deadline:
            raise RemoteError(
                f"it joined, but is not ready after {VERIFY_S:.0f} s; see `shoal nodes` and the "
                "node's log there"
            )
        time.sleep(VERIFY_PAUSE_S)

"""Where the nodes of a gang learn each other's keys for their encrypted network (ADR 142)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from ipaddress import IPv6Network
from typing import NamedTuple

from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.tunnel import Far, Tunnel, TunnelEnd

Answer = Callable[[Tunnel], None]

UNIQUE_BITS = 56  # of a network's address: all that is free in fd00::/8 above 64 bits for hosts


class Joined(NamedTuple):
    end: TunnelEnd
    answer: Answer


class Tunnels:
    """In memory only: each node says its end again on a new link. There are never more than the
    nodes of attempts that are active."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._attempts: dict[tuple[str, int], dict[str, Joined]] = {}

    def joins(self, end: TunnelEnd, node: str, answer: Answer) -> None:
        """Believed of a node that has a member of the attempt, about itself."""
        job = self._state().placed.get(node, {}).get(end.ref)
        if job is None or not job.spec.encrypt_network:
            return
        self._forget()
        joined = self._attempts.setdefault((job.id, job.attempt), {})
        joined[node] = Joined(end, answer)
        nodes = list(dict.fromkeys(member.slice.node for member in job.members))
        if joined.keys() >= set(nodes):
            self._tell(job, {name: joined[name] for name in nodes})

    def _tell(self, job: Job, joined: dict[str, Joined]) -> None:
        network, nodes = network_of(job), self._state().nodes
        ends = tuple(
            Far(name, one.end.public, nodes[name].spec.address, one.end.port, str(network[number]))
            for number, (name, one) in enumerate(joined.items(), 1)
        )
        for one in joined.values():
            one.answer(Tunnel(job.id, job.attempt, str(network), ends))

    def _forget(self) -> None:
        """Attempts that are over. Few are there at any time, and only an encrypted one looks."""
        jobs = self._state().jobs
        for key in list(self._attempts):
            job = jobs.get(key[0])
            if job is None or not job.active or job.attempt != key[1]:
                del self._attempts[key]


def network_of(job: Job) -> IPv6Network:
    """A unique local network (RFC 4193) for this attempt, the same after a restart of the head."""
    about = f"{job.id} {job.attempt} {job.submitted_ms} {job.master}".encode()
    unique = int.from_bytes(hashlib.blake2b(about, digest_size=UNIQUE_BITS // 8).digest())
    return IPv6Network(((0xFD << UNIQUE_BITS | unique) << 64, 64))

"""Computes the runtime commands that turn the proxy's servers into the wanted ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_address

from shoal.gateway import quote
from shoal.gateway.render import Weights, server_options
from shoal.gateway.runtime import ActualServer
from shoal.model.service import Replica, ReplicaState, Route, Wanted

Key = tuple[str, str]  # (service, replica)


def changes(
    wanted: Wanted,
    actual: Iterable[ActualServer],
    busy: Mapping[Key, int],
    weights: Weights | None = None,
) -> list[str]:
    """Commands, in order. A server that is no longer wanted is drained; a later call deletes it,
    once `busy` shows nothing in flight. A replica that runs elsewhere now stays the same server: so
    requests that still try its old address go on at the new one."""
    there = {(server.service, server.replica): server for server in actual}
    services = {served.route.service for served in wanted.services}
    commands: list[str] = []
    for served in wanted.services:
        for replica in served.replicas:
            key = (served.route.service, replica.id)
            server = there.get(key)
            if server is None:
                commands += _add(served.route, replica, (weights or {}).get(key))
                continue
            if not _same_place(server, replica):
                commands += _move(server, replica)
            commands += _set_state(server, replica)
            del there[key]
    for key, server in there.items():
        if key[0] in services:
            commands += _remove(server, busy.get(key, 0))
    return commands


def _add(route: Route, replica: Replica, weight: int | None) -> list[str]:
    if replica.state is ReplicaState.DRAINING:
        return []  # it never got a request
    name = quote.server(route.service, replica.id)
    return [
        f"add server {name} {server_options(route, replica, weight)}",
        f"enable health {name}",
        f"enable server {name}",
    ]


def _same_place(server: ActualServer, replica: Replica) -> bool:
    there, wanted = ip_address(server.address), ip_address(replica.address)
    return (there, server.port) == (wanted, replica.port)


def _move(server: ActualServer, replica: Replica) -> list[str]:
    """Up at once: it is ready, whatever the checks of its old address have shown."""
    name = quote.server(server.service, server.replica)
    where = f"addr {quote.word(replica.address)} port {replica.port}"
    return [f"set server {name} {where}", f"set server {name} health up"]


def _set_state(server: ActualServer, replica: Replica) -> list[str]:
    name = quote.server(server.service, server.replica)
    if replica.state is ReplicaState.DRAINING:
        return [] if server.draining else [f"set server {name} state drain"]
    return [f"set server {name} state ready"] if server.draining or server.maintenance else []


def _remove(server: ActualServer, in_flight: int) -> list[str]:
    name = quote.server(server.service, server.replica)
    if in_flight:
        return [] if server.draining else [f"set server {name} state drain"]
    return [f"set server {name} state maint", f"del server {name}"]

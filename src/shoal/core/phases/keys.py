"""Requests that change join tokens and nodes' keys, and the end of a removed node's key."""

from __future__ import annotations

import msgspec

from shoal.core.state.round import Round
from shoal.core.state.state import Node
from shoal.model.events import KeyRemoved, KeySet
from shoal.model.identity import JOIN_TOKENS_MAX, KEYS_MAX
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.report import Accepted, Answer, Refused, RemoveKey, SetKey


def change_keys(round_: Round, request: SetKey | RemoveKey) -> Answer:
    match request:
        case SetKey():
            return _set_key(round_, request)
        case RemoveKey():
            return _remove_key(round_, request)


def void_keys(round_: Round, node: Node) -> None:
    """A node that was removed and is gone does not come back with its old key. While it is still
    there it keeps the key, because it has to hear that it is dismissed."""
    if node.intent is NodeIntent.REMOVED and node.health is NodeHealth.LOST:
        _void(round_, node.id, f"{node.id} is no longer part of the cluster")


def _set_key(round_: Round, request: SetKey) -> Answer:
    identity, key = round_.state.identity, request.key
    if key.until_ms and key.until_ms <= round_.now_ms:
        return Refused("expires", "is in the past; say when it ends, e.g. --expires 30d")
    before = identity.keys.get(key.id)
    if before is not None and (key.node or before.node):
        return Refused("key", f"there is a key {key.id} already")
    if key.node:
        taken = _taken(round_, request)
        if taken is not None:
            return taken
        _void(round_, key.node, f"{key.node} joined again, and has another key")
        _void_unused(round_)
        most, what = KEYS_MAX, "keys of nodes"
    else:
        most, what = JOIN_TOKENS_MAX, "join tokens"
    alike = sum(bool(other.node) == bool(key.node) for other in identity.keys.values())
    if before is None and alike >= most:
        return Refused("key", f"there are {most} {what}, which is the most; remove one")
    key = msgspec.structs.replace(key, since_ms=round_.now_ms)
    round_.emit(KeySet(at_ms=round_.now_ms, key=key, who=request.who))
    return Accepted(key.id)


def _void_unused(round_: Round) -> None:
    """Whoever has the join token could use up all keys with names that never come."""
    identity, nodes = round_.state.identity, round_.state.nodes
    known = [key for key in identity.keys.values() if key.node]
    if len(known) >= KEYS_MAX:
        unused = next((key for key in known if key.node not in nodes), None)
        if unused is not None:
            _void(round_, unused.node, f"{unused.node} never came, and keys are used up")


def _taken(round_: Round, request: SetKey) -> Refused | None:
    """Never two nodes under one name: another machine may take it only when its node is gone."""
    state, key = round_.state, request.key
    node = state.nodes.get(key.node)
    if node is None or (node.intent is NodeIntent.REMOVED and node.health is NodeHealth.LOST):
        return None
    own = {known.id for known in state.identity.keys_of(key.node)}
    # A life's number shows nothing while there is a key: two machines that start in the same second
    # have the same one. If the key was removed, its agent may have begun a life unheard of since.
    same = request.before in own or (not own and request.incarnation >= node.incarnation)
    if not node.spec.origin:
        where = "one of the head's own nodes"
    elif same or node.health is NodeHealth.LOST:
        return None
    else:
        where = f"the machine at {node.spec.address}"
    return Refused("name", f"{key.node} is taken by {where}; choose another with --name")


def _remove_key(round_: Round, request: RemoveKey) -> Answer:
    if request.key not in round_.state.identity.keys:
        message = f"there is no key {request.key}; see: shoal token list"
        return Refused("key", message, missing=True)
    round_.emit(KeyRemoved(at_ms=round_.now_ms, key=request.key, who=request.who))
    return Accepted(request.key)


def _void(round_: Round, node: str, why: str) -> None:
    for key in round_.state.identity.keys_of(node):
        round_.emit(KeyRemoved(at_ms=round_.now_ms, key=key.id, why=why))

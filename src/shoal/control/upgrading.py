"""Brings this version to a cluster that is up: the head at once, and each node of this machine when
nothing runs on it. No job is stopped for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from shoal.client import Client
from shoal.control.home import Home
from shoal.control.lifecycle import (
    LifecycleError,
    Progress,
    end_agent,
    is_up,
    read_address,
    replace_head,
)
from shoal.control.store.formats import refuse_newer
from shoal.database.formats import VERSION
from shoal.database.sqlite import SqliteDatabase
from shoal.machine.files import AGENT_LOCK, held
from shoal.model.node import NodeIntent
from shoal.model.views import NodeView
from shoal.ports import StoreDamaged, StoreError

BACK_S = 120.0  # for an agent, until it is ready again
IDLE_S = 3.0  # for members that are about to end
POLL_S = 0.1


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The head or a node. `state`: upgraded, unchanged, busy, elsewhere. An empty version is one
    before 0.6.0, or not known yet."""

    part: str
    version: str
    state: str = ""
    why: str = ""


def versions(home: Home) -> list[Part]:
    """What runs now."""
    if not is_up(home):
        raise LifecycleError(f"no cluster is up in {home.path}; start it with: shoal up")
    if _is_unheard(home):
        return [Part(part="head", version="")]
    with Client.at_home(home.path, patience_s=BACK_S) as client:
        parts = [Part(part="head", version=client.status().version)]
        return parts + [Part(part=node.id, version=node.version) for node in _present(client)]


def upgrade(home: Home, progress: Progress) -> list[Part]:
    """The head, then its own nodes, one at a time."""
    head, *nodes = versions(home)
    _check_readable(home)
    replace_head(home, progress)
    why = f"it was {head.version or '0.1'}"
    parts = [Part(part="head", version=VERSION, state="upgraded", why=why)]
    with Client.at_home(home.path, patience_s=BACK_S) as client:
        for node in _heard_again(client, {part.part for part in nodes if part.version}):
            progress(f"{node.id}: looking whether anything runs there")
            parts.append(_upgrade_node(home, client, node))
    return parts


def replace_when_idle(
    client: Client, node: NodeView, replace: Callable[[], str], command: str
) -> Part:
    """Cordons the node, so that nothing starts there meanwhile. `replace` ends its agent, which
    something starts again; it returns why it has not, or nothing. `command` is to be run again."""
    part = Part(part=node.id, version=node.version)
    opened = node.intent == "open"
    if opened:
        client.set_intent(node.id, NodeIntent.CORDONED)
    try:
        now = _when_idle(client, node.id)
        what = ", ".join(now.jobs) or replace()
        if what:
            why = f"its jobs keep running with the old agent ({what}); run `{command}` again later"
            return msgspec.structs.replace(part, state="busy", why=why)
        _wait_until_back(client, now)
    finally:
        if opened:
            client.set_intent(node.id, NodeIntent.OPEN)
    return Part(part=node.id, version=VERSION, state="upgraded")


def _is_unheard(home: Home) -> bool:
    """A head of 0.1.0 has no socket in the home, so that nobody asks it anything. It need not be
    asked: this version takes its place, and its agents obey."""
    address = read_address(home)
    return address is not None and not address.socket


def _present(client: Client) -> list[NodeView]:
    nodes = [one for one in client.nodes() if one.intent != "removed" and one.health != "lost"]
    return sorted(nodes, key=lambda one: one.id)


def _heard_again(client: Client, known: set[str]) -> list[NodeView]:
    """The nodes, once those that told the old head their version have told the new one, too. One
    that has not would be taken for an old one, and its agent ended for nothing."""
    deadline = time.monotonic() + BACK_S
    while True:
        nodes = _present(client)
        silent = [node.id for node in nodes if node.id in known and not node.version]
        if not silent or time.monotonic() > deadline:
            return nodes
        time.sleep(POLL_S)


def _check_readable(home: Home) -> None:
    """Before the old head ends: this version must be able to take over."""
    if not home.database.exists():
        return
    database = SqliteDatabase(home.database)
    try:
        refuse_newer(database)
    except StoreDamaged:
        return  # of a version without that table
    except StoreError as error:
        raise LifecycleError(str(error)) from None
    finally:
        database.close()


def _upgrade_node(home: Home, client: Client, node: NodeView) -> Part:
    part = Part(part=node.id, version=node.version)
    if node.version == VERSION:
        return msgspec.structs.replace(part, state="unchanged")
    folder = home.node(node.id)
    if node.origin and not held(folder / AGENT_LOCK):
        why = "it runs on another machine: install this version there, then: shoal upgrade"
        return msgspec.structs.replace(part, state="elsewhere", why=why)

    def replace() -> str:
        end_agent(folder)  # the head or its starter starts it again, with the new code
        return ""

    return replace_when_idle(client, node, replace, "shoal upgrade")


def _when_idle(client: Client, name: str) -> NodeView:
    """The node when nothing runs there, or after a moment."""
    deadline = time.monotonic() + IDLE_S
    while True:
        now = next((one for one in _present(client) if one.id == name), None)
        if now is None:
            raise LifecycleError(f"{name} was lost in the meantime; see: shoal nodes")
        if not now.jobs or time.monotonic() > deadline:
            return now
        time.sleep(POLL_S)


def _wait_until_back(client: Client, before: NodeView) -> None:
    deadline, found = time.monotonic() + BACK_S, "is not ready"
    while time.monotonic() < deadline:
        now = next((one for one in client.nodes() if one.id == before.id), None)
        if now is not None and now.incarnation > before.incarnation and now.health == "ready":
            if now.version == VERSION:
                return
            found = f"runs {now.version or 'a version before 0.6'}"
        time.sleep(POLL_S)
    raise LifecycleError(
        f"{before.id} {found} after {BACK_S:.0f} s; see its agent.log. Other nodes continue"
    )

"""Messages between a controller, its relay and the mailboxes, around the agents' own messages."""

from __future__ import annotations

import msgspec

from shoal.model.report import NodeGone
from shoal.wire import Heard, Log, Need, Wants

FACTS_KEY = b"shoal-facts"


class Died(msgspec.Struct, frozen=True, tag=True):
    """Mailbox to controller: the agent's lock is free on a machine that lives."""

    gone: NodeGone


FromPost = Heard | Log | Need | Wants | Died


class ToNode(msgspec.Struct, frozen=True, tag=True):
    """Engine to relay: `data` is a message for this node's agent."""

    node: str
    data: bytes


class FromNode(msgspec.Struct, frozen=True, tag=True):
    """Relay to engine: `data` is what this node's mailbox has brought, in this session with it."""

    node: str
    data: bytes
    session: int


class KnownNode(msgspec.Struct, frozen=True):
    """A node that the relay reaches. `incarnation`: the life of its agent that spoke last."""

    address: str
    incarnation: int = 0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine that wants to join must know; the relay keeps it in Ray's own store."""

    shoal: str
    ray: str
    python: str
    nodes: dict[str, KnownNode] = {}


def versions() -> tuple[str, str, str]:
    """Of Shoal, Ray and Python, here."""
    import platform
    from importlib.metadata import version

    return version("shoal"), version("ray"), platform.python_version()

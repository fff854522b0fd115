"""How a machine becomes a node: what it sends with the join token, and what it gets."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.node import Labels, NodeSpec


class Joining(msgspec.Struct, frozen=True, kw_only=True):
    """`protocol` is the number of the machine's `wire.PROTOCOL`. A machine that was this node
    before shows it by its agent's last `incarnation`, or by the `key` that it had."""

    spec: NodeSpec
    protocol: int
    shoal: Annotated[str, msgspec.Meta(max_length=40)] = ""  # the version, for messages alone
    incarnation: Annotated[int, msgspec.Meta(ge=0)] = 0
    key: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """`key` opens the node's link; it is shown in this answer and never again. `urls`: where the
    head says that nodes reach it. `certificate`: what the head offers to those who log in (PEM).
    The agent's next life has a greater number than `incarnation`. `labels`: what the engine that
    brought the machine knows of it."""

    node: str
    key: str
    urls: tuple[str, ...] = ()
    certificate: str = ""
    incarnation: int = 0
    labels: Labels = {}


class KeyView(msgspec.Struct, kw_only=True):
    """`node` is empty for a join token. `void` says why it lets no machine in."""

    id: str
    node: str
    since_ms: int
    until_ms: int
    note: str
    void: str = ""


class SecretKeyView(msgspec.Struct, kw_only=True):
    """`secret` is the whole join token. It is shown in this answer and never again."""

    key: KeyView
    secret: str


class JoinTokenView(msgspec.Struct, kw_only=True):
    """The cluster's own join token, whole."""

    token: str

"""The encrypted network of a gang's nodes: what each says of its end, and what the head answers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.job import MemberRef

# WireGuard's form of a key. The private one never leaves its node.
PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9+/]{43}=(?!\n)$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class TunnelEnd(msgspec.Struct, frozen=True):
    """Where a node is to be reached for the attempt of `ref`, one of its members there."""

    ref: MemberRef
    public: PublicKey
    port: Port


class Far(msgspec.Struct, frozen=True):
    """The end of one node, as the others need it: its key, where its packets go, and its address
    inside."""

    node: str
    public: str
    host: str
    port: int
    address: str


class Tunnel(msgspec.Struct, frozen=True):
    """All ends, in the order of the gang's nodes. Sent again when one of them has changed."""

    job: str
    attempt: int
    network: str
    ends: tuple[Far, ...]

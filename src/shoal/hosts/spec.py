"""What is wanted of a host, what was found there, and how it went."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.node import GPUS_PER_NODE_MAX, NODE_ID_PATTERN, Labels

HOST_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.:-]*(?!\n)$"  # cannot be taken for an option of ssh
USER_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]*(?!\n)$"
PLACE_PATTERN = r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*(?!\n)$"
PYTHON_PATTERN = r"^[A-Za-z0-9_./~+-]+(?!\n)$"


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host of the file. Empty fields are left to ssh or to the host."""

    host: Annotated[str, msgspec.Meta(pattern=HOST_PATTERN, max_length=253)]
    user: Annotated[str, msgspec.Meta(pattern=USER_PATTERN, max_length=64)] | None = None
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] | None = None
    name: Annotated[str, msgspec.Meta(pattern=NODE_ID_PATTERN, max_length=63)] | None = None
    place: Annotated[str, msgspec.Meta(pattern=PLACE_PATTERN, max_length=200)] | None = None
    gpus: Annotated[int, msgspec.Meta(ge=0, le=GPUS_PER_NODE_MAX)] | None = None
    labels: Labels = {}
    python: Annotated[str, msgspec.Meta(pattern=PYTHON_PATTERN, max_length=1024)] | None = None

    @property
    def node(self) -> str:
        """Its name in the cluster."""
        return self.name or self.host.lower()

    @property
    def target(self) -> str:
        """Its address in ssh's form."""
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.host}{f':{self.port}' if self.port else ''}"


class Software(msgspec.Struct, frozen=True):
    """What a node runs. `digest` is our wheel's, so that builds of one version differ; it is empty
    if the host has an interpreter of its own with Shoal."""

    shoal: str
    digest: str = ""


class Receipt(msgspec.Struct, frozen=True):
    """Left on a host when it joined: what was installed, and how it joined."""

    software: Software
    join: tuple[str, ...]


class Facts(msgspec.Struct, frozen=True):
    """What the look script found on a host."""

    home: str
    python: str = ""  # the interpreter to use; empty if none is suitable
    version: str = ""  # its version, 3.11
    found: str = ""  # unsuitable interpreters
    shoal: str = ""  # the version in the node's interpreter; empty if none
    free_mb: int = 0
    nodes: tuple[str, ...] = ()  # that have joined a cluster from its home
    receipt: Receipt | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one host; `did` is what was changed, or begun if it failed."""

    host: str
    node: str
    state: str  # joined, unchanged, left, failed
    did: tuple[str, ...] = ()
    why: str = ""

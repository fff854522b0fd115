"""What is wanted of a host, what is found on it, and the words about it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.node import GPUS_PER_NODE_MAX, NODE_ID_PATTERN

HOST_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.:-]*(?!\n)$"  # never an option of ssh
USER_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]*(?!\n)$"
PLACE_PATTERN = r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*(?!\n)$"
PYTHON_PATTERN = r"^[A-Za-z0-9_./~+-]+(?!\n)$"


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host of the file. What is left empty is as ssh, or the host itself, says."""

    host: Annotated[str, msgspec.Meta(pattern=HOST_PATTERN, max_length=253)]
    user: Annotated[str, msgspec.Meta(pattern=USER_PATTERN, max_length=64)] | None = None
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] | None = None
    name: Annotated[str, msgspec.Meta(pattern=NODE_ID_PATTERN, max_length=63)] | None = None
    place: Annotated[str, msgspec.Meta(pattern=PLACE_PATTERN, max_length=200)] | None = None
    gpus: Annotated[int, msgspec.Meta(ge=0, le=GPUS_PER_NODE_MAX)] | None = None
    python: Annotated[str, msgspec.Meta(pattern=PYTHON_PATTERN, max_length=1024)] | None = None

    @property
    def node(self) -> str:
        """Its name in the cluster."""
        return self.name or self.host.lower()

    @property
    def target(self) -> str:
        """Where it is, as one would say it to ssh."""
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.host}{f':{self.port}' if self.port else ''}"


class Software(msgspec.Struct, frozen=True):
    """What a node runs. `digest` is that of our wheel, so that a version under development is told
    apart too; it is empty where the host has an interpreter of its own with Shoal in it."""

    shoal: str
    ray: str
    python: str  # 3.11
    digest: str = ""


class Receipt(msgspec.Struct, frozen=True):
    """Left on a host by whoever joined it: what was installed, and how it joined."""

    software: Software
    join: tuple[str, ...]


class Facts(msgspec.Struct, frozen=True):
    """What one look at a host tells."""

    home: str
    python: str = ""  # the interpreter to use; empty: there is none that would do
    version: str = ""  # its version, 3.11
    found: str = ""  # interpreters that would not do
    shoal: str = ""  # the version that the node's interpreter has, if it has one
    ray: str = ""
    free_mb: int = 0
    receipt: Receipt | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it went with one host; `did` is what was changed there, or begun if it failed."""

    host: str
    node: str
    state: str  # joined, unchanged, left, failed
    did: tuple[str, ...] = ()
    why: str = ""

"""What is wanted of a host, what was found there, and how it went."""

from __future__ import annotations

import enum
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


# Plans what to do on a host, from what is wanted and what is found there. Pure.


FREE_MB_MIN = 512  # an environment takes about a third of that
PYTHON_MIN = "3.11"


class Unfit(Exception):
    """This host cannot be a node; the message has the reason and the fix."""


class Act(enum.StrEnum):
    """In this order."""

    LEAVE = "leave"
    INSTALL = "install"
    JOIN = "join"


def plan(spec: HostSpec, wanted: Receipt, facts: Facts, *, in_cluster: bool) -> tuple[Act, ...]:
    """Only what differs. A node leaves before its software or its shape changes."""
    check(spec, wanted.software, facts)
    has = facts.receipt
    install = not spec.python and (has is None or not facts.shoal or _differs(has, wanted))
    join = install or not in_cluster or has is None or has.join != wanted.join
    acts = []
    if join and has is not None:
        acts.append(Act.LEAVE)
    if install:
        acts.append(Act.INSTALL)
    if join:
        acts.append(Act.JOIN)
    return tuple(acts)


def _differs(has: Receipt, wanted: Receipt) -> bool:
    return has.software != wanted.software


def check(spec: HostSpec, wanted: Software, facts: Facts) -> None:
    """Unfit, if Shoal cannot run there."""
    if not facts.python:
        raise Unfit(_no_python(spec, facts))
    if spec.python:
        _check_given(spec.python, wanted, facts)
    elif not facts.shoal and facts.free_mb < FREE_MB_MIN:
        raise Unfit(
            f"{facts.home}: {facts.free_mb} MB are free there, and {FREE_MB_MIN} MB are needed; "
            "make room, or set SHOAL_HOME there to a larger disk"
        )


def _no_python(spec: HostSpec, facts: Facts) -> str:
    if spec.python:
        return f"python: {spec.python} is not a working interpreter there"
    found = f"; it has {facts.found}" if facts.found else ""
    return (
        f"it has no Python {PYTHON_MIN} or newer{found}; install python3 and its venv module "
        "there, or name one with python: PATH"
    )


def _check_given(python: str, wanted: Software, facts: Facts) -> None:
    major, _, minor = facts.version.partition(".")
    if (int(major or 0), int(minor or 0)) < tuple(map(int, PYTHON_MIN.split("."))):
        raise Unfit(f"python: {python} is Python {facts.version} there; use {PYTHON_MIN} or newer")
    if not facts.shoal:
        raise Unfit(
            f"python: {python} has no Shoal there; install it with: "
            f"{python} -m pip install 'shoal=={wanted.shoal}', or leave out python:"
        )

"""Sessions: what a user asks for who wants into a running member, and what its node is told."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from shoal.model.job import MEMBERS_MAX, MemberRef, Text

WORD_MAX = 256
KEY_MAX = 4096
WORDS_MAX = 1024  # of a command


class Kind(enum.StrEnum):
    EXEC = "exec"  # a process beside the member's own
    ATTACH = "attach"  # the terminal of an interactive member
    FORWARD = "forward"  # connections to ports on which the member listens
    SSH = "ssh"  # an SSH server for one connection


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sender holds a meeting open at the head, which the node enters with `key`. Without a
    command, a shell is started. `terminal` has the kind of terminal, such as xterm."""

    meeting: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}(?!\n)$")]
    key: Annotated[str, msgspec.Meta(min_length=16, max_length=WORD_MAX)]
    kind: Kind
    member: Annotated[int, msgspec.Meta(ge=0, lt=MEMBERS_MAX)] = 0
    command: Annotated[tuple[Text, ...], msgspec.Meta(max_length=WORDS_MAX)] = ()
    terminal: Annotated[str, msgspec.Meta(max_length=WORD_MAX)] = ""
    rows: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    columns: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    # ssh: the public key that may sign in, and the private key with which the server shows that it
    # got this request. Both belong to the client, whom the head knows by a token.
    public_key: Annotated[str, msgspec.Meta(max_length=KEY_MAX)] = ""
    host_key: Annotated[str, msgspec.Meta(max_length=KEY_MAX)] = ""


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """The node was told; it enters the meeting within seconds. `waking`: it was not told, because
    the job is asleep or waking; it is woken now, and the sender asks again. `why` says what it
    waits for."""

    job: str
    attempt: int
    member: int
    node: str
    waking: str = ""
    why: str = ""


class SessionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the node is told. `who` asked for it."""

    ref: MemberRef
    request: SessionRequest
    who: str = ""

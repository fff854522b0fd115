"""The secrets of this node's members: requested when one starts, in memory only, gone with it.

The files are in a file system in memory, in a folder of the node that has one for each member. The
agent keeps the values there, too, for itself, until the member's output is shipped: a next life of
the agent must hide them as well. On disk there are only names.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, quote_plus

import msgspec

from shoal.agent.faults import CannotStart
from shoal.link.sealing import Opener
from shoal.machine.exits import member_ref
from shoal.machine.kernel import CORES, NO_CORE, limit_cores, memory_folder
from shoal.model.commands import Launch, Prepare
from shoal.model.job import MemberRef
from shoal.model.secret import FILES_KEY, SealedSecrets, SecretsOf, SecretValue

log = logging.getLogger("shoal.agent")

SECRETS = "SHOAL_SECRETS"
NAMES = "secrets"  # in a member's folder on disk: it has secrets, and these are their names
VALUES = ".values"  # of all members, for the agent alone
ASKS_MAX = 60  # once a second, while a controller is connected
WAITING = "is waiting for its secrets"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[SecretValue, ...]).decode


Order = TypeVar("Order", Launch, Prepare)


class Waiting:
    def __init__(self) -> None:
        self.asks = 0
        self.opener = Opener()
        self.done: asyncio.Future[SecretsOf] = asyncio.get_running_loop().create_future()


class Secrets:
    """`want` sends a request, which may get lost; it returns whether a controller is there. `hide`
    gets what to hide in a member's output; None: it is no longer known, so nothing is shipped."""

    def __init__(
        self,
        directory: Path,
        members: Path,
        want: Callable[[MemberRef, bytes], bool],
        hide: Callable[[MemberRef, Mask | None], None],
    ) -> None:
        self._directory = directory
        self._members = members
        self._want = want
        self._hide = hide
        self._root: Path | None = None
        self._waiting: dict[MemberRef, Waiting] = {}
        self._given: dict[MemberRef, SecretsOf] = {}
        self._masks: dict[MemberRef, Mask] = {}
        self._keys: dict[MemberRef, bytes] = {}  # for kept files, until these have arrived
        self._clear_up()

    def needed(self, order: Launch | Prepare) -> bool:
        """An image may need credentials for its registry."""
        if isinstance(order, Prepare):
            return False
        wants = order.secrets or order.image or order.launcher or order.encrypt
        return bool(wants) and order.ref not in self._given

    async def get(self, order: Order) -> Order:
        """Returns the command when the member's secrets are here; raises CannotStart."""
        if isinstance(order, Prepare):
            return order
        ref = order.ref
        if self.needed(order):
            handed = await self._ask(ref)
            if handed.problem:
                raise CannotStart(f"cannot get its secrets: {handed.problem}")
            if handed.values:
                self._keep(order, handed.values)
            elif handed.registry:
                self._folder()  # the credentials are for a moment in a file there
            self._given[ref] = handed
        folder = self.folder(ref)
        if not folder:
            return order
        return msgspec.structs.replace(order, env={**order.env, SECRETS: folder})

    def variables(self, ref: MemberRef) -> dict[str, str]:
        """For the environment of this member's own process. A line end at the end is left out, as
        a shell does in $(cat FILE)."""
        given = self._given.get(ref)
        return {
            one.variable: os.fsdecode(one.value.rstrip(b"\r\n"))
            for one in (given.values if given else ())
            if one.variable and one.name != FILES_KEY
        }

    def files_key(self, ref: MemberRef) -> bytes | None:
        """To encrypt its kept files; None: it did not ask for that. Empty: it is gone."""
        return self._keys.get(ref)

    def folder(self, ref: MemberRef) -> str:
        """Where its secrets are files; empty if it has none."""
        given = self._given.get(ref)
        if given is None or all(one.variable for one in given.values):
            return ""
        return str(self._folder() / str(ref))

    def started(self, launch: Launch, pid: int | None) -> None:
        """A member with secrets leaves no core dump. Others have the limits they would have had; a
        tenant's have got theirs already."""
        if pid is not None and launch.ref in self._masks:
            limit_cores(pid, (NO_CORE, NO_CORE))
        elif pid is not None and not launch.uid:
            limit_cores(pid, CORES[0])

    def registry(self, ref: MemberRef) -> str:
        """`USER:PASSWORD` for the registry of the member's image, or nothing."""
        given = self._given.get(ref)
        return os.fsdecode(given.registry.strip()) if given else ""

    def take(self, sealed: SealedSecrets) -> None:
        waiting = self._waiting.get(sealed.ref)
        handed = waiting.opener.open(sealed) if waiting is not None else None
        if waiting is not None and handed is not None and not waiting.done.done():
            waiting.done.set_result(handed)

    def ask_again(self) -> None:
        """Called once a second and after a new connection. Without a controller it takes as long
        as it takes: nobody could be told that the member failed."""
        for ref, waiting in self._waiting.items():
            if waiting.asks >= ASKS_MAX and not waiting.done.done():
                problem = f"the controller has not sent them within {ASKS_MAX} s"
                waiting.done.set_result(SecretsOf(ref, problem=problem))
            waiting.asks += self._want(ref, waiting.opener.public)

    def ended(self, ref: MemberRef, why: str) -> str:
        """Its processes are gone, or never were. Returns the reason, without its secrets."""
        given, mask = self._given.pop(ref, None), self._masks.get(ref)
        if self._root is not None and (given is not None or mask is not None):
            shutil.rmtree(self._root / str(ref), ignore_errors=True)
        if given is not None and given.registry:  # a runtime may have said it when a pull failed
            _, _, password = given.registry.partition(b":")
            why = Mask([given.registry, password]).hide_text(why)
        return mask.hide_text(why) if mask is not None else why

    def mask(self, ref: MemberRef) -> Mask | None:
        return self._masks.get(ref)

    def forget(self, ref: MemberRef) -> None:
        """Its output is shipped, so that nothing has to be hidden any more."""
        self._keys.pop(ref, None)
        if self._masks.pop(ref, None) is not None and self._root is not None:
            with contextlib.suppress(OSError):
                (self._root / VALUES / str(ref)).unlink()

    def recall(self, ref: MemberRef) -> None:
        """A member of an earlier life, whose output is still to be shipped."""
        try:
            names = (self._members / str(ref) / NAMES).read_text().split()
        except FileNotFoundError:
            return
        mask = None
        if FILES_KEY in names:
            self._keys[ref] = b""
        try:
            values = _decode((self._folder() / VALUES / str(ref)).read_bytes())
            mask = self._masks[ref] = Mask(one.value for one in values)
            self._keys.update((ref, one.value) for one in values if one.name == FILES_KEY)
        except (OSError, CannotStart, msgspec.DecodeError):  # the machine was restarted, perhaps
            log.warning("the rest of the output of %s is withheld: it may hold its secrets", ref)
        self._hide(ref, mask)

    def close(self) -> None:
        """The node goes down, and nothing of them may stay in memory."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    # -- how -------------------------------------------------------------------------------

    async def _ask(self, ref: MemberRef) -> SecretsOf:
        waiting = self._waiting[ref] = Waiting()
        try:
            waiting.asks += self._want(ref, waiting.opener.public)
            return await waiting.done
        finally:
            del self._waiting[ref]

    def _keep(self, launch: Launch, values: tuple[SecretValue, ...]) -> None:
        """Before the member can write a byte, the agent is ready to hide them, in this life and the
        next one."""
        for one in values:
            if one.variable and one.name != FILES_KEY and b"\0" in one.value:
                problem = f"{one.name} contains a NUL byte"
                raise CannotStart(f"secrets: {problem}; use it as a file: --secret {one.name}")
        ref = launch.ref
        try:
            names = "".join(f"{one.name}\n" for one in values)
            (self._members / str(ref) / NAMES).write_text(names)
            root = self._folder()
            mask = self._masks[ref] = Mask(one.value for one in values)
            self._keys.update((ref, one.value) for one in values if one.name == FILES_KEY)
            self._hide(ref, mask)
            _write(root / VALUES / str(ref), _encode(values), 0o600, 0)
            folder = root / str(ref)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            owner = launch.uid if os.geteuid() == 0 else 0
            for one in values:
                if not one.variable:
                    _write(folder / one.name, one.value, 0o400, owner)
            if owner:  # last: until now nobody else could put anything there
                os.chown(folder, owner, -1)
        except OSError as error:
            raise CannotStart(f"cannot keep its secrets in memory: {error.strerror}") from None

    def _folder(self) -> Path:
        """Of this node, in memory. Others may look up a name in it, but not list it."""
        if self._root is None:
            root = memory_folder(self._directory)
            if root is None:
                problem = "this node has no file system in memory (tmpfs) that we may write to"
                raise CannotStart(f"secrets: {problem}, such as /dev/shm")
            with contextlib.suppress(FileExistsError):
                root.mkdir(mode=0o700)
            info = root.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                raise CannotStart(f"secrets: {root} belongs to another user; remove it")
            root.chmod(0o711 if os.geteuid() == 0 else 0o700)
            (root / VALUES).mkdir(mode=0o700, exist_ok=True)
            self._root = root
        return self._root

    def _clear_up(self) -> None:
        """An earlier life that was killed left its members' files. The values stay of those whose
        output is still here."""
        left = memory_folder(self._directory)
        if left is None or not left.exists():
            return
        with contextlib.suppress(OSError, CannotStart):
            root = self._folder()
            for path in root.iterdir():
                if path.name != VALUES:
                    shutil.rmtree(path, ignore_errors=True)
            for path in (root / VALUES).iterdir():
                if member_ref(path.name) is None or not (self._members / path.name).exists():
                    path.unlink()


def _write(path: Path, data: bytes, mode: int, owner: int) -> None:
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        if owner:
            os.fchown(handle, owner, -1)
        os.fchmod(handle, mode)
    finally:
        os.close(handle)


# Which bytes of a member's output belong to its secrets: they are replaced by asterisks.
#
# A byte is hidden if and only if it is part of a secret, in one of its usual encodings, in the
# whole output. So it does not matter in which pieces output is written, read or sent again, and
# every byte stays where it is.


LEAST_BYTES = 4  # shorter values would hide half of any output
LINE_LEAST_BYTES = 8  # of a value with several lines: "true" or "}" alone is not a secret
ENCODED_LEAST_BYTES = 6
# Long values are hidden in pieces, so that what has to be looked at around a piece stays small.
PIECE_BYTES = 1024
PIECES_MAX = 256  # of all secrets of a member: the agent looks for each of them


class Mask:
    """`reach`: how far before and after a byte one has to look to know whether it is hidden."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._pieces = [Piece(piece) for piece in pieces_of(list(values))]
        self.reach = max((len(piece.text) for piece in self._pieces), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def hide(self, data: bytes, *, cut_before: bool = False, cut_after: bool = False) -> bytes:
        """`cut_before`, `cut_after`: output is missing there, so that the rest of a secret at that
        edge is hidden, too."""
        spans = [span for piece in self._pieces for span in piece.spans(data)]
        if cut_before:
            spans.append((0, max((piece.rest_at(data) for piece in self._pieces), default=0)))
        if cut_after:
            spans.append((len(data) - self.begun(data, LEAST_BYTES), len(data)))
        hidden = bytearray(data) if any(begin < end for begin, end in spans) else None
        if hidden is None:
            return data
        for begin, end in spans:
            hidden[begin:end] = b"*" * (end - begin)
        return bytes(hidden)

    def begun(self, data: bytes, least: int = 1) -> int:
        """How many bytes at the end of `data` may be the beginning of a secret."""
        longest = max((piece.begun(data) for piece in self._pieces), default=0)
        return longest if longest >= least else 0

    def hide_text(self, text: str) -> str:
        """A short text, which may have been cut."""
        data = text.encode("utf-8", "surrogatepass")
        return self.hide(data, cut_before=True, cut_after=True).decode("utf-8", "replace")


class Piece:
    """One text to look for. If it repeats itself with a period, as `aaaa` does, its occurrences
    may overlap, and a regular expression finds a whole run of them."""

    __slots__ = ("_run", "period", "text")

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.period = _period(text)
        self._run: re.Pattern[bytes] | None = None
        if 2 * self.period <= len(text):
            unit, rest = text[: self.period], text[: len(text) % self.period]
            run = b"(?:%s){%d,}" % (re.escape(unit), len(text) // self.period)
            self._run = re.compile(run + re.escape(rest), re.DOTALL)

    def spans(self, data: bytes) -> Iterable[tuple[int, int]]:
        at = 0
        while True:
            if self._run is None:
                begin = data.find(self.text, at)
                if begin < 0:
                    return
                end, at = begin + len(self.text), begin + self.period
            else:
                found = self._run.search(data, at)
                if found is None:
                    return
                begin, end = found.span()
                at = max(begin + 1, end - self.period + 1)
            yield begin, end

    def rest_at(self, data: bytes) -> int:
        """How many bytes at the beginning of `data` are the end of this text."""
        at = self.text.find(data[:1], 1) if data else -1
        while 0 <= at <= len(self.text) - LEAST_BYTES:
            if data.startswith(self.text[at:]):
                return len(self.text) - at
            at = self.text.find(data[:1], at + 1)
        return 0

    def begun(self, data: bytes) -> int:
        """How many bytes at the end of `data` are the beginning of this text."""
        end = data[max(0, len(data) - len(self.text) + 1) :]
        at = end.find(self.text[:1])
        while at >= 0:
            if self.text.startswith(end[at:]):
                return len(end) - at
            at = end.find(self.text[:1], at + 1)
        return 0


def pieces_of(values: list[bytes]) -> list[bytes]:
    """What to look for: the values first, then their lines, then their encodings."""
    stripped = [value.strip() for value in values]
    found: dict[bytes, None] = {}
    for value in stripped:
        found.update(dict.fromkeys(_cut(value, LEAST_BYTES)))
    for value in stripped:
        lines = value.splitlines() if b"\n" in value else []
        for line in lines:
            found.update(dict.fromkeys(_cut(line.strip(), LINE_LEAST_BYTES)))
    for value in stripped:
        for encoded in _encodings(value) if len(value) >= LEAST_BYTES else ():
            found.update(dict.fromkeys(_cut(encoded, ENCODED_LEAST_BYTES)))
    return list(found)[:PIECES_MAX]


def _cut(text: bytes, least: int) -> list[bytes]:
    if len(text) < least:
        return []
    parts = [text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES)]
    if len(parts) > 1:
        parts[-1] = text[-PIECE_BYTES:]  # none is short
    return parts


def _encodings(value: bytes) -> Iterable[bytes]:
    """As programs print it: quoted for a URL or in JSON, in hexadecimal, in base64."""
    yield quote(value, safe="").encode()
    yield quote_plus(value).encode()
    yield quote(value).encode()
    text = value.decode("utf-8", "replace")
    yield json.dumps(text)[1:-1].encode()
    yield json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "replace")
    yield repr(value)[2:-1].encode()
    yield value.hex().encode()
    yield value.hex().upper().encode()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(value).rstrip(b"=")
        # Inside a longer text, `user:VALUE` for example, it looks different: three ways, of which
        # the characters that also depend on the neighbors are left out.
        for shift, lost in ((0, 0), (1, 2), (2, 3)):
            whole = (shift + len(value)) // 3 * 4 + ((shift + len(value)) % 3 * 8) // 6
            yield encode(bytes(shift) + value)[lost:whole]


def _period(text: bytes) -> int:
    """The smallest shift by which it can overlap itself."""
    border = [0] * len(text)
    for index in range(1, len(text)):
        length = border[index - 1]
        while length and text[index] != text[length]:
            length = border[length - 1]
        border[index] = length + 1 if text[index] == text[length] else 0
    return len(text) - border[-1]

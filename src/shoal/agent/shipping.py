"""Ships the members' output to the controller as it is written, and none of it twice.

A member writes to a file by itself, so nothing can slow it down. That file is the buffer for what
the controller does not have yet, and it is bounded: parts that the controller has kept are given
back to the disk, and output that piles up faster than it can be shipped loses its middle.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from shoal.agent.secrets import Mask
from shoal.machine.kernel import punch_hole
from shoal.model.job import MemberRef
from shoal.model.last_error import last_error
from shoal.model.report import LogChunk

CHUNK_BYTES = 256 * 1024
# Bytes sent but not acknowledged, at most; beyond that the files on the node are the buffer.
WINDOW_BYTES = 4 * 1024 * 1024
LAST_BYTES = 64 * 1024  # torchrun's summary has a paragraph for each rank
LAST_CHARACTERS = 300
PARTING = "[shoal: "

BLOCK_BYTES = 64 * 1024  # holes are aligned to this: no file system has larger blocks
# Output that the controller has kept stays here too for a while: if its machine crashes, the end
# of its file may be lost.
BEHIND_BYTES = 8 * 1024 * 1024
# Bounds on the disk space of output not yet shipped, for each member and for all together.
AHEAD_BYTES_MAX = 64 * 1024 * 1024
AHEAD_BYTES_LEAST = 4 * 1024 * 1024
AHEAD_BYTES_ALL = 1024 * 1024 * 1024
# An exit waits this long for the member's output to arrive; the rest of the output comes later.
EXIT_S_MAX = 10.0
# Hiding secrets takes time that the agent needs for other things: at most this much in one turn.
HIDING_S_MAX = 0.05
AGAIN_S = 0.5  # pause before output that could not be kept is sent again


class Output:
    """One member's output file: how many bytes are sent, and how many the controller has kept.
    `hole`: a part that was given back to the disk before it was sent."""

    __slots__ = (
        "again_at",
        "freed",
        "handle",
        "hole",
        "kept",
        "mask",
        "over",
        "seen",
        "sent",
        "skipped",
        "unsure",
        "withheld",
    )

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.sent = 0
        self.kept = -1  # unknown: ask the controller first
        self.freed = 0
        self.seen = 0  # its size when we last looked
        self.hole: tuple[int, int] | None = None
        self.skipped = (0, 0)  # where the last hole ended, and its length
        self.unsure = False  # there may be holes that this life does not know of
        self.again_at = 0.0  # send nothing before this time
        self.mask: Mask | None = None  # its secrets
        self.withheld = False  # it had secrets that are no longer known, so the rest stays here
        self.over = False  # nothing more will be written

    @property
    def size(self) -> int:
        return os.fstat(self.handle).st_size

    @property
    def under_way(self) -> int:
        if self.kept < 0:
            return 0
        end, length = self.skipped
        return max(0, self.sent - self.kept - (length if self.kept < end else 0))

    def answered(self, size: int) -> None:
        refused = size == self.kept < self.sent  # the controller could not keep what was sent
        if refused:
            self.again_at = time.monotonic() + AGAIN_S
        if self.kept < 0 or size < self.kept or refused:
            self.unsure |= size < max(self.freed, self.skipped[0])
            self.sent = size
            if self.unsure:
                self.hole = None
        self.kept = size

    def next(self, most: int) -> tuple[int, bytes]:
        """The next bytes and their offset, which is beyond `sent` if there is a hole in between."""
        if self.unsure and (self.hole is None or self.sent >= self.hole[1]):
            self.hole = _hole_after(self.handle, self.sent)
            self.unsure = self.hole is not None
        start = self.sent
        if self.hole is not None:
            begin, end = self.hole
            if begin <= start < end:
                start = end
            elif start < begin:
                most = min(most, begin - start)
        most = min(most, self.size - start)
        return start, os.pread(self.handle, most, start) if most > 0 else b""

    def hidden(self, start: int, data: bytes) -> bytes:
        """These bytes without the member's secrets. The end is left out if it may be the beginning
        of one: what follows decides. Zeros are what a hole reads as, so output is missing there."""
        if self.mask is None or not data:
            return data
        reach = self.mask.reach
        before = os.pread(self.handle, min(reach, start), max(0, start - reach))
        after = os.pread(self.handle, reach, start + len(data))
        lead, follow = before.rpartition(b"\0")[2], after.partition(b"\0")[0]
        cut_before = len(lead) < len(before)
        cut_after = len(follow) < len(after) or (self.over and len(after) < reach)
        whole = lead + data + follow
        shown = self.mask.hide(whole, cut_before=cut_before, cut_after=cut_after)
        held = 0 if cut_after or len(after) == reach else self.mask.begun(whole) - len(follow)
        return shown[len(lead) :][: len(data) - max(0, held)]

    def mend(self) -> int:
        """`echo problem > /dev/stderr` truncates the member's output file. Later output is moved
        behind what was sent, or it would never be recognized as new. Returns the file's size."""
        size = self.size
        if size < self.seen and self.kept >= 0:
            data = os.pread(self.handle, AHEAD_BYTES_MAX, 0)
            os.ftruncate(self.handle, self.sent)
            os.pwrite(self.handle, data, self.sent)
            self.hole, self.skipped = None, (0, 0)
            size = self.size
        self.seen = size
        return size

    def bound(self, ahead_max: int) -> None:
        """Free what the controller has kept, and the middle of a backlog over the bound."""
        size = self.mend()
        behind = _aligned(self.kept - BEHIND_BYTES)
        if behind - self.freed >= BEHIND_BYTES:
            punch_hole(self.handle, self.freed, behind)
            self.freed = behind
        begin, end = self.hole if self.hole and self.sent <= self.hole[0] else (0, 0)
        if size - self.sent - (end - begin) <= ahead_max:
            return
        edge = ahead_max // 4
        begin = begin or _aligned(self.sent + edge)
        end = _aligned(size - edge)
        if end > begin:
            punch_hole(self.handle, begin, end)
            self.hole = begin, end


class Shipping:
    def __init__(self, send: Callable[[LogChunk], None]) -> None:
        self._send = send
        self._outputs: dict[MemberRef, Output] = {}  # the most recently served is last
        self._connected_at: float | None = None
        self._hiding_s = 0.0  # spent in this turn

    def watch(self, ref: MemberRef, path: Path | str, *, fresh: bool) -> None:
        """`fresh`: the file is new, so the controller can have none of it yet."""
        output = Output(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._outputs[ref] = output
        if fresh:
            output.kept = 0
        else:
            output.unsure = True
            self._send(LogChunk(ref, 0, b""))

    def hide(self, ref: MemberRef, mask: Mask | None) -> None:
        """From now on. None: it has secrets, but they are no longer known."""
        output = self._outputs.get(ref)
        if output is not None:
            output.mask, output.withheld = mask or None, mask is None

    def reconnected(self) -> None:
        """Output sent before may be lost: ask again for every member."""
        self._connected_at = time.monotonic()
        for ref, output in self._outputs.items():
            output.kept = -1
            self._send(LogChunk(ref, 0, b""))

    def disconnected(self) -> None:
        self._connected_at = None

    def kept(self, ref: MemberRef, size: int) -> None:
        output = self._outputs.get(ref)
        if output is not None:
            output.answered(size)

    def bound_all(self) -> None:
        share = AHEAD_BYTES_ALL // max(1, len(self._outputs))
        ahead_max = min(AHEAD_BYTES_MAX, max(AHEAD_BYTES_LEAST, share))
        for output in self._outputs.values():
            with contextlib.suppress(OSError):  # one bad file must not stop all shipping
                output.bound(ahead_max)

    def pump(self, only: Collection[MemberRef] = ()) -> None:
        """Send new output as far as the window allows, a piece of each member in turn, so that one
        member's flood does not delay another's line. `only`: the others had their turn just now."""
        if not only:
            self.bound_all()
        window = WINDOW_BYTES - sum(output.under_way for output in self._outputs.values())
        now = time.monotonic()
        some = {ref: self._outputs[ref] for ref in only if ref in self._outputs}
        outputs = some if only else self._outputs
        waiting = [ref for ref, o in outputs.items() if o.kept >= 0 and o.again_at <= now]
        self._hiding_s = 0.0
        while waiting and window > 0:
            more = []
            for ref in waiting:
                sent = self._ship(ref, min(CHUNK_BYTES, window)) if window > 0 else 0
                if sent:
                    window -= sent
                    more.append(ref)
                    self._outputs[ref] = self._outputs.pop(ref)
            waiting = more

    def _ship(self, ref: MemberRef, most: int) -> int:
        output = self._outputs[ref]
        try:
            start, data = (output.size, b"") if output.withheld else output.next(most)
            if output.mask is not None:
                if self._hiding_s > HIDING_S_MAX:
                    return 0
                began = time.monotonic()
                data = output.hidden(start, data)
                self._hiding_s += time.monotonic() - began
        except OSError:  # retried later; the others go on
            return 0
        dropped = start - output.sent
        if not data and not dropped:
            return 0
        self._send(LogChunk(ref, start, data, dropped))
        if dropped:
            output.skipped = start, dropped
        output.sent = start + len(data)
        return max(1, len(data))

    def silent(self, ref: MemberRef) -> bool:
        """Has the member written nothing?"""
        output = self._outputs.get(ref)
        return output is not None and output.size == 0

    def complete(self, ref: MemberRef) -> bool:
        """Has the controller kept everything that was written by a member that has ended?"""
        output = self._outputs.get(ref)
        if output is None:
            return True
        output.over = True
        with contextlib.suppress(OSError):
            return output.mend() <= output.kept
        return output.size <= output.kept

    @property
    def done(self) -> bool:
        """Has the controller kept everything that was written so far?"""
        return all(output.size <= output.kept for output in self._outputs.values())

    def waited(self, since: float) -> bool:
        """Has the output taken so long that the exit should go first? Time without a controller
        does not count, because nobody could take the exit."""
        if self._connected_at is None:
            return False
        return time.monotonic() - max(since, self._connected_at) > EXIT_S_MAX

    def forget(self, ref: MemberRef) -> None:
        output = self._outputs.pop(ref, None)
        if output is not None:
            os.close(output.handle)


def _aligned(offset: int) -> int:
    return offset - offset % BLOCK_BYTES


def _hole_after(handle: int, offset: int) -> tuple[int, int] | None:
    """The next hole in a file."""
    size = os.fstat(handle).st_size
    try:
        begin = os.lseek(handle, offset, os.SEEK_HOLE)
        if begin >= size:
            return None
        with contextlib.suppress(OSError):
            return begin, os.lseek(handle, begin, os.SEEK_DATA)
        return begin, size
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None


def last_words(path: Path | str, mask: Mask | None = None) -> str:
    """The line that a member wrote about why it ended: usually its last, as Python prints it."""
    try:
        data = _tail(path)
    except OSError:
        return ""
    if not data:
        return ""
    if mask is not None:
        data = mask.hide(data, cut_before=True, cut_after=True)
    text = data.decode(errors="replace")
    said = "".join(c for c in last_error(text) if c.isprintable())
    return said if len(said) <= LAST_CHARACTERS else said[: LAST_CHARACTERS - 3] + "..."


def _tail(path: Path | str) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        return os.pread(handle, LAST_BYTES, max(0, size - LAST_BYTES)) if size else b""
    finally:
        os.close(handle)


def parting_words(path: Path | str, mask: Mask | None = None) -> str:
    """Why a member ended well, if its last line says so to us: [shoal: ...]."""
    said = last_words(path, mask)
    return said[len(PARTING) : -1] if said.startswith(PARTING) and said.endswith("]") else ""


def append(path: Path | str, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)

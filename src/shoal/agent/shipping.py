"""Ships the members' output to the controller as it is written, and none of it twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shoal.model.job import MemberRef
from shoal.model.report import LogChunk

CHUNK_BYTES = 256 * 1024
# What may be under way without an answer; beyond it the files on the node are the buffer.
WINDOW_BYTES = 4 * 1024 * 1024
LAST_BYTES = 4096
LAST_CHARACTERS = 300


class Output:
    """One member's output file: so much is sent, so much is known to be kept."""

    __slots__ = ("handle", "kept", "sent")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.sent = 0
        self.kept = -1  # not known: the controller is asked first


class Shipping:
    def __init__(self, send: Callable[[LogChunk], None]) -> None:
        self._send = send
        self._outputs: dict[MemberRef, Output] = {}

    def watch(self, ref: MemberRef, path: Path, *, fresh: bool) -> None:
        """`fresh`: the file was just made, so the controller can have none of it yet."""
        output = Output(os.open(path, os.O_RDONLY | os.O_CREAT, 0o600))
        self._outputs[ref] = output
        if fresh:
            output.kept = 0
        else:
            self._send(LogChunk(ref, 0, b""))

    def reconnected(self) -> None:
        """What was under way may be lost: ask anew for every member."""
        for ref, output in self._outputs.items():
            output.kept = -1
            self._send(LogChunk(ref, 0, b""))

    def kept(self, ref: MemberRef, size: int) -> None:
        output = self._outputs.get(ref)
        if output is not None:
            if output.kept < 0 or size < output.kept:
                output.sent = size
            output.kept = size

    def pump(self) -> None:
        """Send what was written since, as far as the window allows."""
        window = WINDOW_BYTES - sum(
            output.sent - output.kept for output in self._outputs.values() if output.kept >= 0
        )
        for ref, output in self._outputs.items():
            while output.kept >= 0 and window > 0:
                data = os.pread(output.handle, min(CHUNK_BYTES, window), output.sent)
                if not data:
                    break
                self._send(LogChunk(ref, output.sent, data))
                output.sent += len(data)
                window -= len(data)

    def complete(self, ref: MemberRef) -> bool:
        """Is all that was written kept by the controller?"""
        output = self._outputs.get(ref)
        return output is None or os.fstat(output.handle).st_size <= output.kept

    def forget(self, ref: MemberRef) -> None:
        output = self._outputs.pop(ref, None)
        if output is not None:
            os.close(output.handle)


def last_words(path: Path) -> str:
    """The last line that a member wrote: mostly the reason of its end, as Python prints it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = "".join(c for c in lines[-1] if c.isprintable()) if lines else ""
    return said if len(said) <= LAST_CHARACTERS else said[: LAST_CHARACTERS - 3] + "..."

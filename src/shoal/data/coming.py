"""A volume whose files come to the node as they are read: it asks for the shards that are next."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.data.arrival import Source
from shoal.data.shards import DataError
from shoal.model.volume import READERS

AHEAD_MIN, AHEAD_MAX = 2, 64  # shards that are asked for before their turn
READY_BEFORE_LESS = 32  # shards in a row that nobody waited for
GONE_S = 120.0  # whoever fetches was killed, and is started again
SILENT_S = 900.0  # a shard that does not come
AGAIN_S = 0.1
LISTS_MAX = 100


class Whole(Exception):
    """All of it is here."""


class Coming(Source):
    """Asks whoever fetches the volume on this node, at a socket in its folder. Without the socket,
    all of it is here."""

    _ahead: int
    _ready: int

    def __init__(self, label: str, folder: str, match: str) -> None:
        self._folder, self.label = folder, label
        super().__init__(label, folder, self._sizes(), match)
        self._begin()

    def path(self, name: str) -> str:
        until = time.monotonic() + SILENT_S
        with self._more:
            while name not in self._here and not self._whole:
                if name not in self._wants:
                    self._want((name, *self._wants))
                if self._problem:
                    raise DataError(f"{self.label}: {self._problem}")
                if time.monotonic() > until:
                    raise DataError(f"{self.label}: {name} has not come in {SILENT_S / 60:.0f} min")
                self._more.wait(SILENT_S)
        return super().path(name)

    def coming(self, names: Sequence[str], *, waited: bool) -> None:
        """More are asked for when the loop had to wait for one, and fewer when it did not for a
        while."""
        with self._more:
            if self._whole:
                return
            self._ready = 0 if waited else self._ready + 1
            if waited:
                self._ahead = min(AHEAD_MAX, 2 * self._ahead)
            elif self._ready % READY_BEFORE_LESS == 0:
                self._ahead = max(AHEAD_MIN, self._ahead - 1)
            self._want([name for name in names[: 1 + self._ahead] if name not in self._here])

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: self.__dict__[name] for name in ("label", "root", "sizes", "names", "_folder")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # -- the line to whoever fetches -------------------------------------------------------

    def _begin(self) -> None:
        """Also in the worker of a loader, which has a line of its own."""
        self._here: set[str] = set()
        self._wants: tuple[str, ...] = ()
        self._ahead, self._ready = AHEAD_MIN, 0
        self._whole, self._problem = False, ""
        self._line: socket.socket | None = None
        self._more = threading.Condition()
        self._hears = False
        _open.add(self)

    def _sizes(self) -> dict[str, int]:
        said: dict[str, Any] = {}
        for _ in range(LISTS_MAX):
            line = self._connect()
            if line is None:
                raise Whole
            with contextlib.suppress(OSError), line, line.makefile("rb") as answers:
                line.sendall(b'{"list":true}\n')
                said = json.loads(answers.readline() or b"{}")
            if "files" in said:
                return {path: size or 0 for path, size in said["files"]}
            time.sleep(AGAIN_S)
        raise DataError(f"{self.label}: {said.get('problem') or 'its files cannot be listed'}")

    def _connect(self) -> socket.socket | None:
        """None: all of it is here. A path may be too long for a socket, so it is reached through a
        handle of the folder."""
        until = time.monotonic() + GONE_S
        while os.path.exists(os.path.join(self._folder, READERS)):
            line = socket.socket(socket.AF_UNIX)
            handle = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                line.connect(f"/proc/self/fd/{handle}/{READERS}")
                return line
            except OSError as error:
                line.close()
                if time.monotonic() > until:
                    what = f"nobody fetches it any more ({error.strerror or error})"
                    raise DataError(f"{self.label}: {what}; the node's log says why") from None
            finally:
                os.close(handle)
            time.sleep(AGAIN_S)
        return None

    def _want(self, names: Sequence[str]) -> None:
        """The caller holds the lock."""
        wants = tuple(dict.fromkeys(names))
        if wants == self._wants:
            return
        self._wants = wants
        if not self._hears:
            self._hears = True
            threading.Thread(target=self._hear, name="shoal-coming", daemon=True).start()
        elif self._line is not None:
            self._ask(self._line)

    def _ask(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError):  # `_hear` notices
            line.sendall(json.dumps({"want": self._wants}).encode() + b"\n")

    def _hear(self) -> None:
        try:
            while (line := self._connect()) is not None:
                with line:
                    for said in self._lines(line):
                        with self._more:
                            self._here.update([said["here"]] if "here" in said else ())
                            self._problem = said.get("problem", self._problem)
                            self._more.notify_all()
                time.sleep(AGAIN_S)
            with self._more:
                self._whole = True
                self._more.notify_all()
        except DataError as error:
            with self._more:
                self._problem = str(error).removeprefix(f"{self.label}: ")
                self._more.notify_all()

    def _lines(self, line: socket.socket) -> Iterator[dict[str, Any]]:
        """Until whoever fetches has ended."""
        with self._more:
            self._line = line
            self._ask(line)
        try:
            with line.makefile("rb") as answers:
                for text in answers:
                    yield json.loads(text)
        except (OSError, ValueError):
            pass
        finally:
            with self._more:
                self._line = None


_open: weakref.WeakSet[Coming] = weakref.WeakSet()


def _forked() -> None:
    for source in list(_open):
        source._begin()


os.register_at_fork(after_in_child=_forked)

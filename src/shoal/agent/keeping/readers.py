"""The readers of a volume whose files are fetched as they are read: processes of its members.

They connect to a socket in its folder, and send lines of JSON: `{"list": true}`, which is answered
with all its files and their sizes, and `{"want": [...]}`, the files that they read next, in this
order. `{"here": FILE}` tells them that they may. The socket is there until the volume is whole: one
that nobody answers means that the fetch was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from typing import Any

from shoal.agent.blocks.store import FILES, Holding
from shoal.model.volume import READERS

READERS_MAX = 512  # processes; one that is turned away tries again
WANTED_MAX = 1_000  # files, of one reader and of all


class Reader:
    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.wants: list[int] = []
        self.told: set[int] = set()
        self._lock = threading.Lock()

    def say(self, **words: Any) -> None:
        with self._lock:
            self.line.sendall(json.dumps(words).encode() + b"\n")


class Readers:
    """`check` says why a file that has arrived must not be read; empty if it may be."""

    def __init__(self, holding: Holding, check: Callable[[str], str]) -> None:
        self.all = False
        self._holding, self._check = holding, check
        self._numbers = {path: number for number, (path, _) in enumerate(holding.layout.files)}
        self._readers: list[Reader] = []
        self._checked: dict[int, str] = {}
        self._more = threading.Condition()
        self._checking = threading.Lock()
        self._over = False
        self._path = os.path.join(FILES, READERS)  # relative: a longer one may not fit
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._path)
        os.chmod(self._path, 0o777)  # a container's user; nobody else gets into the folder
        self._socket.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def files(self) -> list[int]:
        """What is wanted next: first what each reader waits for."""
        with self._more:
            turns = zip_longest(*(reader.wants for reader in self._readers))
        found = dict.fromkeys(one for turn in turns for one in turn if one is not None)
        return list(islice(found, WANTED_MAX))

    def arrived(self) -> None:
        with self._more:
            self._more.notify_all()

    def close(self) -> None:
        """All of it is here."""
        os.unlink(self._path)
        self._socket.close()

    def fail(self, why: str) -> None:
        """No more will come."""
        with self._more:
            self._over = True
            readers = list(self._readers)
        for reader in readers:
            with contextlib.suppress(OSError):
                reader.say(problem=why)

    # -- how -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                return
            with self._more:
                reader = Reader(line)
                if len(self._readers) >= READERS_MAX or self._over:
                    line.close()
                    continue
                self._readers.append(reader)
            for work in (self._hear, self._tell):
                threading.Thread(target=work, args=(reader,), daemon=True).start()

    def _hear(self, reader: Reader) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError), reader.line:
            for line in reader.line.makefile("rb"):
                self._obey(reader, json.loads(line))
        with self._more:
            self._readers.remove(reader)
            self._more.notify_all()

    def _obey(self, reader: Reader, said: dict[str, Any]) -> None:
        if said.get("list"):
            reader.say(files=self._holding.layout.files)
        numbers = [self._numbers[path] for path in said.get("want", ()) if path in self._numbers]
        with self._more:
            reader.wants = numbers[:WANTED_MAX]
            self._more.notify_all()

    def _tell(self, reader: Reader) -> None:
        with contextlib.suppress(OSError):
            for number in self._arriving(reader):
                path = self._holding.layout.files[number][0]
                problem = self._problem(number, path)
                reader.say(**({"problem": problem} if problem else {"here": path}))

    def _arriving(self, reader: Reader) -> Iterator[int]:
        """What it wants, as it becomes whole."""
        while True:
            with self._more:
                if reader not in self._readers:
                    return
                wants = [one for one in reader.wants if one not in reader.told]
                number = next(filter(self._holding.is_whole, wants), -1)
                if number < 0:
                    self._more.wait()
                    continue
                reader.told.add(number)
            yield number

    def _problem(self, number: int, path: str) -> str:
        with self._checking:
            if number not in self._checked:
                try:
                    self._checked[number] = self._check(path)
                except Exception as error:  # of any library that fsspec uses
                    self._checked[number] = f"{path} cannot be looked at: {error}"
            return self._checked[number]

"""The last tours and storage checks, which outlive the controller that heard them."""

from __future__ import annotations

import msgspec

from shoal.control.history.store import HistoryFile, Whole
from shoal.core.state.heard import Touring
from shoal.core.state.state import State
from shoal.model.fabric import Fabric

TOURS_KEPT = 8
PREFIX = "t/"


class KeptTour(msgspec.Struct, frozen=True):
    """`fabric` is what followed from it."""

    tour: Touring
    fabric: Fabric


class Measured:
    """The newest is in memory; the others are read when somebody asks."""

    def __init__(self, file: HistoryFile) -> None:
        self._file = file
        self._unsaved: KeptTour | None = None
        self.last: KeptTour | None = None

    def look(self, state: State) -> None:
        for tour in state.heard.tours.values():
            if tour.ended_ms is None or tour.about or (self.last and self.last.tour.id == tour.id):
                continue
            fabric = state.fabric if state.fabric.id == tour.id else Fabric()
            self.last = self._unsaved = KeptTour(tour, fabric)

    def restore(self) -> None:
        """In the history's thread, as all below."""
        for key in reversed(self._file.keys(PREFIX)):
            if (found := self._read(key)) is not None:
                self.last = found
                return

    def find(self, tour: str) -> KeptTour | None:
        if self.last is not None and self.last.tour.id == tour:
            return self.last
        return self._read(PREFIX + tour)

    def save(self) -> None:
        kept, self._unsaved = self._unsaved, None
        if kept is None:
            return
        whole: Whole = (PREFIX + kept.tour.id, kept.tour.ended_ms, msgspec.msgpack.encode(kept))
        self._file.write(b"", [whole])
        if old := self._file.keys(PREFIX)[:-TOURS_KEPT]:
            self._file.drop(old)

    def _read(self, key: str) -> KeptTour | None:
        body = self._file.read(key)
        try:
            return None if body is None else msgspec.msgpack.decode(body, type=KeptTour)
        except msgspec.DecodeError:
            return None  # written by another version

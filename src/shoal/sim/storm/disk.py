"""The simulated store: what survives a crash of the controller, as bytes and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.core.state.apply import replay
from shoal.core.state.invariants import Violation
from shoal.core.state.state import Snapshot, State
from shoal.model.events import Event
from shoal.model.job import Job

_encoder = msgspec.json.Encoder()
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_snapshot_decoder = msgspec.json.Decoder(Snapshot)


class Disk:
    """The log of events, and at most one snapshot with its position in the log."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.keys: dict[str, str] = {}  # submission key -> finished job
        self._snapshot: tuple[int, bytes] | None = None

    def append(self, events: Sequence[Event], finished: Sequence[Job] = ()) -> None:
        self.log += map(_encoder.encode, events)
        for job in finished:
            if job.key in self.keys:
                raise Violation(f"{self.keys[job.key]} and {job.id} have the same key")
            if job.key:
                self.keys[job.key] = job.id

    def keep_snapshot(self, state: State) -> None:
        self._snapshot = (len(self.log), image_of(state))

    def load(self) -> State:
        """The state as it was at the last commit: from the snapshot if there is one."""
        if self._snapshot is None:
            return self.load_from_start()
        position, image = self._snapshot
        state = State.restore(_snapshot_decoder.decode(image))
        return replay(state, map(_event_decoder.decode, self.log[position:]))

    def load_from_start(self) -> State:
        return replay(State(), map(_event_decoder.decode, self.log))


def image_of(state: State) -> bytes:
    """Two states are equal if and only if their images are."""
    return _encoder.encode(state.snapshot())

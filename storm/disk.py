"""The simulated store: what survives a crash of the controller, as bytes and nothing else."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

import msgspec

from shoal.core.invariants import Violation
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state import image
from shoal.core.state.apply import replay
from shoal.core.state.events.log import Event
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.lean import lean
from shoal.model.report import Ended
from shoal.ports import StoreError, Used
from storm.witness import Witness

_encoder = msgspec.json.Encoder()
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_job_decoder = msgspec.json.Decoder(Job)


class Fault(enum.StrEnum):
    """How a write fails. The caller cannot tell one from the other."""

    REFUSED = "before it was stored"
    UNCERTAIN = "after it was stored"


class Disk:
    """The log of events, and at most one snapshot with its position in the log.

    The faults are those of the next commits, snapshots and loads, one call each."""

    def __init__(self, witness: Witness | None = None) -> None:
        self.log: list[bytes] = []
        self.commit_faults: deque[Fault] = deque()
        self.snapshot_faults: deque[Fault] = deque()
        self.load_faults = 0
        self._witness = witness or Witness()
        self._keys: dict[str, str] = {}  # submission key -> finished job
        self._ended: dict[str, Ended] = {}
        self._arrays: dict[str, bytes] = {}  # the records of arrays that have finished
        self._snapshot: tuple[int, bytes] | None = None

    def mend(self) -> None:
        self.commit_faults.clear()
        self.snapshot_faults.clear()
        self.load_faults = 0

    def used(self, next_job: int, epoch: int) -> Used:
        return Used(next_job, epoch)

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        fault = self.commit_faults.popleft() if self.commit_faults else None
        if fault is Fault.REFUSED:
            raise StoreError("the disk is full")
        self.log += [_encoder.encode(lean(event)) for event in events]
        for job in finished:
            again = self._arrays.pop(job.id, None)
            if job.elements is not None:
                self._arrays[job.id] = _encoder.encode(job)
            if job.key in self._keys and again is None:
                raise Violation(f"{self._keys[job.key]} and {job.id} have the same key")
            if job.outcome is not None:
                name = job.spec.name or ""
                ended = Ended(job.id, job.spec.tenant, job.outcome, job.why, name)
                self._ended[job.id] = ended
            if job.key:
                self._keys[job.key] = job.id
        self._witness.committed(events)
        if fault is Fault.UNCERTAIN:
            raise StoreError("the disk did not answer in time")
        return len(self.log)

    def job(self, job_id: str) -> Job | None:
        """Of finished jobs, only arrays are asked for."""
        found = self._arrays.get(job_id)
        return None if found is None else _job_decoder.decode(found)

    def keyed(self, key: str) -> str | None:
        return self._keys.get(key)

    def ended(self, job_id: str) -> Ended | None:
        return self._ended.get(job_id)

    def snapshot(self, seq: int, body: bytes) -> list[str]:
        fault = self.snapshot_faults.popleft() if self.snapshot_faults else None
        if fault is not Fault.REFUSED:
            self._snapshot = (seq, body)
        if fault is not None:
            raise StoreError("the snapshot cannot be written")
        return []

    def load(self) -> tuple[State, int]:
        """The state as it was at the last commit: from the snapshot if there is one."""
        if self.load_faults:
            self.load_faults -= 1
            raise StoreError("the file is locked")
        if self._snapshot is None:
            return self.load_from_start(), len(self.log)
        position, body = self._snapshot
        state = restore(image.decoded(body), FUNCTIONS)
        return replay(state, map(_event_decoder.decode, self.log[position:])), len(self.log)

    def load_from_start(self) -> State:
        return replay(State(FUNCTIONS), map(_event_decoder.decode, self.log))


def image_of(state: State) -> bytes:
    """Two states are equal if and only if their images are."""
    return _encoder.encode(state.snapshot())

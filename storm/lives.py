"""The lives of virtual processes: none lives twice, and none takes another's GPU."""

from __future__ import annotations

from collections.abc import Container, Iterator

from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from storm.witness import End


class Untruth(AssertionError):
    """The controller did or reported something that the design rules out."""


class Life:
    """One virtual process; its record outlives it."""

    __slots__ = (
        *("asleep", "code", "gone_ms", "gpu_milli", "gpus", "how", "moved_mb", "node", "ref"),
        *("started_ms", "still_ms", "stopped"),
    )

    def __init__(self, ref: MemberRef, node: str, gpus: tuple[int, ...], started_ms: int) -> None:
        self.ref = ref
        self.node = node
        self.gpus = gpus
        self.gpu_milli = 1000
        self.started_ms = started_ms
        self.code: int | None = None
        self.how: End | None = None  # None: it lives
        self.stopped = False  # it got a command to stop while it lived
        self.asleep = False  # it has no GPU
        self.moved_mb = 0  # to memory of its node, while it sleeps
        self.still_ms: int | None = None  # since then it stands still
        self.gone_ms = 0  # how long it stood still before, in all

    @property
    def done(self) -> bool:
        return self.how is End.OWN and self.code == 0 and not self.stopped

    def awake_ms(self, now_ms: int) -> int:
        """How long it has worked."""
        until_ms = now_ms if self.still_ms is None else self.still_ms
        return until_ms - self.started_ms - self.gone_ms

    def __str__(self) -> str:
        if self.how is None:
            return f"{self.ref} {'sleeps' if self.asleep else 'lives'} on {self.node}"
        return f"{self.ref} on {self.node} ended {self.how} with code {self.code}"


class Lives:
    def __init__(self) -> None:
        self.all: dict[MemberRef, Life] = {}
        self._by_node: dict[str, dict[MemberRef, Life]] = {}
        self._by_job: dict[str, dict[MemberRef, Life]] = {}

    def of_job(self, job_id: str) -> Iterator[tuple[MemberRef, Life]]:
        """The living ones."""
        yield from self._by_job.get(job_id, {}).items()

    @property
    def living(self) -> list[Life]:
        return [life for lives in self._by_node.values() for life in lives.values()]

    def on_node(self, node: str) -> Iterator[Life]:
        yield from self._by_node.get(node, {}).values()

    def start(self, node: str, launch: Launch, given_up: Container[MemberRef], now_ms: int) -> None:
        ref = launch.ref
        before = self.all.get(ref)
        # A node that lost all trace of a process cannot know that it already ran.
        if before is not None and before.how is not End.VANISHED:
            raise Untruth(f"{ref} was started a second time: {before}")
        self.must_be_free(node, launch.gpus, launch.gpu_milli, f"{ref} was started")
        for other_ref, other in self.of_job(ref.job):
            older = min(ref, other_ref)
            if other_ref.attempt != ref.attempt and older not in given_up:
                raise Untruth(f"{ref} was started while {other}")
        life = Life(ref, node, launch.gpus, now_ms)
        life.gpu_milli = launch.gpu_milli
        self.all[ref] = life
        self._by_node.setdefault(node, {})[ref] = life
        self._by_job.setdefault(ref.job, {})[ref] = life

    def must_be_free(self, node: str, gpus: tuple[int, ...], gpu_milli: int, what: str) -> None:
        """Nobody who is awake has too much of these GPUs."""
        awake = [life for life in self.on_node(node) if not life.asleep]
        for gpu in gpus:
            sharers = [other for other in awake if gpu in other.gpus]
            if sum(other.gpu_milli for other in sharers) + gpu_milli > 1000:
                raise Untruth(f"{what} on GPU {gpu} of {node} while {sharers[0]}")

    def end(self, ref: MemberRef, code: int | None, how: End) -> None:
        life = self.all[ref]
        life.code, life.how = code, how
        del self._by_node[life.node][ref]
        del self._by_job[ref.job][ref]

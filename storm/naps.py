"""Virtual members fall asleep and wake on a node: that takes time, may be refused and may fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shoal.core.nodebook import NodeBook
from shoal.model.commands import Launch, Sleep, Wake
from shoal.model.job import MemberRef
from storm.timeline import Timeline
from storm.witness import NapWitness


class Nap(NamedTuple):
    """How one nap of a member goes, if nothing else happens to it."""

    locks_ms: int = 0  # it still works for so long
    moves_ms: int = 0  # then it stands still until it sleeps
    refuses: bool = False  # it goes on instead
    wakes_ms: int = 0
    lost: bool = False  # it cannot be woken
    full: int = 0  # so often, its GPU has no room for it


class Nights:
    """What a seed decides about sleep, and who sees it. These members sleep at once and move
    nothing."""

    def __init__(self, witness: NapWitness | None = None) -> None:
        self.witness = witness or NapWitness()

    def tells(self, _node: str, /) -> bool:
        """Does the node report what members have on GPUs?"""
        return False

    def note(self, _what: str, /) -> None:
        """Something that is seldom has happened."""

    def nap(self, _ref: MemberRef, _number: int, /) -> Nap:
        return Nap()

    def gpu_mb(self, _launch: Launch, /) -> int:
        """What it has on its GPUs."""
        return 0


class Sleepy:
    """The time of one process, which stands still while it sleeps."""

    __slots__ = ("_gone_ms", "_since_ms", "naps", "refused")

    def __init__(self) -> None:
        self.naps = self.refused = 0
        self._gone_ms = 0
        self._since_ms: int | None = None

    @property
    def still(self) -> bool:
        return self._since_ms is not None

    def own_ms(self, now_ms: int) -> int:
        """The world's time without its naps."""
        return (now_ms if self._since_ms is None else self._since_ms) - self._gone_ms

    def freeze(self, now_ms: int) -> None:
        if self._since_ms is None:
            self._since_ms = now_ms

    def thaw(self, now_ms: int) -> None:
        if self._since_ms is not None:
            self._gone_ms += now_ms - self._since_ms
            self._since_ms = None


class Naps:
    """Does what the node's book says about sleep. `clock`: of a process, None if it has ended.
    `wakened`: it goes on. `dies`: it cannot."""

    def __init__(
        self,
        timeline: Timeline,
        nights: Nights,
        clock: Callable[[MemberRef], Sleepy | None],
        wakened: Callable[[MemberRef], None],
        dies: Callable[[MemberRef], None],
        report: Callable[[], None],
    ) -> None:
        self._timeline = timeline
        self._witness = nights.witness
        self._nights = nights
        self._clock = clock
        self._wakened = wakened
        self._dies = dies
        self._report = report

    def sleep(self, book: NodeBook, command: Sleep) -> None:
        ref = command.ref
        clock = self._clock(ref)
        assert clock is not None, f"{ref} is to sleep, and has ended"
        clock.naps += 1
        nap = self._nights.nap(ref, clock.naps)
        began_ms = self._timeline.now_ms

        def unchanged() -> bool:
            here = self._clock(ref) is clock and ref in book.dozing
            return here and ref not in book.stopping

        def freeze() -> None:
            if unchanged():
                clock.freeze(self._timeline.now_ms)
                self._witness.froze(ref)
                self._timeline.after(nap.moves_ms, done)

        def done() -> None:
            if not unchanged():
                return
            now_ms = self._timeline.now_ms
            if nap.refuses:
                self._nights.note("member cannot sleep")
                book.refuses(ref, "the driver cannot do that")
                self._go_on(ref, clock)
            else:
                memory_mb = self._nights.gpu_mb(book.alive[ref])
                book.slept(ref, memory_mb, now_ms - began_ms)
                self._witness.fell_asleep(ref, memory_mb)
            self._report()

        self._timeline.after(nap.locks_ms, freeze)

    def wake(self, book: NodeBook, command: Wake) -> None:
        ref = command.ref
        clock = self._clock(ref)
        assert clock is not None, f"{ref} is to wake, and has ended"

        def full() -> None:
            if self._clock(ref) is clock and ref in book.waking and ref not in book.stopping:
                self._nights.note("GPU of a sleeper is full")
                book.stays_asleep(ref, "GPU 0 has 10 MB free, and it needs 20 MB")
                self._report()

        nap = self._nights.nap(ref, clock.naps)
        if clock.refused < nap.full:
            clock.refused += 1
            self._timeline.after(nap.wakes_ms, full)
            return
        clock.refused = 0
        self._witness.is_woken(ref, command.gpus)

        def done() -> None:
            if self._clock(ref) is not clock or ref not in book.waking or ref in book.stopping:
                return
            if nap.lost:
                self._nights.note("member cannot be woken")
                self._dies(ref)
                return
            book.awoke(ref, nap.wakes_ms)
            self._go_on(ref, clock)
            self._report()

        self._timeline.after(nap.wakes_ms, done)

    def release(self, ref: MemberRef) -> None:
        """It is to stop, so it goes on, without its GPUs."""
        clock = self._clock(ref)
        assert clock is not None, f"{ref} is to stop, and has ended"
        self._go_on(ref, clock)

    def _go_on(self, ref: MemberRef, clock: Sleepy) -> None:
        clock.thaw(self._timeline.now_ms)
        self._witness.goes_on(ref, clock.own_ms(self._timeline.now_ms))
        self._wakened(ref)

"""The book: events and beats in, amounts out; no millisecond is forgotten and none counts twice.
Pure: what it says follows from what it was told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.ledger import clock, members
from shoal.ledger.accounts import HOUR_MS, Place
from shoal.ledger.jobs import JOBS, hear_load
from shoal.ledger.mirror import Mirror
from shoal.ledger.nodes import settle_nodes
from shoal.ledger.pages import Entry, Pages
from shoal.ledger.power import hear_power
from shoal.ledger.rooms import ROOMS, Handlers
from shoal.model import events as ev
from shoal.model.progress import Progress
from shoal.model.report import Report
from shoal.model.service import ServiceLoad

HANDLERS: Handlers = {**JOBS, **ROOMS}


class Book:
    def __init__(self, mirror: Mirror | None = None) -> None:
        self.pages = Pages(mirror)

    @property
    def mirror(self) -> Mirror:
        return self.pages.mirror

    def take(self, event: ev.Event) -> None:
        """What happened, in the order of the log."""
        clock.advance(self.pages, event.at_ms)
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self.pages, event)

    def advance(self, now_ms: int) -> None:
        clock.advance(self.pages, now_ms)

    def stepped(self, report: Report, events: Sequence[ev.Event], now_ms: int) -> None:
        """One step: what it heard explains the time before its events."""
        self.advance(now_ms)
        for inventory in report.nodes:
            self.hear(inventory.progress)
            members.hear_idle(self.pages, inventory.spec.id, inventory.idle)
            if inventory.sample is not None:
                hear_power(self.pages, inventory.spec.id, inventory.sample)
        self.hear((), report.services)
        for event in events:
            self.take(event)

    def hear(self, progress: Iterable[Progress], loads: Iterable[ServiceLoad] = ()) -> None:
        """What members and the gateway say; to be heard before the events of the same step."""
        for one in progress:
            members.hear(self.pages, one)
        for load in loads:
            hear_load(self.pages, load)

    def settle(self) -> None:
        """Book all that is certain by now."""
        settle_nodes(self.pages)

    def drain(self) -> list[Entry]:
        return self.pages.drain()

    def open(self) -> dict[Place, int]:
        """What members' time since their last beat is taken for until they tell, up to now."""
        now_ms = self.mirror.now_ms
        amounts: dict[Place, int] = {}
        for job_id, job in self.mirror.jobs.items():
            for member in job.members.values():
                mark_ms = member.mark_ms
                for account, ms, _ in members.pending_parts(job, member, now_ms):
                    end_ms = mark_ms + ms
                    while mark_ms < end_ms:
                        hour = mark_ms // HOUR_MS
                        until_ms = min(end_ms, (hour + 1) * HOUR_MS)
                        place = Place(hour, member.node, job_id, account)
                        amount = (until_ms - mark_ms) * member.milli
                        amounts[place] = amounts.get(place, 0) + amount
                        mark_ms = until_ms
        return amounts

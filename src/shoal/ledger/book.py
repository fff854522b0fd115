"""The book turns events and beats into amounts. No millisecond is lost or counted twice.
Pure: the amounts follow from the events and beats alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.ledger import clock, members
from shoal.ledger.accounts import HOUR_MS, Place
from shoal.ledger.book_state import BookState
from shoal.ledger.free_time import settle_nodes
from shoal.ledger.job_events import JOB_HANDLERS, hear_load
from shoal.ledger.naps import settle_naps
from shoal.ledger.node_events import NODE_HANDLERS, Handlers
from shoal.ledger.postings import Posting, Postings
from shoal.ledger.power import hear_power
from shoal.ledger.sleep_events import SLEEP_HANDLERS
from shoal.model import events as ev
from shoal.model.progress import Progress
from shoal.model.report import Report
from shoal.model.service import ServiceLoad

HANDLERS: Handlers = {**JOB_HANDLERS, **SLEEP_HANDLERS, **NODE_HANDLERS}


class Book:
    def __init__(self, cluster: BookState | None = None) -> None:
        self.postings = Postings(cluster)

    @property
    def cluster(self) -> BookState:
        return self.postings.cluster

    def take(self, event: ev.Event) -> None:
        """Take one event, in the order of the log."""
        if type(event) is ev.ControllerStarted:
            members.unheard(self.postings, event.at_ms)
        clock.advance(self.postings, event.at_ms)
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self.postings, event)

    def advance(self, now_ms: int) -> None:
        clock.advance(self.postings, now_ms)

    def stepped(self, report: Report, events: Sequence[ev.Event], now_ms: int) -> None:
        """Take one step: what it heard explains the time before its events."""
        self.advance(now_ms)
        for inventory in report.nodes:
            members.hear_alive(self.postings, inventory.spec.id, inventory.alive)
            self.hear(inventory.progress)
            members.hear_idle(self.postings, inventory.spec.id, inventory.idle)
            if inventory.sample is not None:
                hear_power(self.postings, inventory.spec.id, inventory.sample)
        for still in report.still:
            if still.sample is not None:
                hear_power(self.postings, still.node, still.sample)
        self.hear((), report.services)
        for event in events:
            self.take(event)

    def hear(self, progress: Iterable[Progress], loads: Iterable[ServiceLoad] = ()) -> None:
        """Take what members and the gateway report, before the events of the same step."""
        for one in progress:
            members.hear(self.postings, one)
        for load in loads:
            hear_load(self.postings, load)

    def settle(self) -> None:
        """Book everything that is certain by now."""
        settle_nodes(self.postings)
        settle_naps(self.postings)

    def drain(self) -> list[Posting]:
        return self.postings.drain()

    def open(self) -> dict[Place, int]:
        """How members' time since their last beat would be booked now."""
        now_ms = self.cluster.now_ms
        amounts: dict[Place, int] = {}
        for job_id, job in self.cluster.jobs.items():
            for member in job.members.values():
                if member.lent:
                    continue
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

"""A book's amounts added up in memory: what the store has to agree with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.ledger.accounts import Account, Move, Place
from shoal.ledger.book_state import Hardware, Owner
from shoal.ledger.postings import Posting


class Totals:
    def __init__(self) -> None:
        self.amounts: dict[Place, int] = {}
        self.capacity: dict[tuple[int, str], int] = {}
        self.owners: dict[str, Owner] = {}
        self.machines: dict[str, Hardware] = {}
        self.lent: Counter[str] = Counter()

    def put(self, entries: Iterable[Posting]) -> None:
        for entry in entries:
            if isinstance(entry, Move):
                self._move(entry)
                continue
            for place, amount in entry.amounts.items():
                self.amounts[place] = self.amounts.get(place, 0) + amount
            for key, amount in entry.capacity.items():
                self.capacity[key] = self.capacity.get(key, 0) + amount
            self.owners.update(entry.owners)
            self.machines.update(entry.machines)
            for (_, job), (_, lent_us) in entry.naps.items():
                self.lent[job] += lent_us

    def _move(self, move: Move) -> None:
        places = [
            place
            for place in self.amounts
            if (place.job, place.node, place.account) == (move.job, move.node, Account.USEFUL)
            and place.hour >= move.since
        ]
        for place in places:
            kept = move.firm if place.hour == move.since else 0
            target = place._replace(account=move.to)
            self.amounts[target] = self.amounts.get(target, 0) + self.amounts[place] - kept
            self.amounts[place] = kept

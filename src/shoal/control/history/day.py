"""The usual day of a service: its mean work in each quarter of an hour; newer days count more."""

from __future__ import annotations

import msgspec

from shoal.core.books.goals import SLOT_MS
from shoal.model.service import DAY_SLOTS
from shoal.model.tokens import MILLI

UNKNOWN = -1
SEEN_MIN = 60  # looks: a quarter of an hour of which less was seen teaches nothing


class Day(msgspec.Struct):
    """`slots` is a new tuple only when a quarter of an hour has ended."""

    slots: tuple[int, ...] = (UNKNOWN,) * DAY_SLOTS
    slot: int = -1  # the present one, counted since 1970
    seen: int = 0
    sum: int = 0

    def add(self, at_ms: int, work: int) -> bool:
        """Returns whether something was learned."""
        slot, before = at_ms // SLOT_MS, self.slots
        if slot != self.slot:
            if self.seen >= SEEN_MIN:
                slots, place = list(self.slots), self.slot % DAY_SLOTS
                mean = self.sum * MILLI // self.seen
                slots[place] = mean if slots[place] == UNKNOWN else (slots[place] + mean) // 2
                self.slots = tuple(slots)
            self.slot, self.seen, self.sum = slot, 0, 0
        self.seen, self.sum = self.seen + 1, self.sum + work
        return self.slots is not before

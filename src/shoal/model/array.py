"""An array: one command for many elements, each of which becomes a job shortly before it runs."""

from __future__ import annotations

import msgspec


class ArrayCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How far an array is. `pending` elements are not jobs yet; `waiting` and `running` ones are.
    `missed` are indices of elements that did not succeed, as ranges: the first of them."""

    elements: int
    pending: int = 0
    waiting: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    timed_out: int = 0
    at_most: int = 0  # elements at a time; 0: as many as there is room for
    missed: str = ""

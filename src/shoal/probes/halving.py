"""Locates bad nodes and links with collectives, in about 2 log2(n) rounds instead of n.

A collective is as slow as its slowest member. So if one over a set of hosts is slow, both halves
are measured at the same time: a slow half holds a bad host; if neither is slow, the link between a
host of the one and a host of the other is bad, or the whole way between the halves is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

Hosts = tuple[int, ...]
# Measures disjoint sets of hosts at the same time, and says of each whether it was slow.
Measure = Callable[[tuple[Hosts, ...]], Sequence[bool]]
Search = Generator[tuple[Hosts, ...], tuple[bool, ...], None]


class Located(NamedTuple):
    """`between`: slow only together, without a single pair to blame."""

    nodes: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    between: tuple[tuple[Hosts, Hosts], ...] = ()
    rounds: int = 0


def locate(hosts: Iterable[int], measure: Measure) -> Located:
    """`hosts`: known to be slow together. Every asked set has two hosts or more."""
    return _Halving(tuple(hosts)).run(measure)


class _Halving:
    def __init__(self, hosts: Hosts) -> None:
        self._all = hosts
        self._well: dict[int, None] = {}  # hosts of sets that were not slow
        self._bad: dict[int, None] = {}
        self._pairs: dict[tuple[int, int], None] = {}
        self._between: list[tuple[Hosts, Hosts]] = []
        self._searches: list[Search] = [self._halve(hosts)]

    def run(self, measure: Measure) -> Located:
        """All searches go on at the same time, as far as they measure different hosts."""
        waiting = self._advance([(search, None) for search in self._take()])
        rounds = 0
        while waiting:
            now, later, taken = [], [], set[int]()
            for search, asked in waiting:
                members = {host for group in asked for host in group}
                if members & taken:
                    later.append((search, asked))
                else:
                    now.append((search, asked))
                    taken |= members
            groups = tuple(group for _, asked in now for group in asked)
            slow = tuple(measure(groups))
            rounds += 1
            for group, was_slow in zip(groups, slow, strict=True):
                if not was_slow:
                    self._well.update(dict.fromkeys(group))
            answered, at = [], 0
            for search, asked in now:
                answered.append((search, slow[at : at + len(asked)]))
                at += len(asked)
            waiting = later + self._advance([*answered, *((one, None) for one in self._take())])
        return Located(
            tuple(sorted(self._bad)), tuple(sorted(self._pairs)), tuple(self._between), rounds
        )

    def _take(self) -> list[Search]:
        taken, self._searches = self._searches, []
        return taken

    def _advance(
        self, answered: Sequence[tuple[Search, tuple[bool, ...] | None]]
    ) -> list[tuple[Search, tuple[Hosts, ...]]]:
        """Each with its answer, until it asks again; and searches that begin because of them."""
        asking = []
        for search, answer in answered:
            try:
                asked = next(search) if answer is None else search.send(answer)
                asking.append((search, asked))
            except StopIteration:
                pass
        while new := self._take():
            asking += self._advance([(search, None) for search in new])
        return asking

    def _halve(self, hosts: Hosts) -> Search:
        """`hosts` are slow together."""
        if len(hosts) == 2:
            yield from self._which_of_two(hosts[0], hosts[1])
            return
        middle = (len(hosts) + 1) // 2
        left, right = hosts[:middle], hosts[middle:]
        if len(right) == 1:
            yield from self._odd(left, right[0])
            return
        slow_left, slow_right = yield left, right
        for half, slow in ((left, slow_left), (right, slow_right)):
            if slow:
                self._searches.append(self._halve(half))
        if not slow_left and not slow_right:
            self._searches.append(self._across(left, right))

    def _odd(self, two: Hosts, third: int) -> Search:
        """Three hosts: one half is a single host, which needs a partner."""
        (slow,) = yield (two,)
        if slow:
            self._searches.append(self._halve(two))
        yield from self._with_partner(third, avoid=two)
        if third not in self._bad and not slow:
            self._searches.append(self._across(two, (third,)))

    def _which_of_two(self, one: int, two: int) -> Search:
        """Each with a partner that is well; if both are well then, the link between them is bad."""
        for host in (one, two):
            yield from self._with_partner(host, avoid=(one, two))
        if one not in self._bad and two not in self._bad:
            self._pairs[min(one, two), max(one, two)] = None

    def _with_partner(self, host: int, avoid: Hosts) -> Search:
        """A second partner, because the link to the first may be the bad one."""
        asked: list[int] = []
        while len(asked) < 2:
            choice = [
                *(one for one in self._well if one not in self._bad),
                *(one for one in self._all if one not in self._well and one not in self._bad),
            ]
            partner = next((one for one in choice if one not in (*avoid, host, *asked)), None)
            if partner is None:
                break
            (slow,) = yield ((host, partner),)
            if not slow:
                return
            asked.append(partner)
        if asked and host not in self._well:
            self._bad[host] = None

    def _across(self, left: Hosts, right: Hosts) -> Search:
        """Slow together, and neither alone: narrows both sides at the same time."""
        while len(left) > 1 or len(right) > 1:
            halves = [
                (side[: (len(side) + 1) // 2], side[(len(side) + 1) // 2 :])
                for side in (left, right)
            ]
            (a, b), (c, d) = halves
            found: list[tuple[Hosts, Hosts]] = []
            for crossing in (((a, c), (b, d)), ((a, d), (b, c))):
                asked = [(one, two) for one, two in crossing if one and two]
                if not asked:
                    continue
                slow = yield tuple(one + two for one, two in asked)
                found += [pair for pair, was in zip(asked, slow, strict=True) if was]
                if found:
                    break
            if len(found) != 1:  # none alone, or several: the way between the halves
                self._between.append((left, right))
                return
            left, right = found[0]
        self._pairs[min(left[0], right[0]), max(left[0], right[0])] = None

"""What finished and running jobs tell about how long others will run, in bounded memory.

Jobs belong to nested groups, such as (shape, tenant, name, sweep). Each group counts, per octave
of run time, how many of its jobs have entered that octave and how many have ended in it. That
counts a job that still runs, or was stopped, for what it has shown: that it is not shorter. (Who
learns from finished jobs alone believes all jobs to be short, for the short ones finish first.)
The chance to end within an octave is then that of the counts, drawn towards the enclosing group's
as long as the group has seen little, and in the end towards a prior. Integers only: every machine
gets the same answer.
"""

from __future__ import annotations

import msgspec

from shoal.model.job import TIME_MS_MAX

# Octave 0 is everything below 4.096 s; octave b > 0 begins at 2 ** (b + 11) ms.
OCTAVES = 24  # the last one begins after 198 days
ONE = 1 << 20  # a chance of 1 in fixed point
# So many jobs of a group count as much as what its enclosing group says, in halves of a job: for
# the whole cluster, for the first level below, and for all deeper ones, whose jobs are much alike.
WEIGHT_HALVES = (4, 8, 1)
# Counts are halved beyond this, so that what is learned follows a changing cluster.
ENDED_MAX = 1024
GROUPS_MAX = 4096
# An enclosing group looks at its counts anew when they grew by a sixteenth; between, its view
# stands still, so that one job's end does not change everybody's rank.
VIEW_SHIFT = 4

# Jobs submitted one after the other within this time are one sweep, and likely to run as long.
SWEEP_GAP_MS = 600_000
SWEEP_JOBS_MAX = 16

# A job older than so many times the mean age of finished jobs has waited long enough.
PATIENCE_FACTOR = 16
# Less would let the long jobs of an overloaded cluster through one by one while only short ones
# have finished: measured in docs/queueing.md.
PATIENCE_MS_MIN = 30 * 24 * 3600 * 1000
AGES_MAX = 1024

Key = tuple[str, ...]  # names of nested groups, from the widest to the narrowest


class Group(msgspec.Struct, kw_only=True):
    """`view` is what the group tells those inside it: the chance to end, by octave."""

    entered: list[int]
    ended: list[int]
    version: int = 0
    news: int = 0
    view: list[int]
    view_version: int = 0


class Estimates:
    """Learns how long jobs run. The same calls in the same order give the same answers."""

    def __init__(self, groups: dict[str, Group] | None = None) -> None:
        # The least recently told first: beyond GROUPS_MAX those are forgotten.
        self.groups = groups or {}
        self._cache: dict[tuple[str, int], tuple[int, int, int]] = {}

    def began(self, key: Key) -> None:
        """A job of this group was started for the first time, or will be."""
        self._tell(key, first=0, last=0)

    def survived(self, key: Key, before_ms: int, now_ms: int) -> None:
        """It had run for `before_ms` when last told of, and now for `now_ms`."""
        first, last = octave(before_ms) + 1, octave(now_ms)
        if first <= last:
            self._tell(key, first=first, last=last)

    def ended(self, key: Key, duration_ms: int) -> None:
        """It has run to its end; `survived` was told up to here."""
        self._tell(key, first=1, last=0, end=octave(duration_ms))

    def observe(self, key: Key, duration_ms: int) -> None:
        """A whole run at once, where nothing was told while it ran."""
        self.began(key)
        self.survived(key, 0, duration_ms)
        self.ended(key, duration_ms)

    def remaining_ms(self, key: Key, attained_ms: int) -> int:
        """Time to spend per job ended, if spent as wisely as possible (Gittins' index, inverted).

        The smallest over all horizons of E[time spent until the horizon or the end] divided by
        P[end before the horizon], for a job that has run for `attained_ms`.
        """
        at = octave(attained_ms)
        name, chances_version, view_version = self._state(key)
        known = self._cache.get((name, at))
        if known is None or known[:2] != (chances_version, view_version):
            if len(self._cache) > 4 * GROUPS_MAX:
                self._cache.clear()
            known = (chances_version, view_version, _gittins_ms(self.chances(key), at))
            self._cache[name, at] = known
        return known[2]

    def quantile(self, key: Key, percent: int, at_least_ms: int = 0) -> int:
        """So long will `percent` of such jobs run at most, of those that run for `at_least_ms`."""
        chances = self.chances(key)
        alive = ONE
        floor = ONE * (100 - percent) // 100
        start_ms = at_least_ms
        for at in range(octave(at_least_ms), OCTAVES):
            end_ms = begin_ms(at + 1)
            # Of an octave that is partly over, the part that is left.
            left = chances[at] * max(0, end_ms - start_ms) // (end_ms - begin_ms(at))
            after = alive * (ONE - left) // ONE
            if after <= floor:
                share = (alive - floor) * ONE // max(1, alive - after)
                return start_ms + (end_ms - start_ms) * share // ONE
            alive, start_ms = after, end_ms
        return max(at_least_ms, start_ms)

    def chances(self, key: Key) -> list[int]:
        """The chance to end in each octave once it is entered, in parts of ONE."""
        view = PRIOR
        for depth in range(len(key) + 1):
            group = self.groups.get(_name(key, depth))
            if group is None:
                continue
            view = _drawn(group, view, depth) if depth == len(key) else group.view
        return view

    def _state(self, key: Key) -> tuple[str, int, int]:
        name = _name(key, len(key))
        group = self.groups.get(name)
        above = sum(
            outer.view_version
            for depth in range(len(key))
            if (outer := self.groups.get(_name(key, depth))) is not None
        )
        return name, group.version if group else -1, above

    def _tell(self, key: Key, *, first: int, last: int, end: int | None = None) -> None:
        view = PRIOR
        for depth in range(len(key) + 1):
            group = self._touch(_name(key, depth), view)
            for at in range(first, last + 1):
                group.entered[at] += 1
            if end is not None:
                group.ended[end] += 1
                _forget(group)
            group.version += 1
            group.news += 1
            if group.news > sum(group.entered) >> VIEW_SHIFT:
                group.view = _drawn(group, view, depth)
                group.view_version += 1
                group.news = 0
            view = group.view

    def _touch(self, name: str, view: list[int]) -> Group:
        group = self.groups.pop(name, None)
        if group is None:
            group = Group(entered=[0] * OCTAVES, ended=[0] * OCTAVES, view=list(view))
            if len(self.groups) >= GROUPS_MAX:
                del self.groups[next(iter(self.groups))]
        self.groups[name] = group
        return group


class Sweep(msgspec.Struct, kw_only=True):
    number: int
    jobs: int
    submitted_ms: int


class Sweeps:
    """Tells jobs that were submitted together, by whatever else they have in common."""

    def __init__(self, newest: dict[str, Sweep] | None = None) -> None:
        self.newest = newest or {}

    def join(self, key: Key, submitted_ms: int) -> Key:
        """The key, narrowed to the sweep that a job submitted now belongs to."""
        name = _name(key, len(key))
        sweep = self.newest.pop(name, None)
        if sweep is None:
            sweep = Sweep(number=0, jobs=0, submitted_ms=submitted_ms)
            if len(self.newest) >= GROUPS_MAX:
                del self.newest[next(iter(self.newest))]
        late = submitted_ms - sweep.submitted_ms > SWEEP_GAP_MS
        if late or sweep.jobs >= SWEEP_JOBS_MAX:
            sweep = Sweep(number=sweep.number + 1, jobs=0, submitted_ms=submitted_ms)
        sweep.jobs += 1
        sweep.submitted_ms = submitted_ms
        self.newest[name] = sweep
        return (*key, f"sweep {sweep.number}")


class Patience(msgspec.Struct, kw_only=True):
    """How old a job may become before it is put first, measured by what jobs here are used to."""

    ages_ms: int = 0
    jobs: int = 0

    def observe(self, age_ms: int) -> None:
        """A job has finished at this age."""
        self.ages_ms += age_ms
        self.jobs += 1
        if self.jobs > AGES_MAX:
            self.ages_ms //= 2
            self.jobs //= 2

    @property
    def ms(self) -> int:
        mean_ms = self.ages_ms // self.jobs if self.jobs else 0
        return min(TIME_MS_MAX, max(PATIENCE_MS_MIN, PATIENCE_FACTOR * mean_ms))


def octave(duration_ms: int) -> int:
    return min(OCTAVES - 1, max(0, duration_ms.bit_length() - 12))


def begin_ms(at: int) -> int:
    return 1 << (at + 11) if at else 0


def _name(key: Key, depth: int) -> str:
    return "/".join(key[:depth])


def _drawn(group: Group, view: list[int], depth: int) -> list[int]:
    """The group's own counts, drawn towards what the enclosing group says."""
    weight = WEIGHT_HALVES[min(depth, len(WEIGHT_HALVES) - 1)]
    return [
        (2 * ended * ONE + weight * outer) // (2 * max(entered, ended) + weight)
        for entered, ended, outer in zip(group.entered, group.ended, view, strict=True)
    ]


def _forget(group: Group) -> None:
    if sum(group.ended) > ENDED_MAX:
        group.entered = [count // 2 for count in group.entered]
        group.ended = [count // 2 for count in group.ended]


def _gittins_ms(chances: list[int], at: int) -> int:
    alive, spent_ms, best_ms = ONE, 0, TIME_MS_MAX
    for horizon in range(at, OCTAVES):
        length_ms = begin_ms(horizon + 1) - begin_ms(horizon)
        chance = chances[horizon]
        # Who ends within an octave is taken to end in its middle.
        spent_ms += alive * length_ms // ONE * (2 * ONE - chance) // (2 * ONE)
        alive = alive * (ONE - chance) // ONE
        if alive < ONE:
            best_ms = min(best_ms, spent_ms * ONE // (ONE - alive))
    return max(1, best_ms)


def _prior() -> list[int]:
    """Nothing known: an octave ends 15 % of the jobs that enter it, which makes short jobs likely
    and long ones possible; beyond four hours more and more, up to half."""
    knee = octave(4 * 3600 * 1000)
    return [ONE * min(50, 15 + 7 * max(0, at - knee)) // 100 for at in range(OCTAVES)]


PRIOR = _prior()

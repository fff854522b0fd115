"""What finished and running jobs show about how long others will run, in bounded memory.

Jobs belong to nested groups: all, those of one shape, of one tenant, of one name. Each group
counts, per span of run time, how many of its jobs have entered that span and how many have ended
in it. So a job that still runs, or was stopped, counts as not shorter than its time so far.
(Learning from finished jobs alone would make all jobs look short, because short ones finish first.)
The chance to end within a span is the ratio of the counts, drawn toward that of the enclosing
group while the group has seen little, and finally toward a prior. All integers, so that every
machine gets the same answer.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from shoal.model.job import TIME_MS_MAX, Job

# A span of run time is a quarter octave; everything below 4.096 s is the first span.
SPANS = 1 + 4 * 23  # the last octave begins after 198 days
ONE_BITS = 20
ONE = 1 << ONE_BITS  # a chance of 1 in fixed point
# The weight of the enclosing group in halves of a job: for the whole cluster, a shape, a tenant,
# and a name, whose jobs are much alike.
WEIGHT_HALVES = (4, 8, 8, 1)
ENOUGH = 3  # with fewer ended jobs, the enclosing group answers
# Counts are halved beyond this, so that estimates follow a changing cluster.
ENDED_MAX = 1024
GROUPS_MAX = 4096
# An enclosing group refreshes its view after as many updates as a quarter of its jobs. In between
# the view is fixed, so that one job's end does not change the rank of all others.
VIEW_SHIFT = 2
# Results from a group's own counts stay valid for this many updates.
FRESH_SHIFT = 5

# More than what is lost by rounding each span down, and each time.
SLACK, SLACK_MS = 128, 2

NO_DIGITS = str.maketrans("", "", "0123456789")

Key = tuple[str, ...]  # names of nested groups, from the widest to the narrowest


class Group(msgspec.Struct, kw_only=True):
    """`view` is what inner groups see of this group: the chance to end, by span."""

    entered: list[int]
    ended: list[int]
    ends: int = 0  # the sum of `ended`
    version: int = 0
    fresh: int = 0  # updates since its results went stale
    news: int = 0
    view: list[int]
    view_version: int = 0


class _Known:
    """Results from a group's counts, valid as long as these do not change."""

    __slots__ = ("chances", "checked", "quantiles", "remaining", "soonest", "version")

    def __init__(self, version: tuple[int, int], chances: list[int]) -> None:
        self.version = version
        self.checked = 0  # the number of updates when the version was last compared
        self.chances = chances
        self.remaining: dict[int, int] = {}  # by span attained
        self.quantiles: dict[int, int] = {}  # by percent, of jobs that have not run yet
        self.soonest: dict[tuple[int, int], int] = {}  # by percent and span attained


class Estimates:
    """Learns how long jobs run. The same calls in the same order give the same answers."""

    def __init__(self, groups: dict[str, Group] | None = None) -> None:
        # The least recently updated first: beyond GROUPS_MAX those are forgotten.
        self.groups = groups or {}
        self._known: dict[str, _Known] = {}
        self._told = 1  # number of updates
        # Answers for jobs that have not run yet, since the last update.
        self._expected: dict[tuple[Key, int], int | None] = {}

    def began(self, key: Key) -> None:
        """A job of this group starts for the first time."""
        self._tell(key, first=0, last=0)

    def survived(self, key: Key, before_ms: int, now_ms: int) -> None:
        """It had run for `before_ms` at the last update, and now for `now_ms`."""
        first, last = span(before_ms) + 1, span(now_ms)
        if first <= last:
            self._tell(key, first=first, last=last)

    def ended(self, key: Key, duration_ms: int) -> None:
        """It has run to its end; `survived` was called up to here."""
        self._tell(key, first=1, last=0, end=span(duration_ms))

    def observe(self, key: Key, duration_ms: int) -> None:
        """A whole run at once, without updates while it ran."""
        self.began(key)
        self.survived(key, 0, duration_ms)
        self.ended(key, duration_ms)

    def key_for(self, job: Job) -> Key:
        """The narrowest of its groups that has seen enough; at least that of its shape."""
        key = key_of(job)
        names = _names(key)
        for depth in range(len(key), 1, -1):
            group = self.groups.get(names[depth])
            if group is not None and group.ends >= ENOUGH:
                return key[:depth]
        return key[:1]

    @property
    def silent(self) -> bool:
        """Has it seen too little to predict any job?"""
        everybody = self.groups.get("")
        return everybody is None or everybody.ends < ENOUGH

    def remaining_ms(self, key: Key, attained_ms: int) -> int:
        """The least time to spend per job ended (Gittins' index, inverted).

        The smallest over all horizons of E[time spent until the horizon or the end] divided by
        P[end before the horizon], for a job that has run for `attained_ms`.
        """
        known, at = self._know(key), span(attained_ms)
        found = known.remaining.get(at)
        if found is None:
            found = known.remaining[at] = _gittins_ms(known.chances, at)
        return found

    def quantile(self, key: Key, percent: int, at_least_ms: int = 0) -> int:
        """The time by which `percent` of such jobs end, of those that run for `at_least_ms`."""
        known = self._know(key)
        if at_least_ms:
            return _quantile_ms(known.chances, percent, at_least_ms)
        found = known.quantiles.get(percent)
        if found is None:
            found = known.quantiles[percent] = _quantile_ms(known.chances, percent, 0)
        return found

    def chances(self, key: Key) -> list[int]:
        """The chance to end in each span once it is entered, in units of 1/ONE."""
        return self._know(key).chances

    def expect(self, job: Job, percent: int, ran_ms: int) -> int | None:
        """The total time after which `percent` of jobs like it that ran for `ran_ms` were done;
        None if unknown."""
        if ran_ms:
            return None if self.silent else self.quantile(self.key_for(job), percent, ran_ms)
        asked = (key_of(job), percent)
        if asked not in self._expected:
            known = None if self.silent else self.quantile(self.key_for(job), percent)
            self._expected[asked] = known
        return self._expected[asked]

    def soonest(self, key: Key, percent: int, at_least_ms: int) -> int:
        """`quantile` is not less than this, which is known for all jobs of the group that have run
        for about as long."""
        known, at = self._know(key), span(at_least_ms)
        found = known.soonest.get((percent, at))
        if found is None:
            found = _quantile_ms(known.chances, percent, begin_ms(at), SLACK) - SLACK_MS
            known.soonest[percent, at] = found
        return found

    def drop_cache(self) -> None:
        """Keeps the chances in `_known`: they stay valid until a group has learned enough."""
        self._expected.clear()
        for known in self._known.values():
            known.remaining.clear()
            known.quantiles.clear()
            known.soonest.clear()

    def _know(self, key: Key) -> _Known:
        """Computed from a group's own counts and its enclosing groups' views."""
        names = _names(key)
        known = self._known.get(names[-1])
        if known is not None and known.checked == self._told:
            return known
        view, views = PRIOR, 0
        for name in names[:-1]:
            outer = self.groups.get(name)
            if outer is not None:
                view, views = outer.view, views + outer.view_version
        group = self.groups.get(names[-1])
        version = (group.version if group is not None else -1, views)
        if known is None or known.version != version:
            if len(self._known) > GROUPS_MAX:
                self._known.clear()
            chances = _drawn(group, view, len(key)) if group is not None else view
            known = self._known[names[-1]] = _Known(version, chances)
        known.checked = self._told
        return known

    def _tell(self, key: Key, *, first: int, last: int, end: int | None = None) -> None:
        view = PRIOR
        self._told += 1
        self._expected.clear()
        for depth, name in enumerate(_names(key)):
            group = self._touch(name, view)
            for at in range(first, last + 1):
                group.entered[at] += 1
            if end is not None:
                group.ended[end] += 1
                group.ends += 1
                _forget(group)
            group.fresh += 1
            if group.fresh > group.ends >> FRESH_SHIFT:
                group.version += 1
                group.fresh = 0
            group.news += 1
            if group.news > group.entered[0] >> VIEW_SHIFT:
                group.view = _drawn(group, view, depth)
                group.view_version += 1
                group.news = 0
            view = group.view

    def _touch(self, name: str, view: list[int]) -> Group:
        group = self.groups.pop(name, None)
        if group is None:
            group = Group(entered=[0] * SPANS, ended=[0] * SPANS, view=list(view))
            if len(self.groups) >= GROUPS_MAX:
                del self.groups[next(iter(self.groups))]
        self.groups[name] = group
        return group


def key_of(job: Job) -> Key:
    """From the widest to the narrowest: its shape, its tenant, and its name without numbers,
    because sweeps and versions are numbered."""
    spec = job.spec
    return _key(spec.members, spec.gpus, spec.tenant, spec.name)


@lru_cache(maxsize=GROUPS_MAX)
def _key(members: int, gpus: int, tenant: str, name: str | None) -> Key:
    shape = f"{members}x{gpus}"
    return (shape, tenant, name.translate(NO_DIGITS)) if name else (shape, tenant)


def octave(duration_ms: int) -> int:
    return max(0, duration_ms.bit_length() - 12)


def span(duration_ms: int) -> int:
    above = duration_ms.bit_length() - 13
    if above < 0:
        return 0
    return min(SPANS - 1, 1 + 4 * above + ((duration_ms >> (above + 10)) & 3))


def begin_ms(at: int) -> int:
    if not at:
        return 0
    above, quarter = divmod(at - 1, 4)
    return (4 + quarter) << (above + 10)


@lru_cache(maxsize=GROUPS_MAX)
def _names(key: Key) -> tuple[str, ...]:
    """The names of its groups, from the group of all jobs to the narrowest."""
    names = [""]
    for part in key:
        names.append(f"{names[-1]}/{part}" if names[-1] else part)
    return tuple(names)


def _drawn(group: Group, view: list[int], depth: int) -> list[int]:
    """The group's own counts, drawn toward the view of the enclosing group."""
    weight = WEIGHT_HALVES[min(depth, len(WEIGHT_HALVES) - 1)]
    return [
        ((ended << ONE_BITS + 1) + weight * outer)
        // (2 * (entered if entered > ended else ended) + weight)
        for entered, ended, outer in zip(group.entered, group.ended, view, strict=True)
    ]


def _forget(group: Group) -> None:
    if group.ends > ENDED_MAX:
        group.entered = [count // 2 for count in group.entered]
        group.ended = [count // 2 for count in group.ended]
        group.ends = sum(group.ended)


def _gittins_ms(chances: list[int], at: int) -> int:
    alive, spent_ms, best_ms = ONE, 0, TIME_MS_MAX
    for chance, length_ms in zip(chances[at:], LENGTHS_MS[at:], strict=True):
        # A job that ends within a span is taken to end in its middle.
        spent_ms += ((alive * length_ms) >> ONE_BITS) * (2 * ONE - chance) >> ONE_BITS + 1
        alive = alive * (ONE - chance) >> ONE_BITS
        if alive < ONE:
            index_ms = (spent_ms << ONE_BITS) // (ONE - alive)
            if index_ms < best_ms:
                best_ms = index_ms
    return max(1, best_ms)


def _quantile_ms(chances: list[int], percent: int, at_least_ms: int, slack: int = 0) -> int:
    """`slack`: so much earlier, as a chance."""
    floor = ONE * (100 - percent) // 100 + slack
    at = span(at_least_ms)
    start_ms, end_ms = at_least_ms, ENDS_MS[at]
    # The first span is partly over: count the rest of it.
    alive, after = ONE, ONE - chances[at] * max(0, end_ms - start_ms) // LENGTHS_MS[at]
    if after > floor:
        for chance in chances[at + 1 :]:
            at += 1
            alive, after = after, after * (ONE - chance) >> ONE_BITS
            if after <= floor:
                break
        else:
            return max(at_least_ms, ENDS_MS[-1])
        start_ms, end_ms = ENDS_MS[at - 1], ENDS_MS[at]
    share = (alive - floor) * ONE // max(1, alive - after)
    return start_ms + (end_ms - start_ms) * share // ONE


def _prior() -> list[int]:
    """The prior: 4 % of the jobs that enter a span end in it (15 % per octave), which makes short
    jobs likely and long ones possible. Beyond four hours this rises to 16 % (half per octave)."""
    knee = span(4 * 3600 * 1000)
    return [ONE * min(32, 8 + max(0, at - knee)) // 200 for at in range(SPANS)]


PRIOR = _prior()
ENDS_MS = [begin_ms(at + 1) for at in range(SPANS)]
LENGTHS_MS = [begin_ms(at + 1) - begin_ms(at) for at in range(SPANS)]

"""Ranks the other sites of services by what the proxy measures of them, and reads their figures.

The proxy's own checks go there and back three times: to connect, to agree on keys, to ask for room.
The ranks are in a map of the proxy, so a change needs no reload; its file keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from shoal.gateway import guard, sites
from shoal.gateway.stats import ANSWERS, Runtime, number
from shoal.machine.files import write_private
from shoal.model.far import SiteLoad
from shoal.model.service import Served, Wanted

TRIPS = 3  # of a check
MEMORY = 0.2  # how much the newest round trip counts
ABOUT = 1.2  # times as far is as near: then the price decides
ABOUT_MS = 1.0
STEADY = 8  # looks in a row that show the same new order, until it counts
ANSWERED = ("L7OK", "L7STS")  # also "I have no room"

Key = tuple[str, str]  # service, site
Row = Mapping[str, str]


class Count(msgspec.Struct, frozen=True):
    answers: int
    bytes: int


class Nearest:
    """Of one gateway."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / sites.RANKS
        self._ranks: dict[str, list[str]] = {}  # service -> its sites
        self._trips: dict[Key, float] = {}
        self._counts: dict[Key, Count] = {}
        self._steady: dict[str, tuple[list[str], int]] = {}
        self._looked_ms = 0
        self._loads: dict[str, dict[str, SiteLoad]] = {}

    def keep(self, wanted: Wanted) -> None:
        """What starts or reloads from now on has a rank for each site."""
        if shared := _shared(wanted):
            self._rank_all(wanted, shared)
            self._write(shared)

    def look(self, wanted: Wanted, proxy: Runtime, now_ms: int) -> None:
        shared = _shared(wanted)
        self._loads = {}
        if not shared:
            return
        self._rank_all(wanted, shared)
        rows = {(row["pxname"], row["svname"]): row for row in proxy.table()}
        counts: dict[Key, Count] = {}
        past_ms = max(1, now_ms - self._looked_ms)
        for name, served in shared.items():
            far = _names(wanted, served)
            for site in far:
                self._measure((name, site), rows.get((f"{sites.AGAIN}{name}", site), {}))
            self._rank(name, {one.site: one.price for one in served.far})
            self._loads[name] = {
                one.site: SiteLoad(trouble=sites.trouble(one))
                for one in served.far
                if one.site not in far
            }
            for rank, site in enumerate(self._ranks[name], 1):
                both = [rows.get((f"{kind}{name}", site), {}) for kind in sites.RETRY_ON]
                new = counts[name, site] = _count(both)
                old = self._counts.get((name, site), new)
                self._loads[name][site] = SiteLoad(
                    room=both[0].get("status", "").startswith("UP"),
                    rank=rank,
                    in_flight=sum(number(row, "scur") for row in both),
                    answers_per_ks=max(0, new.answers - old.answers) * 1_000_000 // past_ms,
                    round_trip_ms=round(self._trips.get((name, site), 0)),
                    bytes_per_s=max(0, new.bytes - old.bytes) * 1000 // past_ms,
                )
        self._counts, self._looked_ms = counts, now_ms
        self._trips = {key: trip for key, trip in self._trips.items() if key in counts}
        self._tell(shared, proxy)

    def loads(self, service: str) -> dict[str, SiteLoad]:
        return self._loads.get(service, {})

    def _rank_all(self, wanted: Wanted, shared: Mapping[str, Served]) -> None:
        if not self._ranks and self._path.exists():  # of an earlier controller
            for line in self._path.read_text().splitlines():
                place, _, site = line.partition(" ")
                self._ranks.setdefault(place.partition("/")[0], []).append(site)
        for name, served in shared.items():
            names = _names(wanted, served)
            kept = [site for site in self._ranks.get(name, []) if site in names]
            self._ranks[name] = [*kept, *(site for site in names if site not in kept)]

    def _measure(self, key: Key, row: Row) -> None:
        if row.get("check_status", "").removeprefix("* ") in ANSWERED:
            trip = number(row, "check_duration") / TRIPS
            self._trips[key] = trip + (1 - MEMORY) * (self._trips.get(key, trip) - trip)

    def _rank(self, service: str, prices: Mapping[str, int]) -> None:
        now = self._ranks[service]
        trips = {site: self._trips[service, site] for site in now if (service, site) in self._trips}
        new = ranked(now, trips, prices)
        before, looks = self._steady.get(service, (now, 0))
        self._steady[service] = (new, looks + 1 if new == before else 1)
        if self._steady[service][1] >= STEADY:
            self._ranks[service] = new

    def _tell(self, shared: Iterable[str], proxy: Runtime) -> None:
        rows = self._rows(shared)
        said = guard.parse_map(proxy.ask(f"show map {sites.RANKS}"))
        if said != rows:
            self._write(shared)
            proxy.tell(guard.map_changes(said, rows, sites.RANKS))

    def _rows(self, shared: Iterable[str]) -> dict[str, str]:
        return {
            f"{name}/{rank}": site
            for name in shared
            for rank, site in enumerate(self._ranks[name], 1)
        }

    def _write(self, shared: Iterable[str]) -> None:
        text = "".join(f"{place} {site}\n" for place, site in self._rows(shared).items())
        write_private(self._path, text.encode())


def ranked(
    before: Sequence[str], trips: Mapping[str, float], prices: Mapping[str, int]
) -> list[str]:
    """The nearest first. Of those that are about as near, the cheapest; else as it was before.
    Those that were never reached come last."""
    rest = [site for site in before if site in trips]
    found = []
    while rest:
        near_ms = min(trips[site] for site in rest) * ABOUT + ABOUT_MS
        near = [site for site in rest if trips[site] <= near_ms]
        found.append(min(near, key=lambda site: prices.get(site) or float("inf")))
        rest.remove(found[-1])
    return [*found, *(site for site in before if site not in trips)]


def _shared(wanted: Wanted) -> dict[str, Served]:
    return {
        served.route.service: served
        for served in wanted.services
        if sites.others(wanted.entry, served)
    }


def _names(wanted: Wanted, served: Served) -> list[str]:
    return [one.site for one in sites.others(wanted.entry, served)]


def _count(rows: Iterable[Row]) -> Count:
    answers = bytes_ = 0
    for row in rows:
        answers += sum(number(row, name) for name in ANSWERS)
        bytes_ += number(row, "bin") + number(row, "bout")
    return Count(answers, bytes_)

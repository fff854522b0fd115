"""Weights that follow what replicas do: slower ones get less, faulty ones a rest, all a retest.

A pure function: tracks of the last look and counters of this one give new tracks and weights.

Slow means slow to begin an answer, compared with the others of the same service. How much a
replica has in flight is no sign of it: the proxy's own choice already goes by that.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

import msgspec

from shoal.gateway.stats import ServerCount
from shoal.model.service import Route, Routing

WEIGHT_MAX = 256  # HAProxy's
SAME_UP_TO = 1.5  # times the usual latency: noise, not slowness
SLOW_FROM = 2.5  # times the usual latency: better left alone while the others have room
SLOW_MS_MIN = 10.0  # nobody is called slow for a few milliseconds
SHARE_MIN = 0.05  # of its weight: what a slow replica that is needed gets at least
MEMORY = 50  # answers; older ones hardly count
JUDGED_FROM = 10  # answers; nobody is called slow for a few
ROOM_BELOW = 0.85  # of the others' slots in use: they can do without a slow one
ROOM_ABOVE = 0.95  # beyond: it is needed again
ROOM_MEMORY = 0.3  # how much of the load on view counts at once
FAULTY_FROM = 0.5  # of its answers failed
FAULTY_MEMORY = 10  # answers; seven failures in a row make a replica faulty
FAULTY_OTHERS_MAX = 0.25  # if the others fail as well, it is not the replica
REST_FIRST_MS = 5_000
REST_MAX_MS = 60_000
TEST_MS_MAX = 5_000
TEST_ANSWERS = 3
ASIDE_MAX = 3  # at most one in so many replicas is set aside, and one of two
SILENT_BEGUN = 3  # given this many without an answer to any, silence counts as latency


class Standing(enum.StrEnum):
    GOOD = "good"
    RESTING = "resting"  # set aside until `until_ms`
    TESTING = "testing"  # a request at a time, until it has shown how it is


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one replica between two looks."""

    answered: int
    failed: int
    begun: int  # when `answered` last grew
    silent_since_ms: int
    latency_ms: float = 0.0
    count: int = 0  # answers that the latency was learned from
    failing: float = 0.0
    standing: Standing = Standing.GOOD
    faulty: bool = False  # why it rests or is tested; else for being slow
    until_ms: int = 0
    rests: int = 0


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one service."""

    tracks: dict[str, Track] = {}
    load: float = 0.0  # the slots in use and those waited for, smoothed
    started: bool = False


def rebalance(
    balance: Balance,
    route: Route,
    servers: Sequence[ServerCount],
    base: Mapping[str, int],
    latencies: Mapping[str, Sequence[int]],
    queued: int,
    now_ms: int,
) -> tuple[Balance, dict[str, int]]:
    """New memory, and the weight that each replica in `base` should have now. `latencies` has
    the milliseconds until an answer began, of those answered since the last look. A weight of 0
    sets a replica aside; one that is up is always left."""
    present = [server for server in servers if server.replica in base]
    tracks = {
        server.replica: _observe(
            balance.tracks.get(server.replica), server, latencies.get(server.replica, ()), now_ms
        )
        for server in present
    }
    up = [server.replica for server in present if server.up]
    usual = _usual([tracks[name] for name in up])
    load_now = queued + sum(_worth(server, tracks[server.replica], usual) for server in present)
    load = balance.load + ROOM_MEMORY * (load_now - balance.load) if balance.started else load_now
    tracks = {name: _tested(track, usual, now_ms) for name, track in tracks.items()}
    tracks = _rest_the_faulty(tracks, up, now_ms)
    if route.routing in BY_SPEED:
        tracks = _rest_the_slow(tracks, up, route.concurrency, usual, load, now_ms)
    weights = {
        name: _weight(track, base[name], usual if route.routing in BY_SPEED else None)
        for name, track in tracks.items()
    }
    return Balance(tracks=tracks, load=load, started=True), weights


# Where a hash decides, a change of weight moves conversations away from what is cached; there the
# bound on load keeps a slow replica from being flooded.
BY_SPEED = (Routing.LEAST_LOADED, Routing.P2C)


def _observe(
    track: Track | None, server: ServerCount, latencies: Sequence[int], now_ms: int
) -> Track:
    if track is None or server.answered < track.answered:  # new, or a new process counts anew
        track = Track(
            answered=server.answered,
            failed=server.failed,
            begun=server.begun,
            silent_since_ms=now_ms,
        )
    answers = server.answered - track.answered
    failures = max(0, server.failed - track.failed)
    failing, seen = track.failing, max(answers, failures)
    if seen:
        failing += (1 - math.exp(-seen / FAULTY_MEMORY)) * (failures / seen - failing)
    latency_ms, count = track.latency_ms, track.count
    if latencies:
        new, mean = len(latencies), sum(latencies) / len(latencies)
        share = max(1 - math.exp(-new / MEMORY), new / (count + new))
        latency_ms, count = latency_ms + share * (mean - latency_ms), count + new
    talks = answers > 0 or server.in_flight == 0
    silent_since_ms = now_ms if talks else track.silent_since_ms
    begun = server.begun if talks else track.begun
    silent_ms = now_ms - silent_since_ms
    if server.begun - begun >= SILENT_BEGUN and silent_ms > latency_ms:
        latency_ms, count = float(silent_ms), max(count, JUDGED_FROM)
    return msgspec.structs.replace(
        track,
        answered=server.answered,
        failed=server.failed,
        begun=begun,
        silent_since_ms=silent_since_ms,
        latency_ms=latency_ms,
        count=count,
        failing=failing,
    )


def _usual(tracks: Sequence[Track]) -> float | None:
    """The latency of an ordinary replica; of two, the faster one's."""
    known = sorted(
        track.latency_ms
        for track in tracks
        if track.standing is Standing.GOOD and track.count >= JUDGED_FROM
    )
    return known[(len(known) - 1) // 2] if known else None


def _worth(server: ServerCount, track: Track, usual: float | None) -> float:
    """The slots that a replica's work would take at an ordinary one: who is slow has much in
    flight for being slow."""
    if usual is None or track.latency_ms <= usual:
        return float(server.in_flight)
    return server.in_flight * usual / track.latency_ms


def _slow(latency_ms: float, usual: float | None) -> bool:
    return usual is not None and latency_ms > max(SLOW_FROM * usual, usual + SLOW_MS_MIN)


def _tested(track: Track, usual: float | None, now_ms: int) -> Track:
    """After a rest comes a test; a test ends in another, longer rest or in good standing."""
    if track.standing is Standing.RESTING and now_ms >= track.until_ms:
        return msgspec.structs.replace(
            track,
            standing=Standing.TESTING,
            until_ms=now_ms + TEST_MS_MAX,
            latency_ms=0.0,
            count=0,
            failing=0.0,
            silent_since_ms=now_ms,
        )
    if track.standing is not Standing.TESTING:
        return track
    over = now_ms >= track.until_ms and (track.count or track.failing or _hangs(track, now_ms))
    if track.count < TEST_ANSWERS and not over:
        return track
    if track.failing > FAULTY_OTHERS_MAX or _slow(track.latency_ms, usual) or not track.count:
        return _rest(track, now_ms, faulty=track.faulty)
    return msgspec.structs.replace(track, standing=Standing.GOOD, faulty=False, rests=0)


def _hangs(track: Track, now_ms: int) -> bool:
    return now_ms - track.silent_since_ms >= TEST_MS_MAX


def _rest(track: Track, now_ms: int, *, faulty: bool) -> Track:
    rest_ms = min(REST_MAX_MS, REST_FIRST_MS << min(track.rests, 10))
    return msgspec.structs.replace(
        track,
        standing=Standing.RESTING,
        faulty=faulty,
        until_ms=now_ms + rest_ms,
        rests=track.rests + 1,
    )


def _rest_the_faulty(tracks: dict[str, Track], up: Sequence[str], now_ms: int) -> dict[str, Track]:
    tracks = dict(tracks)
    for name in sorted(up, key=lambda name: -tracks[name].failing):
        track = tracks[name]
        others = [tracks[other].failing for other in up if other != name]
        if (
            track.standing is Standing.GOOD
            and track.failing > FAULTY_FROM
            and others
            and sorted(others)[(len(others) - 1) // 2] < FAULTY_OTHERS_MAX
            and _may_rest_one_more(tracks, up)
        ):
            tracks[name] = _rest(track, now_ms, faulty=True)
    return tracks


def _rest_the_slow(
    tracks: dict[str, Track],
    up: Sequence[str],
    concurrency: int,
    usual: float | None,
    load: float,
    now_ms: int,
) -> dict[str, Track]:
    """The slow rest while the others have room for all that there is, and only if it is known
    how much room a replica has."""
    tracks = dict(tracks)
    good = sum(tracks[name].standing is Standing.GOOD for name in up)
    if load > ROOM_ABOVE * good * concurrency:
        for name, track in tracks.items():
            if track.standing is not Standing.GOOD and not track.faulty:
                tracks[name] = msgspec.structs.replace(track, standing=Standing.GOOD, rests=0)
        return tracks
    for name in sorted(up, key=lambda name: -tracks[name].latency_ms):
        track = tracks[name]
        if (
            track.standing is Standing.GOOD
            and track.count >= JUDGED_FROM
            and _slow(track.latency_ms, usual)
            and load < ROOM_BELOW * (good - 1) * concurrency
            and _may_rest_one_more(tracks, up)
        ):
            tracks[name] = _rest(track, now_ms, faulty=False)
            good -= 1
    return tracks


def _may_rest_one_more(tracks: Mapping[str, Track], up: Sequence[str]) -> bool:
    aside = sum(tracks[name].standing is not Standing.GOOD for name in up)
    most = len(up) // ASIDE_MAX if len(up) > ASIDE_MAX else len(up) // 2
    return aside < most


def _weight(track: Track, base: int, usual: float | None) -> int:
    if track.standing is Standing.RESTING:
        return 0
    if track.standing is Standing.TESTING:
        return 1
    share = 1.0
    if usual is not None and track.count >= JUDGED_FROM:
        times = track.latency_ms / max(usual, 1.0)
        if times > SAME_UP_TO and track.latency_ms - usual > SLOW_MS_MIN:
            share = max(SHARE_MIN, 1 / times)
    return max(1, min(WEIGHT_MAX, round(base * share)))

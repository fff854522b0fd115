"""Adjusts weights: slow replicas get fewer requests, faulty ones rest, and all are tested again.

A pure function: the last tracks and the new counters give new tracks and weights.

A slow replica takes long to begin an answer, compared with the others of its service. Its number of
requests in flight does not count, because the proxy itself already balances by that.
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
SLOW_FROM = 2.5  # times the usual latency: rests while the others have room
SLOW_MS_MIN = 10.0  # a few milliseconds more are not slow
SHARE_MIN = 0.05  # of its weight: the least that a slow replica gets while it is needed
MEMORY = 50  # answers; older ones hardly count
JUDGED_FROM = 10  # answers; fewer do not show that a replica is slow
ROOM_BELOW = 0.85  # of the others' slots in use: the slow one is not needed
ROOM_ABOVE = 0.95  # beyond: it is needed again
ROOM_MEMORY = 0.3  # how much the newest load counts
FAULTY_FROM = 0.5  # share of its answers that failed
FAULTY_MEMORY = 10  # answers; seven failures in a row make a replica faulty
FAULTY_OTHERS_MAX = 0.25  # if the others fail too, the replica is not the cause
REST_FIRST_MS = 5_000
REST_MAX_MS = 60_000
TEST_MS_MAX = 5_000
TEST_ANSWERS = 3
ASIDE_MAX = 3  # at most one in three replicas rests, or one of two
SILENT_BEGUN = 3  # after this many requests without an answer, silence counts as latency


class Standing(enum.StrEnum):
    GOOD = "good"
    RESTING = "resting"  # weight 0 until `until_ms`
    TESTING = "testing"  # weight 1, until its answers show whether it is well


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one replica between two calls."""

    answered: int
    failed: int
    begun: int  # requests it had been given when `answered` last grew
    silent_since_ms: int
    latency_ms: float = 0.0
    count: int = 0  # answers behind `latency_ms`
    failing: float = 0.0
    standing: Standing = Standing.GOOD
    faulty: bool = False  # why it rests or is tested; False: because it is slow
    until_ms: int = 0
    rests: int = 0


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one service between two calls."""

    tracks: dict[str, Track] = {}
    load: float = 0.0  # slots in use and requests that wait for one, smoothed
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
    """The new balance, and the weight that each replica in `base` should have now. `latencies`: the
    milliseconds until an answer began, of answers since the last call. A replica with weight 0
    rests; at least one that is up never does."""
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


# With hash routing, a change of weight moves conversations away from their cached prefixes. There
# the bound on load protects a slow replica.
BY_SPEED = (Routing.LEAST_LOADED, Routing.P2C)


def _observe(
    track: Track | None, server: ServerCount, latencies: Sequence[int], now_ms: int
) -> Track:
    if track is None or server.answered < track.answered:  # new, or restarted
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
    """The median latency; of two replicas, the faster one's."""
    known = sorted(
        track.latency_ms
        for track in tracks
        if track.standing is Standing.GOOD and track.count >= JUDGED_FROM
    )
    return known[(len(known) - 1) // 2] if known else None


def _worth(server: ServerCount, track: Track, usual: float | None) -> float:
    """The slots that a replica's work would take at the usual latency. A slow replica has many
    requests in flight only because it is slow."""
    if usual is None or track.latency_ms <= usual:
        return float(server.in_flight)
    return server.in_flight * usual / track.latency_ms


def _slow(latency_ms: float, usual: float | None) -> bool:
    return usual is not None and latency_ms > max(SLOW_FROM * usual, usual + SLOW_MS_MIN)


def _tested(track: Track, usual: float | None, now_ms: int) -> Track:
    """A test follows a rest. It ends in good standing or in a longer rest."""
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
    """Slow replicas rest while the others have room for the whole load. This needs a known
    concurrency per replica."""
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

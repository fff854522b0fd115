"""A node's standing: ok, suspect, quarantined, and the way back, one transition at a time.

    ok          -- suspected -----------------------------> suspect, a check is wanted
    ok, suspect -- a second, independent suspicion -------> quarantined
    suspect     -- check passed, or not answered ---------> ok, the suspicion is remembered, unless
                                                            the check refutes it
    ok, suspect -- check failed --------------------------> quarantined
    quarantined -- the wait is over ----------------------> quarantined, a check is wanted
    quarantined -- check passed --------------------------> ok, with its history
    quarantined -- check failed, or not answered ---------> quarantined, twice the wait
    ok, suspect -- it cannot start or keep anything ------> quarantined, retested soon

A record is frozen: a change is an event that carries the new one.
"""

from __future__ import annotations

import msgspec

from shoal.model.health import HealthRule, Record, Standing, StandingChange, Suspicion
from shoal.model.policy import Policy

HISTORY_MAX = 16
SUSPICIONS_MAX = 4
DOUBLINGS_MAX = 20
FAULT_RETEST_MS = 30_000


def suspected(record: Record, news: Suspicion, rule: HealthRule, *, room: bool) -> Record:
    """`room`: one more node may be quarantined (see `room_for`)."""
    if record.standing is Standing.QUARANTINED:
        return record
    recent = [s for s in record.suspicions if news.at_ms - s.at_ms <= rule.suspicion_ms]
    second = news.proven or any(independent(news, old) for old in recent)
    if record.standing is Standing.SUSPECT and not second:
        return record  # the check that decides is under way
    known = any(not independent(news, old) for old in recent)
    noted = msgspec.structs.replace(
        record, suspicions=(*recent, news)[-SUSPICIONS_MAX:], network=news.network or record.network
    )
    if second and room:
        first = "" if news.proven else "suspected a second time: "
        return _quarantine(noted, news.at_ms, f"{first}{news.why}", rule)
    if known and not second:
        return record  # the same rank of the same job: it was checked for that
    return _enter(noted, Standing.SUSPECT, news.at_ms, news.why, check_since_ms=news.at_ms)


def faulted(record: Record, why: str, now_ms: int, rule: HealthRule) -> Record:
    """The node itself reported it, so it is certain: it counts even if many others are in
    quarantine. A full disk is often fixed within minutes, so the retest comes soon."""
    if record.standing is Standing.QUARANTINED:
        return record
    return _quarantine(msgspec.structs.replace(record, faulty=True), now_ms, why, rule)


def checked(
    record: Record, passed: bool, why: str, now_ms: int, rule: HealthRule, *, room: bool
) -> Record:
    """The result of a check, requested here or by a user."""
    if record.standing is Standing.QUARANTINED:
        if passed:
            return _enter(record, Standing.OK, now_ms, f"retest passed: {why}")
        return _quarantine(record, now_ms, f"retest failed: {why}", rule)
    if not passed and room:
        return _quarantine(record, now_ms, f"check failed: {why}", rule)
    if not passed:
        why = f"check failed ({why}), but too many nodes are in quarantine already"
    if record.standing is Standing.SUSPECT:
        kept = tuple(one for one in record.suspicions if not (passed and one.refutable))
        record = msgspec.structs.replace(record, suspicions=kept)
        return _enter(record, Standing.OK, now_ms, f"check passed: {why}" if passed else why)
    return record


def passed_by(record: Record, now_ms: int, rule: HealthRule) -> Record:
    """What time alone changes: retests become due, unanswered checks are given up."""
    wanted = record.check_since_ms >= 0
    if wanted and now_ms - record.check_since_ms > rule.check_wait_ms:
        return unanswered(record, now_ms, rule)
    if record.standing is Standing.QUARANTINED and not wanted and now_ms >= record.retest_ms:
        return msgspec.structs.replace(record, check_since_ms=now_ms)
    return record


def unanswered(record: Record, now_ms: int, rule: HealthRule, why: str = "") -> Record:
    """The check that was wanted showed nothing."""
    more = f": {why}" if why else ""
    if record.standing is Standing.QUARANTINED:
        return _quarantine(record, now_ms, f"retest not answered{more}", rule)
    return _enter(record, Standing.OK, now_ms, f"check not answered{more}")


def released(record: Record, who: str, now_ms: int) -> Record:
    """An operator ends the quarantine, and earlier suspicions no longer count."""
    if record.standing is Standing.OK:
        return record
    cleared = msgspec.structs.replace(record, suspicions=())
    return _enter(cleared, Standing.OK, now_ms, f"released by {who}")


def wants_check(record: Record) -> bool:
    return record.check_since_ms >= 0


def wake_ms(record: Record, rule: HealthRule) -> int | None:
    """When `passed_by` next changes something."""
    if record.check_since_ms >= 0:
        return record.check_since_ms + rule.check_wait_ms + 1
    return record.retest_ms if record.standing is Standing.QUARANTINED else None


def independent(one: Suspicion, other: Suspicion) -> bool:
    """Not the same rank of the same job, which may have more work than others, nor another rank of
    the same attempt, which may be waiting for that one. What one owner's jobs say is one word."""
    if one.owner and one.owner == other.owner:
        return False
    if not one.job or not other.job or one.job != other.job:
        return True
    return one.attempt != other.attempt and one.member != other.member


def room_for(quarantined: int, nodes: int, rule: HealthRule) -> bool:
    return quarantined < max(1, nodes * rule.quarantined_milli_max // 1000)


def _quarantine(record: Record, now_ms: int, why: str, rule: HealthRule) -> Record:
    calm = record.standing is Standing.OK and now_ms - record.since_ms > rule.forgive_ms
    strikes = 1 if calm else record.strikes + 1
    if record.faulty and record.standing is Standing.QUARANTINED:
        strikes = record.strikes  # a full disk is looked at every 30 s, and is one trouble
    wait_ms = min(rule.retest_ms << min(strikes - 1, DOUBLINGS_MAX), rule.retest_ms_max)
    if record.faulty:
        wait_ms = min(rule.retest_ms, FAULT_RETEST_MS)
    struck = msgspec.structs.replace(record, strikes=strikes, retest_ms=now_ms + wait_ms)
    return _enter(struck, Standing.QUARANTINED, now_ms, why)


def _enter(
    record: Record, standing: Standing, now_ms: int, why: str, check_since_ms: int = -1
) -> Record:
    entry = StandingChange(now_ms, standing, why)
    return msgspec.structs.replace(
        record,
        standing=standing,
        since_ms=now_ms,
        why=why,
        check_since_ms=check_since_ms,
        retest_ms=record.retest_ms if standing is Standing.QUARANTINED else 0,
        faulty=record.faulty and standing is Standing.QUARANTINED,
        network=record.network and standing is not Standing.OK,
        history=(*record.history, entry)[-HISTORY_MAX:],
    )


def rule_of(policy: Policy) -> HealthRule:
    return HealthRule(hang_floor_ms=policy.hang_after_ms, retest_ms=policy.retest_ms)

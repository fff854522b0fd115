"""What the audit log notes of requests: each that changes something, signs in or is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any

from msgspec import Meta

from shoal.api.handling import Handler, aside, handles
from shoal.api.http import Connection, Scope
from shoal.api.principal import SAFE_METHODS, SCOPE, Principal
from shoal.api.problems import Refusal
from shoal.calls.people import PeopleCalls
from shoal.control.audit import AuditQueue, without_secret
from shoal.control.loop import ControlLoop
from shoal.control.stores import Stores
from shoal.model.people import AuditEntry, AuditView

NOTE = "shoal.audit"  # in a request's scope: what a handler adds to its line
QUIET = "shoal.audit.quiet"
HANDLER, PATH_PARAMS = "shoal.handler", "shoal.path_params"  # as the application found them
REFUSED = (401, 403, 404, 421, 429)
ENTRIES_MAX = 10_000
WORD_MAX = 200
# Nobody's requests push those of others out of the log. Of refused requests, and of strangers, it
# has so many lines ...
REFUSED_MAX = 30  # per sender ...
STRANGERS_MAX = 300  # ... and for all who have not signed in ...
REFUSED_MS = 60_000  # ... within this time
SENDERS_MAX = 1_000
# ... and of other requests so many an hour. Beyond them, a line stands for those of a minute.
SAME_MAX = 600  # of one user with one verb
TENANT_MAX = 6_000
HOUR_MS, MINUTE_MS = 3_600_000, 60_000
KINDS_MAX = 20_000  # users with verbs that are counted

Word = Annotated[str, Meta(max_length=64)]


def note(scope: Any, **fields: str) -> None:
    """What only the handler knows: the user who signs in, or the new job's id."""
    scope.setdefault(NOTE, {}).update(fields)


def quiet(scope: Any) -> None:
    """Nothing happened that is worth a line."""
    scope[QUIET] = True


class Lines:
    """How many there were in this hour, and how many requests were left out since the last."""

    __slots__ = ("line_ms", "lines", "since_ms", "skipped")

    def __init__(self, now_ms: int) -> None:
        self.since_ms, self.lines, self.line_ms, self.skipped = now_ms, 0, 0, 0

    def fresh(self, now_ms: int) -> bool:
        return 0 <= now_ms - self.since_ms < HOUR_MS

    def over(self, now_ms: int, most: int) -> bool:
        if not self.fresh(now_ms):
            self.since_ms, self.lines = now_ms, 0
        return self.lines >= most


class Auditor:
    """Called with every answer of the API, before it is sent."""

    def __init__(self, log: AuditQueue, now_ms: Callable[[], int]) -> None:
        self.log = log
        self._now_ms = now_ms
        self._refused: dict[str, deque[int]] = {}
        self._skipped = 0
        self._done: dict[tuple[str, ...], Lines] = {}

    async def answered(self, scope: Scope, status: int) -> None:
        """A websocket that is accepted has the status 101."""
        entry = self._entry(scope, status)
        if entry is not None:
            await self.log.write(entry)

    async def guard(self, connection: Connection, _: Handler) -> None:
        """While no line can be written, nobody but the operator may change something: whoever holds
        the machine could change the log itself."""
        who: Principal | None = connection.scope.get(SCOPE)
        safe = connection.scope.get("method", "GET") in SAFE_METHODS
        if self.log.stuck and not safe and who is not None and who.token:
            message = "the audit log cannot be written, so nothing can be changed; tell an admin"
            raise Refusal(507, message, "audit")

    def _entry(self, scope: Scope, status: int) -> AuditEntry | None:
        handler: Handler | None = scope.get(HANDLER)
        if handler is None:
            return None  # there is no such route: nothing was asked for
        who: Principal | None = scope.get(SCOPE)
        told: dict[str, str] = scope.get(NOTE, {})
        changes = status == 101 or scope.get("method", "GET") not in SAFE_METHODS
        refused = status in REFUSED and (who is None or not who.admin)
        if not (changes or told or refused) or scope.get(QUIET):
            return None
        source, known = _source(scope), who is not None or "who" in told
        if (status in REFUSED or not known) and not (
            self._room(f"{source} {who.token if who else ''}", REFUSED_MAX)
            and (known or self._room("", STRANGERS_MAX))
        ):
            self._skipped += 1
            return None
        skipped = 0
        if who is not None and not who.admin:
            # A request that was refused as wrong changes as little as one that was not allowed.
            verb = handler.verb if status < 400 else ""
            skipped = self._count((who.tenant, who.user or who.key, verb))
            if skipped < 0:
                return None
        skipped, self._skipped = skipped + self._skipped, 0
        fields = {
            "who": who.user if who else "",
            "tenant": who.tenant if who else "",
            "token": (who.token or who.key) if who else "",
            "on": without_secret(" ".join(map(str, scope.get(PATH_PARAMS, {}).values()))),
            **told,
        }
        return AuditEntry(
            seq=0,
            at_ms=self._now_ms(),
            verb=handler.verb[:WORD_MAX],
            status=status,
            source=source,
            skipped=skipped,
            **{name: text[:WORD_MAX] for name, text in fields.items()},
        )

    def _count(self, kind: tuple[str, ...]) -> int:
        """How many requests of this kind were left out before the line; -1: this one is, too."""
        now_ms = self._now_ms()
        if len(self._done) >= KINDS_MAX:
            self._done = {key: one for key, one in self._done.items() if one.fresh(now_ms)}
        own = self._done.setdefault(kind, Lines(now_ms))
        every = self._done.setdefault(kind[:1], Lines(now_ms))
        if own.over(now_ms, SAME_MAX) or every.over(now_ms, TENANT_MAX):
            if now_ms - own.line_ms < MINUTE_MS:
                own.skipped += 1
                return -1
        else:
            every.lines += 1
        own.lines, own.line_ms = own.lines + 1, now_ms
        skipped, own.skipped = own.skipped, 0
        return skipped

    def _room(self, sender: str, most: int) -> bool:
        now_ms = self._now_ms()
        if len(self._refused) >= SENDERS_MAX:
            oldest = next(iter(self._refused))
            del self._refused[oldest]
        times = self._refused.setdefault(sender, deque(maxlen=most))
        if len(times) == most and times[0] > now_ms - REFUSED_MS:
            return False
        times.append(now_ms)
        return True


def audited(stores: Stores | None, loop: ControlLoop) -> Auditor | None:
    """Without a home, as in some tests, there is no log."""
    if stores is None:
        return None
    return Auditor(stores.audit(loop.alarms), loop.clock.now_ms)


def _source(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client and client[0] else "socket"


class Audit:
    @handles(PeopleCalls.audit)
    async def audit(
        self,
        auditor: Auditor | None,
        user: Word = "",
        tenant: Word = "",
        verb: Word = "",
        limit: Annotated[int, Meta(ge=1, le=ENTRIES_MAX)] = 100,
    ) -> AuditView:
        if auditor is None:
            return AuditView(entries=[], head="")
        found, head = auditor.log.newest_first, auditor.log.head

        def fits(entry: AuditEntry) -> bool:
            return (
                (not user or entry.who == user)
                and (not tenant or entry.tenant == tenant)
                and (not verb or entry.verb == verb or entry.verb.startswith(f"{verb}."))
            )

        def read() -> list[AuditEntry]:
            return list(islice(filter(fits, found()), limit))

        return AuditView(entries=await aside(read, limit), head=head)

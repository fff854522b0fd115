"""The process that answers for moments of the past: it rebuilds the state, and shows it with the
same functions as the present is shown.

A request is a line of JSON on standard input. An answer is a line with a status and a length, and
a body of that length. It ends with its controller, or when its input ends.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec

from shoal.api.feed import Feed
from shoal.api.principal import Principal
from shoal.api.queue import QueueRow, own_in_line, queue_row
from shoal.api.reach import Reach, seen_events
from shoal.control.alarms import Alarms
from shoal.control.home import ClusterConfig, Home
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.past.log import Log, Moments, NotYet, TooEarly
from shoal.control.plugins import titles
from shoal.control.store import formats
from shoal.control.store.events import EventStore
from shoal.control.store.schema import Unreadable
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.apply_queue import adopt_functions
from shoal.core.state.events.log import Recorded, published
from shoal.core.state.state import State
from shoal.database.base import Database
from shoal.database.sqlite import SqliteDatabase
from shoal.machine.kernel import die_with_parent
from shoal.model.feed import Snapshot
from shoal.model.finding import EVERY_JOB, LAST_ENDED, JobFilter
from shoal.model.job import Job
from shoal.model.policy import Others
from shoal.model.views import Problem
from shoal.ports import Engine, StoreError
from shoal.tick import Stage

READ_S_MAX = 10.0  # of one request; the next one goes on from there
MEMORY_BYTES_MAX = 8 << 30
TOO_LARGE = f"that moment needs more than {MEMORY_BYTES_MAX >> 30} GiB of memory"
QUEUE_MAX = 200  # waiting jobs in an answer
EVENTS_SHOWN = 30
ENDED_LOOKED_AT = 5_000  # finished jobs, for the last of them
EVENTS_LOOKED_AT = 1_000  # for those that one tenant may see


class MomentAsk(msgspec.Struct, frozen=True, kw_only=True):
    """`others`: as the policy in force now says; what was allowed then does not count."""

    at_ms: int
    now_ms: int
    who: Principal
    others: Others


class MomentView(msgspec.Struct, kw_only=True):
    at_ms: int
    oldest_ms: int
    now_ms: int
    seq: int
    snapshot: Snapshot
    queue: list[QueueRow]
    events: list[Recorded]


class _Then:
    """A clock that stands still."""

    ms = 0

    def now_ms(self) -> int:
        return self.ms


class _Nobody:
    fences = False


class PastStore(EventStore):
    """The log as it was after the event `until`. It only reads."""

    def __init__(self, database: Database) -> None:
        formats.refuse_newer(database)
        self.database = database
        self.alarms = Alarms()
        self.snapshot_seq = self.unbroken_from = 0
        self.until = 0

    def finished(
        self,
        limit: int,
        after: int = -1,
        wanted: JobFilter = EVERY_JOB,
        before: str = "",  # noqa: ARG002
    ) -> list[Job]:
        search = self._search(wanted, LAST_ENDED, after)
        place = (self.until + 1, -1)
        return [job for _, job in search.page(self._ended, limit, place, ENDED_LOOKED_AT).jobs]


class PastLoop(ControlLoop):
    """What the views of the API read, with the state of a moment in it."""

    def __init__(self, store: PastStore) -> None:
        self.then = _Then()
        self.past = store
        super().__init__(
            store, cast(Engine, _Nobody()), self.then, None, cast(LogStore, None), alarms=Alarms()
        )

    def _load(self) -> None:
        """Not now: each request says of when."""

    def show(self, state: State, seq: int, at_ms: int, others: Others) -> None:
        adopt_functions(state, FUNCTIONS._replace(suppliers=titles(state.policy)))
        self.tick.state, self.tick.last_seq, self.tick.stage = state, seq, Stage.LOADED
        self.then.ms, self.past.until = at_ms, seq
        self.policy = msgspec.structs.replace(state.policy, others=others)


class MomentReader:
    def __init__(self, database: Database) -> None:
        self._moments = Moments(Log(database))
        self._loop = PastLoop(PastStore(database))

    def answer(self, ask: MomentAsk) -> tuple[int, bytes]:
        """A status of HTTP, and the body."""
        try:
            return 200, msgspec.json.encode(self._view(ask))
        except TooEarly as error:
            text = f"is too early: the oldest moment that is known is {_when(error.oldest_ms)}"
            return 422, _problem(f"{text} (at_ms={error.oldest_ms})", "at_ms")
        except NotYet as error:
            text = f"that moment is being read: {error.left:,} events are left; ask again"
            return 503, _problem(text)
        except (StoreError, Unreadable) as error:
            return 507, _problem(f"that moment cannot be read: {error}")

    def _view(self, ask: MomentAsk) -> MomentView:
        at_ms = min(ask.at_ms, ask.now_ms)
        state, seq = self._moments.at(at_ms, READ_S_MAX)
        loop = self._loop
        loop.show(state, seq, at_ms, ask.others)
        who = ask.who
        if at_ms < who.since_ms:  # whatever had its name then was another tenant's
            who = msgspec.structs.replace(who, tenant=f"{who.tenant}@{who.since_ms}")
        reach = Reach(loop, who)
        line = own_in_line(reach, QUEUE_MAX)
        return MomentView(
            at_ms=at_ms,
            oldest_ms=self._moments.oldest_ms(),
            now_ms=ask.now_ms,
            seq=seq,
            snapshot=Feed(loop).once("" if who.sees_all else who.tenant),
            queue=[queue_row(reach, job, position, None) for position, job in line],
            events=self._events(reach, seq),
        )

    def _events(self, reach: Reach, seq: int) -> list[Recorded]:
        most = EVENTS_SHOWN if reach.who.admin else EVENTS_LOOKED_AT
        found = self._moments.log.notable(seq, most)
        return published(seen_events(reach, found)[-EVENTS_SHOWN:])


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _problem(message: str, field: str = "") -> bytes:
    return msgspec.json.encode(Problem(message=message, field=field))


def database_of(home: Home, config: ClusterConfig | None) -> Database:
    if config is not None and config.database:
        from shoal.database.postgres import PostgresDatabase

        return PostgresDatabase(config.database)
    return SqliteDatabase(home.database)


def serve(home: Home, parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    gc.set_threshold(50_000, 20, 100)  # a state is large and has no cycles
    reader: MomentReader | None = None
    decode: Any = msgspec.json.Decoder(MomentAsk).decode
    while line := sys.stdin.buffer.readline():
        try:
            reader = reader or MomentReader(database_of(home, home.read_config()))
            status, body = reader.answer(decode(line))
        except StoreError as error:
            status, body = 503, _problem(f"the past cannot be read: {error}")
        except MemoryError:
            status, body, reader = 507, _problem(TOO_LARGE), None
        except Exception as error:  # the next question begins again, with a snapshot
            traceback.print_exc()
            text = f"that moment cannot be rebuilt ({error!r}); the controller's log says more"
            status, body, reader = 500, _problem(text), None
        sys.stdout.buffer.write(b"%d %d\n" % (status, len(body)) + body)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(Home(Path(sys.argv[1])), int(sys.argv[2]))

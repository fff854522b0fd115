"""Follows the log, puts notices into the outbox, and has them sent. A receiver that hangs or is
gone costs others nothing: it has threads of its own, and is tried ever less often."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import random
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.control.loop import ControlLoop
from shoal.control.notices import senders
from shoal.control.notices.outbox import Outbox, Waiting
from shoal.control.notices.senders import KEY_PREFIX, SendError
from shoal.control.secretstore import SecretError, tenant_since_ms
from shoal.control.stores import Stores
from shoal.core.features.notices import KINDS, concerns, notices_of, wishes_of
from shoal.core.state.events.arrays import ArraySubmitted
from shoal.core.state.events.base import JobEvent
from shoal.core.state.events.identity import TenantRemoved
from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.notices import RuleRemoved, RuleSet
from shoal.core.state.events.queue import JobSubmitted
from shoal.database.sqlite import set_aside
from shoal.model.job import DEFAULT_TENANT, Job
from shoal.model.notice import Notice, NoticeSettings, What, secret_of
from shoal.model.report import Report
from shoal.ports import StoreDamaged, StoreError

log = logging.getLogger("shoal.control")

SUBMITTED = (JobSubmitted, ArraySubmitted)
EVENTS_AT_ONCE = 2_000
THREADS, PROBES = 16, 8  # for receivers that work, and for those that failed last time
OF_TENANT_MAX = 4  # of each of these, for the receivers of one tenant
TESTS_MAX = 4  # that people ask for, at a time
TRIES_MAX = 16
AGE_MS_MAX = 24 * 3_600_000
BACKOFF_MS, BACKOFF_MS_MAX = 1_000, 600_000
ALARM = "notices"
SETTINGS = "notices.json"

Result = TypeVar("Result")


class Posting:
    """A follower of the loop. `run` does the work; nothing of it is on the loop's way."""

    def __init__(
        self,
        loop: ControlLoop,
        stores: Stores,
        cluster: str,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._loop = loop
        self._stores = stores
        self._cluster = cluster
        self._now_ms = now_ms
        self._wake = asyncio.Event()
        self._asked: set[str] = set()  # live jobs with wishes of their own
        self._wishes: frozenset[What] | None = None  # of all rules, since they last changed
        self._behind = True  # the log may hold events that were not looked at
        self._removed: list[str] = []  # tenants
        # Receivers that are being tried, with their tenants and whether they worked last time.
        self._busy: dict[str, tuple[str, bool]] = {}
        self._disk = ThreadPoolExecutor(1, "notices")
        self._tests = asyncio.Semaphore(TESTS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._key, self._making = b"", threading.Lock()
        self.settings = self._read_settings()
        self.outbox = self._open()
        self._cursor = self._begin()

    def _begin(self) -> int:
        """Where to go on in the log. A new outbox begins with what happens from now on, and so does
        one that has read another log, because events were lost."""
        cursor, last = self.outbox.cursor, self._loop.last_seq
        if cursor is None or cursor > last or self._is_other_log(cursor):
            self.outbox.take((), last, self._now_ms(), self._loop.store.mark(last))
            return last
        return cursor

    def _is_other_log(self, cursor: int) -> bool:
        read, there = self.outbox.mark, self._loop.store.mark(cursor)
        return bool(read) and bool(there) and read != there

    def _open(self) -> Outbox:
        place = self._stores.notices
        try:
            return Outbox(place)
        except StoreDamaged as error:
            if not isinstance(place, Path):
                raise
            set_aside(place, f"{place.name}.damaged")
            text = f"{error}: it is kept as {place.name}.damaged"
            self._loop.alarms.raise_(ALARM, f"{text}, and notices that waited in it are not sent")
            return Outbox(place)

    # -- the loop's side -------------------------------------------------------------------

    def stepped(self, report: Report, events: Sequence[Event], seq: int) -> None:  # noqa: ARG002
        for event in events:
            if isinstance(event, SUBMITTED):
                if event.spec.notify and not event.spec.array:
                    self._asked.add(event.job)
            elif isinstance(event, TenantRemoved):
                self._removed.append(event.tenant)
                self._wake.set()
            elif isinstance(event, RuleSet | RuleRemoved):
                self._wishes = None
            elif isinstance(event, KINDS) and (
                getattr(event, "job", "") in self._asked or concerns(event, self._wishes_of_rules())
            ):
                self._behind = True
                self._wake.set()

    def _wishes_of_rules(self) -> frozenset[What]:
        """Most events concern nobody: the log is not read for them."""
        if self._wishes is None:
            self._wishes = wishes_of(self._loop.tick.state.rules.values())
        return self._wishes

    # -- the work --------------------------------------------------------------------------

    async def run(self) -> None:
        await self._loop.settled()
        state = self._loop.state
        live = (*state.jobs.values(), *state.arrays.values())
        self._asked |= {job.id for job in live if job.spec.notify and not job.spec.array}
        self._removed += state.identity.removed  # a controller may have died before it forgot them
        while True:
            self._wake.clear()
            try:
                while self._behind:
                    await self._collect()
                for tenant in self._removed:
                    await self._kept(lambda tenant=tenant: self.outbox.forget(tenant))  # type: ignore[misc]
                self._removed.clear()
                await self._dispatch()
                busy = list(self._busy)
                due_ms = await self._kept(lambda: self.outbox.next_ms(busy))  # noqa: B023
                self._loop.alarms.clear(ALARM)
            except StoreError as error:
                self._loop.alarms.raise_(ALARM, f"notices cannot be kept: {error}")
                due_ms = self._now_ms() + BACKOFF_MS_MAX // 60
            left_ms = None if due_ms is None else due_ms - self._now_ms()
            if left_ms is not None and left_ms <= 0 and self._busy:
                left_ms = None  # it waits for a thread, whose end wakes us
            pause_s = None if left_ms is None else max(0.05, left_ms / 1000)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def _collect(self) -> None:
        """Put into the outbox what the log gives rise to, and how far it was read."""
        store, start = self._loop.store, self._cursor
        self._behind = False
        until = self._loop.last_seq
        found = await self._kept(lambda: store.events(start, EVENTS_AT_ONCE, notable=True))
        whole = len(found) == EVENTS_AT_ONCE
        read_to = found[-1].seq if found else start
        notices = await self._notices([one for one in found if isinstance(one.event, KINDS)])
        self._cursor = max(start, read_to if whole else max(read_to, until))
        if notices or self._cursor - start > EVENTS_AT_ONCE // 2:
            now_ms, cursor = self._now_ms(), self._cursor
            await self._kept(lambda: self.outbox.take(notices, cursor, now_ms, store.mark(cursor)))
        self._behind = self._behind or whole

    async def _notices(self, found: Sequence[Recorded]) -> list[Notice]:
        store = self._loop.store
        await self._loop.settled()
        named = {one.event.job for one in found if isinstance(one.event, JobEvent)}
        jobs: dict[str, Job | None] = {}
        while ended := [
            name for name in named if name not in jobs and self._loop.state.live(name) is None
        ]:  # again, because a job may end while others are looked up
            for name in ended:
                jobs[name] = await self._kept(lambda name=name: store.job(name))  # type: ignore[misc]
            await self._loop.settled()
        state, made = self._loop.state, []
        rules = list(state.rules.values())
        for recorded in found:
            name = recorded.event.job if isinstance(recorded.event, JobEvent) else ""
            job = state.live(name) or jobs.get(name)
            made += notices_of(recorded, rules, state.identity, job, self._cluster)
        self._asked = {name for name in self._asked if state.live(name) is not None}
        return made

    async def _dispatch(self) -> None:
        now_ms, busy = self._now_ms(), list(self._busy)
        for waiting in await self._kept(lambda: self.outbox.due(now_ms, busy, OF_TENANT_MAX)):
            works = not waiting.in_row
            used = Counter(tenant for tenant, working in self._busy.values() if working is works)
            most = THREADS if works else PROBES
            if used.total() < most and used[waiting.notice.tenant] < OF_TENANT_MAX:
                self._busy[waiting.receiver] = (waiting.notice.tenant, works)
                task = asyncio.create_task(self._try(waiting))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _try(self, waiting: Waiting) -> None:
        try:
            error = await self._deliver(waiting.notice)
            now_ms = self._now_ms()
            if not error:
                await self._kept(lambda: self.outbox.delivered(waiting, now_ms))
            else:
                old = now_ms - waiting.notice.at_ms > AGE_MS_MAX
                give_up = old or waiting.tries + 1 >= TRIES_MAX
                again_ms = now_ms + backoff_ms(waiting.in_row + 1)
                await self._kept(
                    lambda: self.outbox.failed(waiting, error, again_ms, give_up=give_up)
                )
        except StoreError as problem:
            self._loop.alarms.raise_(ALARM, f"notices cannot be kept: {problem}")
            await asyncio.sleep(BACKOFF_MS / 1000)  # what was sent is sent again, with the same id
        finally:
            del self._busy[waiting.receiver]
            self._wake.set()

    async def test(self, notice: Notice) -> str:
        """Try it once, for somebody who waits; returns what went wrong."""
        async with self._tests:
            return await self._deliver(notice)

    async def _deliver(self, notice: Notice) -> str:
        await self._loop.settled()
        since_ms = tenant_since_ms(self._loop.state.identity, notice.tenant)
        try:
            await _in_thread(lambda: self._send(notice, since_ms))
        except (SendError, SecretError) as error:
            return str(error)
        except Exception as error:
            log.exception("a notice could not be sent")
            return f"unexpected: {type(error).__name__}"
        return ""

    def _send(self, notice: Notice, since_ms: int) -> None:
        if notice.to.startswith("mail:"):
            if self.settings.smtp is None:
                raise SendError(
                    "no mail server is set; an admin sets it: shoal notify settings FILE"
                )
            smtp = self.settings.smtp
            password = self._secret(DEFAULT_TENANT, 0, smtp.password) if smtp.password else ""
            senders.mail(notice, notice.to[5:], smtp, password, self._cluster)
            return
        place, name = notice.to.removeprefix("slack:"), secret_of(notice.to)
        url = self._secret(notice.tenant, since_ms, name) if name else place
        allow = tuple(ipaddress.ip_network(one) for one in self.settings.allow)
        if notice.to.startswith("slack:"):
            senders.slack(notice, url, allow)
        else:
            senders.webhook(notice, url, self.key(notice.tenant, since_ms), self._cluster, allow)

    def _secret(self, tenant: str, since_ms: int, name: str) -> str:
        if self._loop.secrets is None:
            raise SendError("this controller keeps no secrets")
        return self._loop.secrets.value(tenant, since_ms, name).decode("utf-8", "replace").strip()

    # -- settings and the key ----------------------------------------------------------------

    def key(self, tenant: str, since_ms: int) -> str:
        """Each tenant has a key of its own: one tenant cannot sign for another."""
        with self._making:  # several threads send
            if not self._key:
                self._key = self._stores.notices_key()
        own = hmac.new(self._key, f"{tenant}/{since_ms}".encode(), hashlib.sha256).digest()
        return KEY_PREFIX + b64encode(own).decode()

    def set_settings(self, settings: NoticeSettings) -> None:
        self._stores.settings.set(SETTINGS, msgspec.json.encode(settings))
        self.settings = settings

    def _read_settings(self) -> NoticeSettings:
        try:
            found = self._stores.settings.get(SETTINGS)
            return msgspec.json.decode(found, type=NoticeSettings) if found else NoticeSettings()
        except (StoreError, msgspec.DecodeError, ValueError) as error:
            self._loop.alarms.raise_(SETTINGS, f"{SETTINGS} cannot be read: {error}")
            return NoticeSettings()

    async def _kept(self, act: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, act)


async def _in_thread(act: Callable[[], None]) -> None:
    """A thread that nobody waits for when the controller ends, unlike those of a pool."""
    running = asyncio.get_running_loop()
    done: asyncio.Future[None] = running.create_future()

    def settle(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        problem: Exception | None = None
        try:
            act()
        except Exception as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the controller has ended meanwhile
            running.call_soon_threadsafe(settle, problem)

    threading.Thread(target=work, name="notice", daemon=True).start()
    await done


def backoff_ms(failures: int) -> int:
    """Doubles up to 10 minutes; a quarter is chance, so that receivers do not come in step."""
    whole = min(BACKOFF_MS_MAX, BACKOFF_MS * 2 ** min(failures - 1, 20))
    return int(whole * random.uniform(0.75, 1.25))

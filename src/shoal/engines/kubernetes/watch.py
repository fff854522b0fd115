"""A copy of some of the API server's objects that follows them: list once, then watch.

A watch that breaks resumes where it was (its resourceVersion, kept fresh by bookmarks). If the
server no longer knows that place (410 Gone), or is silent about it, everything is listed again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from shoal.engines.kubernetes.client import Client, KubeError, Refused
from shoal.ports import SupplyError

log = logging.getLogger("shoal.kubernetes")

Object = dict[str, Any]

PAGE = 500
OBJECTS_MAX = 100_000
WATCH_S = 300  # the server ends a watch after this time, and the next begins where it was
# With bookmarks, a server says something about once a minute. One that was restored from a backup
# knows no place as late as ours: it accepts the watch, and says nothing until it is there again.
SILENT_S = 150.0
PAUSE_S = 0.2
PAUSE_S_MAX = 10.0
LASTED_S = 5.0  # what lasted longer than this was well
ASKED_PAUSE_S_MAX = 300.0
GOOD_S = 5.0  # a watch that broke has this time to be resumed


class Mirror:
    """`items` by name, as `keep` reduces them; `changed` is called when they change. `problem`: why
    the copy is not up to date."""

    def __init__(
        self,
        client: Client,
        path: str,
        keep: Callable[[Object], Object],
        changed: Callable[[], None],
        **params: str,
    ) -> None:
        self.items: dict[str, Object] = {}
        self.problem: Exception | None = None
        self.lists = 0
        self._client, self._path, self._params = client, path, params
        self._keep, self._changed = keep, changed
        self._version = ""  # where the next watch begins; empty: list first
        self._proved = 0.0  # when the server last sent something of the list or the watch
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Event()  # set when the copy is up to date, or is known not to be

    async def ready(self, timeout_s: float) -> None:
        """Wait until the copy is up to date; raises what is in the way."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow(), name=f"watch {self._path}")
        try:
            await asyncio.wait_for(self._turn.wait(), timeout_s)
        except TimeoutError:
            raise KubeError(f"{self._client.access.server} does not answer in time") from None
        if self.problem is not None:
            raise self.problem

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> None:
        pause_s = PAUSE_S
        while True:
            asked_s, began = 0.0, time.monotonic()
            try:
                if not self._version:
                    await self._list()
                self._up_to_date()
                await self._watch()
            except Refused as error:
                asked_s = min(error.pause_s, ASKED_PAUSE_S_MAX)
                if error.status == 410:
                    self._version = ""
                elif error.status != 429 or self._old:
                    self._fail(error)
            except (KubeError, SupplyError) as error:
                # A watch may break at any time. The copy is good until it cannot be resumed.
                if self._version and time.monotonic() >= self._proved + SILENT_S:
                    self._version = ""  # the list shows whether anything is wrong
                elif self._old:
                    self._fail(error)
            except Exception as error:  # a bug of ours, or an object that is not one
                log.exception("the watch of %s failed", self._path)
                self._version = ""
                self._fail(KubeError(f"an answer was not understood: {error!r}"))
            if time.monotonic() - began > LASTED_S:
                pause_s = PAUSE_S
            await asyncio.sleep(max(asked_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(PAUSE_S_MAX, pause_s * 2)

    @property
    def _old(self) -> bool:
        """For a while now, nothing has shown that the copy is up to date."""
        return not self._version or time.monotonic() > self._proved + GOOD_S

    def _fail(self, error: Exception) -> None:
        self.problem = error
        self._turn.set()

    def _up_to_date(self) -> None:
        if self.problem is not None:
            self.problem = None
            self._changed()
        self._turn.set()

    async def _list(self) -> None:
        found: dict[str, Object] = {}
        more = ""
        while True:
            params = {**self._params, "limit": str(PAGE)}
            if more:
                params["continue"] = more
            page = await self._client.request("GET", self._path, params=params)
            for one in page.get("items") or ():
                found[one["metadata"]["name"]] = self._keep(one)
            more = page["metadata"].get("continue") or ""
            if len(found) > OBJECTS_MAX:
                raise KubeError(f"{self._path} has more than {OBJECTS_MAX} objects")
            if not more:
                break
        self.items, self._version = found, str(page["metadata"]["resourceVersion"])
        self._proved = time.monotonic()
        self.lists += 1
        self._changed()

    async def _watch(self) -> None:
        """Until the server ends it; raises if that is not how it ends."""
        async with self._client.stream(
            self._path,
            SILENT_S,
            {
                **self._params,
                "watch": "true",
                "allowWatchBookmarks": "true",
                "resourceVersion": self._version,
                "timeoutSeconds": WATCH_S,
            },
        ) as lines:
            async for line in lines:
                self._proved = time.monotonic()
                if line.strip():
                    self._take(json.loads(line))

    def _take(self, event: Object) -> None:
        kind, found = event["type"], event["object"]
        if kind == "ERROR":
            code = int(found.get("code") or 500)
            raise Refused(code, str(found.get("reason") or ""), str(found.get("message") or kind))
        name = found["metadata"].get("name", "")
        before = self.items.get(name)
        if kind in ("ADDED", "MODIFIED"):
            self.items[name] = self._keep(found)
        elif kind == "DELETED":
            self.items.pop(name, None)
        if self.items.get(name) != before:
            self._changed()
        self._version = str(found["metadata"]["resourceVersion"])

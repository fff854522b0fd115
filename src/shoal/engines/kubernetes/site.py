"""One namespace at one API server: the pods of this cluster there, and what is made and deleted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from shoal.engines.kubernetes import read, render
from shoal.engines.kubernetes.access import Access
from shoal.engines.kubernetes.client import Client, KubeError, Refused
from shoal.engines.kubernetes.options import Options
from shoal.engines.kubernetes.watch import Mirror
from shoal.model.supply import OrderStatus, Provision

log = logging.getLogger("shoal.kubernetes")

Object = dict[str, Any]

READY_S = 20.0
MACHINES_READY_S = 5.0
KEPT_S = 600.0  # an ended pod is deleted after this time; until then people may look at it
SWEPT_MAX = 50  # pods deleted in one look
STARTS_S = 15.0  # a pod that takes longer to start may have events that say why
EVENTS_ASKED_MAX = 4  # pods whose events are read in one look
EVENTS_AGE_S = 30.0
CHANGES_S = 0.3  # changes within this time are reported together


class Site:
    """It holds copies and caches only: whatever is lost with it is found again."""

    def __init__(self, access: Access, cluster: str, changed: Callable[[], None]) -> None:
        self.access = access
        self.cluster = cluster
        self.client = Client(access)
        self._base = f"/api/v1/namespaces/{access.namespace}"
        chosen = render.selector(cluster)
        self._report = changed
        self._soon: asyncio.TimerHandle | None = None
        self.pods = Mirror(
            self.client, f"{self._base}/pods", read.slim, self._changed, labelSelector=chosen
        )
        self.machines = Mirror(self.client, "/api/v1/nodes", read.machine, self._changed)
        self._blind = ""  # why machines cannot be read
        self._noticed: dict[tuple[str, str], float] = {}  # when a notice without a time was seen
        self._events: dict[str, tuple[float, str]] = {}  # of pods that do not start

    def _changed(self) -> None:
        """Many changes at a time are one."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(CHANGES_S, self._notify)

    def _notify(self) -> None:
        self._soon = None
        self._report()

    async def close(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
        await self.pods.close()
        await self.machines.close()
        await self.client.close()

    def now_s(self) -> float:
        """By the API server's clock."""
        return time.time() + self.client.ahead_s

    # -- looking ---------------------------------------------------------------------------

    async def look(self) -> list[OrderStatus]:
        await self.pods.ready(READY_S)
        await self._look_at_machines()
        await self._sweep()
        hints = await self._hints()
        return read.orders(list(self.pods.items.values()), self.machines.items, self.now_s(), hints)

    async def _look_at_machines(self) -> None:
        """Nodes of Kubernetes belong to no namespace. Who may not read them goes without their
        labels and notices."""
        try:
            await self.machines.ready(MACHINES_READY_S)
            self._blind = ""
        except KubeError as error:
            if str(error) != self._blind:
                log.warning("machines cannot be read, so labels and notices are missing: %s", error)
            self._blind = str(error)

    def ends(self) -> dict[str, tuple[int, str]]:
        """The nodes that end, in how many milliseconds, and why."""
        now_s = self.now_s()
        found: dict[str, tuple[int, str]] = {}
        noticed: dict[tuple[str, str], float] = {}
        for notice in read.notices(list(self.pods.items.values()), self.machines.items):
            at_s = notice.at_s
            if at_s is None:
                key = (notice.node, notice.cause)
                at_s = noticed[key] = self._noticed.get(key, now_s + notice.in_s)
            left_ms = max(0, int((at_s - now_s) * 1000))
            if notice.node not in found or left_ms < found[notice.node][0]:
                found[notice.node] = (left_ms, notice.why)
        self._noticed = noticed
        return found

    def machine_under(self, node: str) -> Object | None:
        """The machine of a node whose pod lives."""
        for pod in self.pods.items.values():
            if read.node_of(pod) == node and not read.over_since_s(pod):
                return self.machines.items.get(read.machine_of(pod))
        return None

    def nodes(self) -> list[tuple[str, str]]:
        """The nodes whose pods live, and their supplies."""
        return [
            (read.node_of(pod), pod["metadata"]["labels"].get(render.SUPPLY, ""))
            for pod in self.pods.items.values()
            if read.node_of(pod) and read.machine_of(pod) and not read.over_since_s(pod)
        ]

    async def _hints(self) -> dict[str, str]:
        """What events say of pods that have a machine and do not start."""
        now = time.monotonic()
        waiting = [
            (name, pod)
            for name, pod in self.pods.items.items()
            if read.starts_long(pod, self.now_s(), STARTS_S)
        ]
        self._events = {name: self._events[name] for name, _ in waiting if name in self._events}
        stale = [
            (name, pod)
            for name, pod in waiting
            if now - self._events.get(name, (now - EVENTS_AGE_S, ""))[0] >= EVENTS_AGE_S
        ]
        for name, pod in stale[:EVENTS_ASKED_MAX]:
            self._events[name] = (now, "")
            with contextlib.suppress(KubeError):
                self._events[name] = (now, await self._last_event(pod))
        return {name: text for name, (_, text) in self._events.items()}

    async def _last_event(self, pod: Object) -> str:
        which = f"involvedObject.uid={pod['metadata']['uid']},type=Warning"
        page = await self.client.request(
            "GET", f"{self._base}/events", params={"fieldSelector": which, "limit": 100}
        )
        return read.last_event(page.get("items") or [])

    async def _sweep(self) -> None:
        now_s, swept = self.now_s(), 0
        for pod in list(self.pods.items.values()):
            ended = read.over_since_s(pod)
            if ended is not None and now_s > ended + KEPT_S and swept < SWEPT_MAX:
                swept += 1
                with contextlib.suppress(KubeError):
                    await self._delete(pod["metadata"]["name"], pod["metadata"]["uid"])

    # -- making and deleting ---------------------------------------------------------------

    async def provision(
        self, command: Provision, options: Options, join_url: str, token: str
    ) -> None:
        """All pods of the lot, or none."""
        owners = render.owned_by(await self._owner(options.owner, join_url))
        await self._make(f"{self._base}/secrets", render.secret(self.cluster, token, owners))
        made: list[Object] = []
        try:
            for pod in render.pods(self.cluster, join_url, command, options, token, owners):
                one = await self._make(f"{self._base}/pods", pod)
                if one is not None:
                    made.append(one)
                else:
                    await self._require_ours(pod["metadata"]["name"])
        except KubeError:
            for pod in made:
                with contextlib.suppress(KubeError):
                    await self._delete(pod["metadata"]["name"], pod["metadata"]["uid"])
            raise

    async def release(self, order: str) -> None:
        await self.pods.ready(READY_S)
        for pod in list(self.pods.items.values()):
            if read.order_of(pod) == order and "deletionTimestamp" not in pod["metadata"]:
                await self._delete(pod["metadata"]["name"], pod["metadata"]["uid"])

    async def report_sick(self, node: str, why: str) -> bool:
        """For the people who run the machines; it changes nothing."""
        for pod in self.pods.items.values():
            if read.node_of(pod) == node and not read.over_since_s(pod):
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.now_s()))
                name = f"{pod['metadata']['name']}.{time.time_ns():x}"
                event = render.sick_event(pod, why, now, name)
                await self._make(f"{self._base}/events", event)
                return True
        return False

    async def _owner(self, named: str, join_url: str) -> Object:
        """The ConfigMap that owns everything; it is asked for each time, because it may have been
        deleted and made again, and an owner that is gone takes its pods along."""
        name = named or render.owner_name(self.cluster)
        try:
            return await self.client.request("GET", f"{self._base}/configmaps/{name}")
        except Refused as error:
            if error.status != 404 or named:
                raise
        made = await self._make(f"{self._base}/configmaps", render.owner(self.cluster, join_url))
        return made or await self.client.request("GET", f"{self._base}/configmaps/{name}")

    async def _make(self, path: str, what: Object) -> Object | None:
        """None: it is already there."""
        try:
            return await self.client.request("POST", path, what)
        except Refused as error:
            if error.exists:
                return None
            raise

    async def _require_ours(self, name: str) -> None:
        found = await self.client.request("GET", f"{self._base}/pods/{name}")
        labels = found["metadata"].get("labels") or {}
        if labels.get(render.CLUSTER) != self.cluster:
            raise KubeError(f"there is a pod {name} that is not ours")

    async def _delete(self, name: str, uid: str) -> None:
        """That very pod: whatever else has its name by now is not ours to delete."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self.client.request("DELETE", f"{self._base}/pods/{name}", body)
        except Refused as error:
            if error.status not in (404, 409):
                raise

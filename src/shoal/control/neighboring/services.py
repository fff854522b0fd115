"""Services of this cluster at one neighbor: what is sent there, and what it says of them.

Everything may be done again: the same spec changes nothing there. Whether a version was taken is
in the state; what is remembered here saves only calls."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from shoal.calls.cluster import ServiceCalls
from shoal.client.transport import ShoalError, Unreachable
from shoal.control.loop import ControlLoop, Unreadable
from shoal.control.neighboring.carrying import Carrier, Hidden
from shoal.control.neighboring.door import certificate_in, plain
from shoal.control.neighboring.wire import NO_TOKEN, Anything, Wire, one_line
from shoal.core.features.service.sites import outgoing_services
from shoal.model.access import OPEN, access_of, is_open
from shoal.model.far import Far
from shoal.model.job import DEFAULT_TENANT, JOB_LABELS_MAX
from shoal.model.neighbor import HOME, service_mark, spec_there, version_marked
from shoal.model.service import ServiceSpec
from shoal.model.sites import HOME_SITE, SAID_MAX, DoorView, SiteReport, SiteWork
from shoal.ports import StoreError

log = logging.getLogger("shoal.neighbors")

AT_ONCE = 8  # calls to one neighbor
STRANGERS_S = 60.0  # between two looks for services of ours there that we do not know
TELL_S = 60.0  # its door may be another one by then
STOPPING = "stopping"
READY = ("ready", "idle", "asleep", "waking")
REPLICAS_MAX = 100_000


class ServiceOut(NamedTuple):
    """`spec`: as it is sent, but for what has another name there; None: what is there stays."""

    work: SiteWork
    spec: ServiceSpec | None
    hidden: Hidden
    package: str


class _Replica(msgspec.Struct):
    labels: dict[str, str] = {}


class _Spec(msgspec.Struct):
    replica: _Replica


class Seen(msgspec.Struct):
    """A service there."""

    name: str
    state: str
    ready: int
    spec: _Spec
    why: str = ""


class _There:
    """What was done for a service since this controller knows it."""

    def __init__(self) -> None:
        self.sent: ServiceSpec | None = None
        self.told: tuple[Far, ...] | None = None
        self.told_s = 0.0
        self.door: Far | None = None
        self.bringing: asyncio.Task[None] | None = None

    def stop(self) -> None:
        if self.bringing is not None:
            self.bringing.cancel()


class Abroad:
    def __init__(
        self, loop: ControlLoop, cluster: str, name: str, wire: Wire, carrier: Carrier
    ) -> None:
        self._loop, self._cluster, self._name = loop, cluster, name
        self._wire, self._carrier = wire, carrier
        self._there: dict[str, _There] = {}
        self._looked, self._some = 0.0, True
        self._few = asyncio.Semaphore(AT_ONCE)

    def close(self) -> None:
        for there in self._there.values():
            there.stop()

    async def round(self, outs: list[ServiceOut], price: int | None) -> tuple[SiteReport, ...]:
        try:
            await self._withdraw_strangers(bool(outs))
        except ShoalError as error:
            log.info("services that are not known here, at %s: %s", self._name, error)
        for gone in self._there.keys() - {out.work.service for out in outs}:
            self._there.pop(gone).stop()
        if not outs:
            return ()
        try:
            address = await self._address()
            port, pem = await asyncio.to_thread(self._loop.door)
            certificate, near = certificate_in(pem), _towards(address)
        except (OSError, StoreError, ValueError) as error:
            why = one_line(f"nothing can be sent there: {error}", SAID_MAX)
            works = [out.work for out in outs]
            return tuple(SiteReport(service=one.service, version=one.has, why=why) for one in works)
        ours = Far(site=HOME_SITE, address=near, port=port, certificate=certificate)
        found = [self._one(out, ours, address, price or 0) for out in outs]
        return tuple(await asyncio.gather(*found))

    async def _address(self) -> str:
        parts = urlsplit(self._wire.url)
        ask = asyncio.get_running_loop().getaddrinfo
        found = await ask(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        return min(str(one[4][0]) for one in found)

    async def _one(self, out: ServiceOut, ours: Far, address: str, price: int) -> SiteReport:
        """One that fails holds up neither the others nor what is said of jobs."""
        work, refused, why, seen = out.work, "", "", None
        there, version = self._there.setdefault(work.service, _There()), work.has
        try:
            async with self._few:
                seen = await self._wire.find(Seen, ServiceCalls.service, work.service)
                version = self._version(seen)
                if work.ends:
                    return await self._end(work, seen, version)
                if seen is not None and not version:
                    raise ShoalError(f"the name {work.service} is already used there")
                stops = seen is not None and seen.state == STOPPING
                if stops or not version:
                    there.told = None
                if stops:
                    version = 0  # it is sent again when it is gone
                elif out.spec is not None and self._sends(work, there, out.spec, version):
                    seen = await self._send(out, there) or seen
                    version = self._version(seen)
                if version:
                    await self._tell(work, there, ours, address, price)
        except Unreachable as error:
            why = str(error)
            if error.status in NO_TOKEN:
                refused = f"{why}; it may be an older Shoal, which takes jobs only"
        except ShoalError as error:
            refused = str(error)
        return SiteReport(
            service=work.service,
            version=version,
            ready=seen is not None and seen.state in READY,
            replicas=max(0, min(REPLICAS_MAX, seen.ready)) if seen is not None else 0,
            state=one_line(seen.state, 32) if seen is not None else "",
            why=one_line(why or (seen.why if seen is not None else ""), SAID_MAX),
            refused=one_line(refused, SAID_MAX),
            door=there.door,
        )

    def _sends(self, work: SiteWork, there: _There, spec: ServiceSpec, version: int) -> bool:
        """What it had and has not any more is not sent again: it has gone back by itself. The first
        time, it is sent all the same, since more than its version may have changed."""
        if not version or work.has != work.version:
            return version != work.version or there.sent != spec
        return version == work.version and there.sent != spec

    def _version(self, seen: Seen | None) -> int:
        mark = seen.spec.replica.labels.get(HOME, "") if seen is not None else ""
        return version_marked(mark, self._cluster)

    async def _end(self, work: SiteWork, seen: Seen | None, version: int) -> SiteReport:
        if seen is not None and version and seen.state != STOPPING:
            self._loop.check()
            await self._wire.ask(Anything, ServiceCalls.stop_service, work.service)
        return SiteReport(
            service=work.service,
            version=version,
            state=one_line(seen.state, 32) if seen is not None else "",
            ended=not version,
        )

    async def _send(self, out: ServiceOut, there: _There) -> Seen | None:
        """As it is there now; None: what it needs is on its way."""
        assert out.spec is not None
        if not self._carrier.has_all(out.package, out.hidden):
            if there.bringing is None:
                there.bringing = asyncio.create_task(self._carrier.bring(out.package, out.hidden))
            await asyncio.wait([there.bringing], timeout=1.0)
            if not there.bringing.done():
                return None
            done, there.bringing = there.bringing, None
            await done  # raises what went wrong
        self._loop.check()
        replica = self._carrier.renamed(out.spec.replica, out.hidden)
        spec = msgspec.structs.replace(out.spec, replica=replica)
        seen = await self._wire.ask(Seen, ServiceCalls.submit_service, spec)
        there.sent = out.spec
        return seen

    async def _tell(
        self, work: SiteWork, there: _There, ours: Far, address: str, price: int
    ) -> None:
        """Where its other sites are; it answers where its own door is."""
        doors = (ours, *work.doors)
        now_s = time.monotonic()
        if there.door is None or there.told != doors or now_s - there.told_s >= TELL_S:
            found = await self._wire.ask(
                DoorView, ServiceCalls.set_service_sites, work.service, doors
            )
            door = Far(
                site=self._name,
                address=address,
                port=found.port,
                certificate=found.certificate,
            )
            try:
                there.door, there.told, there.told_s = plain(door), doors, now_s
            except ValueError as error:
                raise ShoalError(f"its door: {error}") from None
        if (there.door.address, there.door.price) != (address, price):
            there.door = msgspec.structs.replace(there.door, address=address, price=price)

    async def _withdraw_strangers(self, any_out: bool) -> None:
        """Services of ours there that the state does not have there: this cluster was restored from
        a backup, say, or had declared the neighbor gone."""
        due = time.monotonic() - self._looked >= STRANGERS_S
        if not due or not (any_out or self._some):
            return
        rows: list[Seen] = []
        try:
            rows = await self._wire.ask(list[Seen], ServiceCalls.services)
        except Unreachable as error:
            if error.status not in NO_TOKEN:  # an older one, which takes none
                raise
        ours = [one for one in rows if self._version(one)]
        self._looked, self._some = time.monotonic(), bool(ours)
        if not ours:
            return
        try:
            await self._loop.settled()
        except Unreadable:
            return
        told = outgoing_services(self._loop.state)
        known = {work.service for neighbor, work in told if neighbor == self._name}
        for name in [one.name for one in ours if one.state != STOPPING]:
            if name not in known:
                self._loop.check()
                log.warning("service %s at %s is not known here; it is stopped", name, self._name)
                await self._wire.ask(Anything, ServiceCalls.stop_service, name)


def sent_spec(spec: ServiceSpec, cluster: str, version: int, owner: str) -> ServiceSpec:
    """As the neighbor is asked for it. Nobody there knows our keys, so one that is not open is
    called through our gateway; the neighbor leaves it to its own tenant."""
    replica = spec_there(spec.replica, DEFAULT_TENANT)
    labels = dict(list(replica.labels.items())[: JOB_LABELS_MAX - 1])
    labels[HOME] = service_mark(cluster, version)
    access = access_of(spec.way.access, owner)
    return msgspec.structs.replace(
        spec,
        replica=msgspec.structs.replace(
            replica, labels=labels, cluster="", priority=spec.replica.priority
        ),
        route=msgspec.structs.replace(
            spec.way, access=(OPEN,) if is_open(access) else (DEFAULT_TENANT,)
        ),
        clusters=(),
    )


def _towards(address: str) -> str:
    """Our own address, as the way there begins. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])

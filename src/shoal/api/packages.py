"""Working directories for the nodes; each is kept once, however often it is sent."""

from __future__ import annotations

import asyncio

from shoal.api.audit import quiet
from shoal.api.handling import handles
from shoal.api.http import Request
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.calls.jobs import JobCalls
from shoal.control.loop import ControlLoop
from shoal.control.packages import EVERYBODY, PackageError, PackageStore
from shoal.model.identity import EVERY_TENANT
from shoal.model.views import PackageView

WRITE_BYTES = 1 << 20
RETRY_S = 2


class Packages:
    @handles(JobCalls.package)
    def one(self, request: Request, reach: Reach, package: str) -> PackageView:
        size = _size(reach, package)
        if size is None:
            quiet(request.scope)  # every client asks before it sends: nobody was refused anything
            raise Refusal(404, f"there is no package {package[:64]!r}", "package")
        return PackageView(package=package, size=size)

    @handles(JobCalls.put_package, body_max=None)
    async def send(self, request: Request, reach: Reach, package: str) -> PackageView:
        loop, store = reach.loop, _store(reach.loop)
        owner = _owner(reach)
        size = _size(reach, package)
        if size is not None:
            return PackageView(package=package, size=size)
        try:
            length = int(request.headers.get("content-length", "0"))
        except ValueError:
            length = 0
        try:
            upload = store.begin(package, length, loop.packages_in_use(), owner)
            try:
                waiting = bytearray()
                async for data in request.stream():
                    waiting += data
                    if len(waiting) >= WRITE_BYTES:
                        await asyncio.to_thread(upload.write, bytes(waiting))
                        waiting.clear()
                await asyncio.to_thread(upload.write, bytes(waiting))
                await asyncio.to_thread(upload.finish)
            finally:
                upload.close()
        except PackageError as error:
            retry_s = RETRY_S if error.status in (429, 503) else 0
            raise Refusal(error.status, str(error), "package", retry_s) from None
        return PackageView(package=package, size=length)


def refuse_unknown_package(reach: Reach, package: str) -> None:
    if package and (reach.loop.packages is None or _size(reach, package) is None):
        message = "is not stored here; send it first with PUT /v1/packages/SHA256"
        raise Refusal(422, message, "package")


def note_package(reach: Reach, package: str, tenant: str) -> None:
    """The tenant has the package now: it was sent by, or for, one of its members."""
    apart = tenant in reach.loop.state.identity.tenants
    if package and reach.loop.packages is not None and apart:
        try:
            reach.loop.packages.note(package, reach.loop.state.identity.key(tenant))
        except OSError as error:
            raise Refusal(507, f"cannot be kept: {error.strerror}", "package") from None


def _size(reach: Reach, package: str) -> int | None:
    """None if it is not here, or the sender's tenant never sent it: whoever knows the hash of a
    package does not have the package."""
    store, owner = _store(reach.loop), _owner(reach)
    if owner != EVERYBODY and not store.noted(package, owner):
        return None
    return store.size(package)


def _owner(reach: Reach) -> str:
    if reach.tenant == EVERY_TENANT:
        return EVERYBODY
    return reach.loop.state.identity.key(reach.tenant)


def _store(loop: ControlLoop) -> PackageStore:
    if loop.packages is None:
        raise Refusal(404, "this controller does not store packages")
    return loop.packages

"""Working directories for the nodes; each is kept once, however often it is sent."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Controller, Request, get, put
from litestar.exceptions import HTTPException

from shoal.api.principal import Needs
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.control.loop import ControlLoop
from shoal.control.packages import PackageError, PackageStore
from shoal.model.views import PackageView

WRITE_BYTES = 1 << 20


class Packages(Controller):
    path = "/v1/packages"
    opt = Needs.READ.opt

    @get("/{package:str}", sync_to_thread=False)
    def one(self, loop: ControlLoop, package: str) -> PackageView:
        """Whether the package is here, so that a client need not send it."""
        size = _store(loop).size(package)
        if size is None:
            raise Refusal(404, f"there is no package {package[:64]!r}", "package")
        return PackageView(package=package, size=size)

    @put("/{package:str}", request_max_body_size=None, opt=Needs.WRITE.opt)
    async def send(
        self, request: Request[Any, Any, Any], loop: ControlLoop, package: str
    ) -> PackageView:
        """The body is the archive, its SHA-256 the name; streamed to disk, not held in memory."""
        store = _store(loop)
        size = store.size(package)
        if size is not None:
            return PackageView(package=package, size=size)
        try:
            length = int(request.headers.get("content-length", "0"))
        except ValueError:
            length = 0
        try:
            upload = store.begin(package, length, loop.packages_in_use())
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
            raise Refusal(error.status, str(error), "package") from None
        return PackageView(package=package, size=length)


def refuse_unknown_package(reach: Reach, package: str) -> None:
    store = reach.loop.packages
    if package and (store is None or store.size(package) is None):
        message = "is not stored here; send it first with PUT /v1/packages/SHA256"
        raise Refusal(422, message, "package")


def _store(loop: ControlLoop) -> PackageStore:
    if loop.packages is None:
        raise HTTPException("this controller does not store packages", status_code=404)
    return loop.packages

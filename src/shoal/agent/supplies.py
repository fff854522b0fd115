"""What members need before they can start: package, environment, image, secrets, volumes from URLs,
part of a GPU."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.agent.environments import Environments
from shoal.agent.images.pull import Images
from shoal.agent.images.runtimes import Runs
from shoal.agent.keeping.keeping import Fetching
from shoal.agent.keeping.url_volumes import Means, UrlVolumes, means
from shoal.agent.packages import Packages
from shoal.agent.secrets import WAITING, Secrets
from shoal.agent.shares import Shares
from shoal.core.nodebook import NodeBook
from shoal.model.commands import Launch, Prepare

PACKAGE = "SHOAL_PACKAGE"  # where the package is unpacked
PYTHON = "SHOAL_PYTHON"  # the interpreter that has Shoal, and the job's requirements if any
TELL_S = 1.0

Order = TypeVar("Order", Launch, Prepare)


class Supplies:
    def __init__(
        self,
        directory: Path,
        book: NodeBook,
        need: Callable[[str, int], None],
        shares: Shares,
        secrets: Secrets,
    ) -> None:
        self._book = book
        self.shares = shares
        self.secrets = secrets
        self.packages = Packages(directory / "packages", need, self._packages_used)
        self.environments = Environments(directory, self._environments_used)
        self.runs = Runs(str(directory))
        self.images = Images(directory, self.runs, self._images_used)
        self.volumes = UrlVolumes(directory)
        self.fetching: Fetching | None = None
        self.own_user: Callable[[Launch], int] = lambda _: 0  # 0: the agent's own

    def here(self, order: Order) -> Order | None:
        """The command with this node's paths, or None if something is still missing."""
        package = self.packages.here(order.package) if order.package else None
        environment = self.environments.here(order) if order.requirements else None
        if (order.package and package is None) or (order.requirements and environment is None):
            return None
        if self.secrets.needed(order) or (order.image and not self.images.here(order)):
            return None
        if self.fetching is not None and self.fetching.needed(order):
            return None
        if self.volumes.needed(order):
            return None
        placed = self._placed(order, package, environment)
        return self.shares.here(placed)

    def lacks(self, order: Launch | Prepare) -> str:
        """What is missing, in words that follow the name of the node."""
        if order.package and self.packages.here(order.package) is None:
            return self.packages.progress(order.package)
        if not order.requirements or self.environments.here(order) is not None:
            if self.secrets.needed(order):
                return WAITING
            if order.image and not self.images.here(order):
                return self.images.progress(order)
            if isinstance(order, Launch) and self.volumes.needed(order):
                return self.volumes.progress(order)
            if isinstance(order, Launch) and self.fetching and self.fetching.needed(order):
                return self.fetching.progress(order)
            return "is preparing its share of a GPU"
        return "is building its environment: see its log"

    async def get(self, order: Order, output: Path, tell: Callable[[str], None]) -> Order:
        """Returns when everything is here; raises CannotStart. `tell` gets what is missing."""
        telling = asyncio.create_task(self._tell(order, tell))
        try:
            package = await self.packages.get(order.package) if order.package else None
            environment = None
            if order.requirements:
                environment = await self.environments.get(order, output)
            placed = await self.secrets.get(self._placed(order, package, environment))
            if order.image:
                login = self.secrets.registry(order.ref) if isinstance(order, Launch) else ""
                await self.images.get(order, login)
            placed = await self.volumes.get(placed, self._means)
            if isinstance(order, Launch) and self.fetching and self.fetching.needed(order):
                await self.fetching.get(order, self.own_user(order))
            return await self.shares.get(placed)
        finally:
            telling.cancel()

    def _means(self, launch: Launch) -> Means:
        ref = launch.ref
        return means(launch, self.secrets.variables(ref), self.secrets.folder(ref))

    async def _tell(self, order: Launch | Prepare, tell: Callable[[str], None]) -> None:
        while True:
            tell(self.lacks(order))
            await asyncio.sleep(TELL_S)

    def _placed(self, order: Order, package: Path | None, environment: Path | None) -> Order:
        if not order.image:
            return _placed(order, package, environment)
        env, workdir = dict(order.env), order.workdir
        if package is not None:
            workdir = os.path.normpath(package / order.workdir)
            env[PACKAGE] = str(package)
        image = self.images.name(order.image)
        return msgspec.structs.replace(order, workdir=workdir, env=env, image=image)

    def _images_used(self) -> set[str]:
        return {order.image for order in self._orders() if order.image}

    def _packages_used(self) -> set[str]:
        return {order.package for order in self._orders()}

    def _environments_used(self) -> set[str]:
        return {self.environments.key(order) for order in self._orders() if order.requirements}

    def _orders(self) -> list[Launch | Prepare]:
        return [*self._book.alive.values(), *self._book.prepared.values()]


def _placed(order: Order, package: Path | None, environment: Path | None) -> Order:
    """Paths relative to the package become paths on this node."""
    env, workdir = {PYTHON: sys.executable, **order.env}, order.workdir
    path = env.get("PATH") or os.environ.get("PATH", os.defpath)
    if package is not None:
        workdir = os.path.normpath(package / order.workdir)
        env[PACKAGE] = str(package)
        env["PATH"] = path = _with_own(path)
    if environment is not None:
        env["PATH"] = f"{environment}/bin:{path}"
        env["VIRTUAL_ENV"] = str(environment)
        env[PYTHON] = f"{environment}/bin/python"
        env.pop("PYTHONHOME", None)
    return msgspec.structs.replace(order, workdir=workdir, env=env)


def _with_own(path: str) -> str:
    """A program of the sender may be elsewhere on this node; then this node's own is used."""
    own = f"{os.environ.get('PATH', os.defpath)}:{os.path.dirname(sys.executable)}"
    return ":".join(dict.fromkeys(f"{path}:{own}".split(":")))

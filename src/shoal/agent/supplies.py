"""What members need before they can start: package, environment, image, secrets, volumes from URLs,
part of a GPU."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shoal.agent.environments import Environments
from shoal.agent.images.pull import Images
from shoal.agent.images.runtimes import Runs
from shoal.agent.keeping.keeping import Fetching
from shoal.agent.keeping.url_volumes import Means, UrlVolumes, means
from shoal.agent.keeping.volumes import paths_of
from shoal.agent.packages import Packages, Purpose
from shoal.agent.secrets import WAITING, Secrets
from shoal.agent.shares import Shares
from shoal.core.nodebook import NodeBook
from shoal.machine.paths import ANSWER_S, MOUNTS
from shoal.model.commands import Launch, Prepare

if TYPE_CHECKING:
    from shoal.agent.tunnel.tunnels import Tunnels

PACKAGE = "SHOAL_PACKAGE"  # where the package is unpacked
PYTHON = "SHOAL_PYTHON"  # the interpreter that has Shoal, and the job's requirements if any
TELL_S = 1.0
REACH_S_MAX = 15.0  # the head knows by then that the mount hangs, and tries another node

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
        self.root = ""  # of the jobs' checkpoints
        self.own_user: Callable[[Launch], int] = lambda _: 0  # 0: the agent's own
        self.tunnels_of: Callable[[], Tunnels]  # made when somebody needs them

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
        if order.encrypt_network and isinstance(order, Launch):
            return None  # the other nodes have to be heard first
        if self.volumes.needed(order) or (MOUNTS and MOUNTS.under(paths_of(order, self.root))):
            return None
        placed = self._placed(order, package, environment)
        return self.shares.here(placed)

    def lacks(self, order: Launch | Prepare) -> str:
        """What is missing, in words that follow the name of the node."""
        for mount in MOUNTS.under(paths_of(order, self.root)).values() if MOUNTS else ():
            if mount.silent_s > ANSWER_S:
                return f"waits: {mount.problem()}"
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
            if isinstance(order, Launch) and order.encrypt_network:
                return "waits for the keys of its gang's other nodes"
            return "is preparing its share of a GPU"
        return "is building its environment: see its log"

    async def get(self, order: Order, output: Path, tell: Callable[[str], None]) -> Order:
        """Returns when everything is here; raises CannotStart. `tell` gets what is missing."""
        telling = asyncio.create_task(self._tell(order, tell))
        try:
            await self._reach(order)
            package = None
            if order.package:
                mine = Purpose(order.ref, order.data_mbit_s) if isinstance(order, Launch) else None
                package = await self.packages.get(order.package, mine)
            environment = None
            if order.requirements:
                environment = await self.environments.get(order, output)
            placed = await self.secrets.get(self._placed(order, package, environment))
            if order.image:
                login = self.secrets.registry(order.ref) if isinstance(order, Launch) else ""
                await self.images.get(order, login)
            placed = await self.volumes.get(placed, self._means)
            if isinstance(order, Launch) and order.encrypt_network:
                env = await self.tunnels_of().get(order, placed.env, self.own_user(order))
                placed = msgspec.structs.replace(placed, env=env)
            if isinstance(order, Launch) and self.fetching and self.fetching.needed(order):
                await self.fetching.get(order, self.own_user(order))
            return await self.shares.get(placed)
        finally:
            telling.cancel()

    async def _reach(self, order: Launch | Prepare) -> None:
        """A mount that does not answer for a while is the node's fault: another may have it."""
        for mount in MOUNTS.under(paths_of(order, self.root)).values() if MOUNTS else ():
            if not await mount.answers(REACH_S_MAX):
                raise mount.problem()

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

"""Virtual environments of a node: one per list of requirements, built once for many members.

Code that waits for the agent's children must skip those in `pids()` and pass them to `ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

from shoal.agent.confine.tenant import Apart
from shoal.agent.faults import CannotStart
from shoal.agent.inherited import build_env, inherited_env
from shoal.agent.shipping import last_words
from shoal.machine.cgroups import Group
from shoal.machine.kernel import NODE_MARK
from shoal.model.commands import Launch, Prepare

log = logging.getLogger("shoal.agent")

BUILD_S_MAX = 1800.0
KEPT_MAX = 8  # those that no member uses; the tenant that has most gives first
PLACES = 2  # a build uses the disk and the network
PLACE_S_MAX = 60.0
LOOK_S = 0.2
READY = "shoal-ready"  # the last file that a build makes
SEEN = "shoal-node.pth"

# Packages of the node's own Python are visible too, after the requirements. An existing pip is
# used, because installing one into the environment takes seconds.
_BUILD = """
set -e
echo "[shoal: building the environment of this job]"
if "$1" -m pip --version > /dev/null 2>&1; then
    "$1" -m venv --system-site-packages --without-pip "$2"
    set -- "$@" "$1" -m pip --python "$2/bin/python"
else
    "$1" -m venv --system-site-packages "$2"
    set -- "$@" "$2/bin/python" -m pip
fi
site=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import site; site.addsitedir(%s)\\n' "$3" > "$site/$4"
environment=$2 ready=$5
shift 5
"$@" install --disable-pip-version-check --no-input -r "$environment/requirements.txt"
: > "$environment/$ready"
"""


class Build:
    def __init__(
        self, pid: int, popen: subprocess.Popen[bytes] | None, group: Group | None, output: Path
    ) -> None:
        self.pid = pid
        self.popen = popen
        self.group = group
        self.output = output
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class Environments:
    """The environments of one agent. `in_use` returns those that members run in. Packages run code
    of their own while they are installed, so a tenant that is kept apart has environments of its
    own, which its user builds."""

    def __init__(self, node: Path, in_use: Callable[[], set[str]]) -> None:
        self.apart: Apart | None = None
        self._node = node
        self._root = node / "environments"
        self._in_use = in_use
        self._builds: dict[str, Build] = {}
        self._turns = Turns(PLACES, PLACE_S_MAX)
        self._waiting: dict[str, int] = {}

    def key(self, order: Launch | Prepare) -> str:
        held = self.apart is not None and self.apart.holds(order)
        return key_of(order.requirements, order.uid if held else 0)

    def here(self, order: Launch | Prepare) -> Path | None:
        """The environment if it is built. This counts as a use."""
        path = self._root / self.key(order)
        try:
            os.utime(path / READY, follow_symlinks=False)
        except OSError:
            return None
        return path

    async def get(self, order: Launch | Prepare, output: Path) -> Path:
        """Returns when it is built. pip's output is copied to `output` as it is written."""
        key = self.key(order)
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            return await self._get(key, order, output)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._stop(key)  # no member waits for it any more

    async def _get(self, key: str, order: Launch | Prepare, output: Path) -> Path:
        path = self._root / key
        build = self._builds.get(key)
        if build is None:
            async with self._turns.of(order.tenant):
                found = self.here(order)
                if found is not None:
                    return found
                build = self._builds.get(key) or self._begin(key, order)
                await self._follow(key, build, output)
        else:
            await self._follow(key, build, output)
        if not (path / READY).exists():
            said = last_words(build.output) or "pip printed nothing"
            raise CannotStart(f"cannot build the environment: {said}")
        return path

    def pids(self) -> set[int]:
        return {build.pid for build in self._builds.values()}

    def ended(self, pid: int, code: int) -> bool:
        """The process is no more and was waited for; was it ours?"""
        for key, build in list(self._builds.items()):
            if build.pid == pid:
                if build.popen is not None:
                    build.popen.returncode = code
                if self.apart is not None and build.group is not None:
                    self.apart.groups.discard(build.group)
                del self._builds[key]
                if not build.ended.done():
                    build.ended.set_result(code)
                return True
        return False

    def _begin(self, key: str, order: Launch | Prepare) -> Build:
        path = self._root / key
        output = self._root / f"{key}.log"
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._trim()
            shutil.rmtree(path, ignore_errors=True)  # one that was not finished
            path.mkdir()
            path.with_name(f"{key}.tenant").write_text(order.tenant)
            (path / "requirements.txt").write_text(order.requirements)
            node_packages = repr(sysconfig.get_path("purelib"))
            words = [sys.executable, str(path), node_packages, SEEN, READY]
            with output.open("wb") as file:
                build = self._start(order, ("sh", "-c", _BUILD, "sh", *words), path, output, file)
        except OSError as error:
            raise CannotStart(f"cannot build the environment: {error.strerror}") from None
        log.info("building environment %s", key[:12])
        self._builds[key] = build
        return build

    def _start(
        self,
        order: Launch | Prepare,
        argv: tuple[str, ...],
        path: Path,
        output: Path,
        file: BinaryIO,
    ) -> Build:
        if self.apart is not None and self.apart.holds(order):
            pid, group = self.apart.build(order, argv, path, file.fileno())
            return Build(pid, None, group, output)
        popen = subprocess.Popen(
            argv,
            cwd=path,
            env=build_env(inherited_env("PIP_")) | {NODE_MARK: str(self._node)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        return Build(popen.pid, popen, None, output)

    async def _follow(self, key: str, build: Build, output: Path) -> None:
        """Copy the build's output to the member's until the build ends, however it ends."""
        seen, waited_s = 0, 0.0
        while True:
            over = build.ended.done()
            seen = _copy(build.output, seen, output)
            if over:
                return
            if waited_s > BUILD_S_MAX:
                self._stop(key)
                raise CannotStart(f"its environment was not built in {BUILD_S_MAX / 60:.0f} min")
            await asyncio.wait([build.ended], timeout=LOOK_S)
            waited_s += LOOK_S

    def _stop(self, key: str) -> None:
        build = self._builds.get(key)
        if build is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(build.pid, signal.SIGKILL)

    def _trim(self) -> None:
        """The least recently used of the tenant that has most go first; those in use stay."""
        used = self._in_use() | set(self._waiting)
        found: dict[str, list[tuple[int, Path]]] = {}
        for path in self._root.iterdir():
            if path.is_dir() and not path.is_symlink() and path.name not in used:
                found.setdefault(_tenant(path), []).append((_used_at(path), path))
        excess = sum(map(len, found.values())) - KEPT_MAX + 1
        for _ in range(excess):
            most = max(map(len, found.values()))
            own = min(min(own) for own in found.values() if len(own) == most)
            path = own[1]
            found[_tenant(path)].remove(own)
            shutil.rmtree(path, ignore_errors=True)
            for ending in ("log", "tenant"):
                path.with_name(f"{path.name}.{ending}").unlink(missing_ok=True)


def _tenant(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.with_name(f"{path.name}.tenant").read_text()
    return ""  # an earlier version built it


def _used_at(path: Path) -> int:
    with contextlib.suppress(OSError):
        return (path / READY).lstat().st_mtime_ns
    return 0


def key_of(requirements: str, uid: int = 0) -> str:
    """The same requirements for another Python make another environment."""
    made_of = f"{sys.version}\0{sys.executable}\0{requirements}"
    if uid:
        made_of += f"\0{uid}"
    return hashlib.sha256(made_of.encode()).hexdigest()[:32]


def _copy(source: Path, start: int, target: Path) -> int:
    try:
        with source.open("rb") as file, target.open("ab") as output:
            file.seek(start)
            data = file.read()
            output.write(data)
            return start + len(data)
    except OSError:
        return start  # the member is gone, or the disk is full: the build goes on


# Whose turn it is to use what a node has little of: one at a time of each tenant, and few in all.
#
# Who waits for longer than a while goes on anyway: nobody's slow work keeps others from starting.


class Turns:
    def __init__(self, places: int, wait_s_max: float) -> None:
        self._places = asyncio.Semaphore(places)
        self._wait_s_max = wait_s_max
        self._of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        lock = self._of.setdefault(tenant, asyncio.Lock())
        async with lock:
            placed = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s_max):
                    placed = await self._places.acquire()
            try:
                yield
            finally:
                if placed:
                    self._places.release()

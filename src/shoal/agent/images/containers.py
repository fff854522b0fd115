"""The containers of a node's members: started, signaled, watched, and never left behind.

The process that the agent watches is the runtime's client. Podman's containers are in the agent's
process tree, so whatever ends the agent's processes ends them; docker's are not. All are found by
the id of their first process. Podman writes it down where no member can; docker's containers are in
a cgroup with the container's own id in its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.agent.confine.limits import Device
from shoal.agent.faults import CannotStart
from shoal.agent.images import render as mounts
from shoal.agent.images.render import LABEL, NEVER, VARIABLES, Box, Mount, render
from shoal.agent.images.runtimes import Facts, Runs, Runtime, facts, find
from shoal.agent.keeping.volumes import mounts_of, paths_of
from shoal.agent.launch.files import HOSTFILE
from shoal.agent.ownership import read_process
from shoal.agent.secrets import SECRETS
from shoal.agent.shares import PIPES
from shoal.machine.cgroups import Group
from shoal.machine.kernel import NODE_MARK
from shoal.machine.leftovers import FOLDER, SWEEP, SWEEP_S_MAX, sweep
from shoal.machine.paths import ask
from shoal.model.commands import Launch
from shoal.model.job import Fault, MemberRef
from shoal.model.kept import OUTPUT

log = logging.getLogger("shoal.agent")

ALONE_S = 0.05  # how often a container that is to stop is looked at
CLIENT_S_MAX = 120.0  # a client may take long to remove a large container, but not forever
TERMINATED_CODE = 128 + signal.SIGTERM
RUNTIME_CODE = 125  # the runtime itself has failed
OWN_CODES = range(RUNTIME_CODE, 128)  # and so have these, unless the command ended with one
# Of this machine's network, which the operator knows and an image does not.
INHERITED_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_")
INHERITED = frozenset(
    (
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "TZ"),
    )
)


class Client(NamedTuple):
    """How to start the runtime's client; `handles` are open files for it, to be closed after."""

    words: list[str]
    env: dict[str, str]
    handles: tuple[int, ...]
    joins: bool  # the runtime puts the container into the member's cgroup


class Ending(NamedTuple):
    """`started`: its command was. `starved`: the kernel ended it for want of memory."""

    code: int
    started: bool
    starved: bool = False


class Container:
    def __init__(self, name: str, folder: Path, runtime: Runtime) -> None:
        self.name = name
        self.folder = folder
        self.runtime = runtime
        self.first = 0  # its first process, once known
        self.began = 0  # when that process began: a later one may get the same id
        self.terminated = False  # it obeyed SIGTERM, as it would have outside
        self.over_at: float | None = None


class Containers:
    def __init__(self, directory: Path, runs: Runs) -> None:
        self._directory = directory
        self._root = directory / FOLDER
        self._node = hashlib.sha256(str(directory).encode()).hexdigest()[:12]
        self._runs = runs
        self._containers: dict[MemberRef, Container] = {}
        self._removing: set[asyncio.Task[None]] = set()
        self._facts: Facts | None = None

    # -- the beginning ---------------------------------------------------------------------

    def client(
        self,
        launch: Launch,
        directory: Path,
        extra: Mapping[str, str],
        private: Mapping[str, str],
        group: Group | None,
        cards: Sequence[Device] = (),
    ) -> Client:
        """How to run this member in a container. `extra` are the agent's own variables for members,
        and `private` those that nothing else may see."""
        runtime = find()
        if runtime is None:
            raise CannotStart("nothing on this node can run images", Fault.MISSING)
        self._facts = self._facts or facts()
        name = f"shoal-{self._node}-{launch.ref}"
        container = Container(name, self._root / name, runtime)
        workdir, seen = ask(paths_of(launch), folders, launch, str(directory), extra)
        box = Box(
            name=name,
            node=self._node,
            env={
                **_environment(launch, extra, str(self._directory), str(directory)),
                **private,
            },
            workdir=workdir,
            mounts=seen,
            folder=str(container.folder),
            image=launch.image,
            group=group.name if group is not None and runtime.name == "podman" else "",
            cards=tuple(card.path for card in cards),
        )
        rendered = render(runtime, self._facts, launch, box)
        if runtime.name != "apptainer":  # its containers are only processes
            self._note(runtime, container.folder)
            self._containers[launch.ref] = container
        handle = os.memfd_create("variables", 0)
        os.write(handle, rendered.variables.encode("utf-8", "surrogateescape"))
        words = list(rendered.words)
        if VARIABLES in words:
            words[words.index(VARIABLES)] = f"{VARIABLES}=/proc/self/fd/{handle}"
        own = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        marks = {NODE_MARK: str(self._directory), **rendered.env}
        return Client(words, {**own, **marks}, (handle,), joins=bool(box.group))

    def _note(self, runtime: Runtime, folder: Path) -> None:
        """What may exist from now on, for whoever has to remove it."""
        self._root.mkdir(mode=0o700, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        command = shlex.join(runtime.command)
        # A monitor that has survived removes its container at the same time; both can fail then.
        script = (
            "for try in 1 2 3 4 5; do\n"
            f"found=$({command} ps --all --quiet --filter label={LABEL}={self._node}) || exit 1\n"
            '[ -n "$found" ] || exit 0\n'
            f"{command} rm --force $found\n"
            "sleep 0.2\ndone\nexit 1\n"
        )
        sweep = self._root / SWEEP
        if not sweep.exists() or sweep.read_text() != script:
            sweep.write_text(script)

    def __contains__(self, ref: MemberRef) -> bool:
        return ref in self._containers

    def forget(self, ref: MemberRef) -> None:
        """Its client could not be started, so there is nothing to remove."""
        container = self._containers.pop(ref, None)
        if container is not None:
            shutil.rmtree(container.folder, ignore_errors=True)

    # -- while it runs ---------------------------------------------------------------------

    def first(self, ref: MemberRef) -> int | None:
        """The first process in the container, if there is one now."""
        container = self._containers.get(ref)
        return self._first(container) if container is not None else None

    def _first(self, container: Container) -> int | None:
        if not container.first:
            pid = _number(container.folder / "pid")
            if container.runtime.name == "docker":
                pid = first_in_group(_text(container.folder / "id"))
            if pid and is_apart(pid) and (seen := read_process(pid)) is not None:
                container.first, container.began = pid, seen.started
        seen = read_process(container.first) if container.first else None
        alive = seen is not None and seen.started == container.began and seen.state != "Z"
        return container.first if alive else None

    def name(self, ref: MemberRef) -> str | None:
        container = self._containers.get(ref)
        return container.name if container is not None else None

    def command(self, ref: MemberRef) -> tuple[str, ...]:
        """How its runtime is called."""
        return self._containers[ref].runtime.command

    def roots(self) -> dict[int, MemberRef]:
        """Processes whose descendants belong to a member."""
        found: dict[int, MemberRef] = {}
        for ref, container in self._containers.items():
            first, conmon = self._first(container), _number(container.folder / "conmon")
            found |= {pid: ref for pid in (first, conmon) if pid}
        return found

    def signal(self, ref: MemberRef, number: int) -> bool:
        """To every process in the container. False if there is none: then the client gets it."""
        container = self._containers.get(ref)
        first = self._first(container) if container is not None else None
        if container is None or first is None:
            return False
        for pid in inside(first):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if number == signal.SIGTERM:
            self._end_if_alone(container)
        return True

    def _end_if_alone(self, container: Container) -> None:
        """The kernel keeps signals away from the first process of a container that has no handler
        for them. Outside it would have ended; so it ends here, when no other process is left."""
        first = self._first(container)
        if first is None:
            return
        if inside(first) == [first] and not handles(first, signal.SIGTERM):
            container.terminated = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        else:
            asyncio.get_running_loop().call_later(ALONE_S, self._end_if_alone, container)

    def watch(self, clients: Mapping[MemberRef, int]) -> None:
        """Called about once a second. A client would wait forever for a container whose monitor
        was killed, and nobody else would notice the end of it."""
        now = time.monotonic()
        for ref, container in self._containers.items():
            first = self._first(container)
            if not container.first:
                continue
            conmon = _number(container.folder / "conmon")
            lost = first is not None and conmon and read_process(conmon) is None
            if lost and first is not None:
                log.warning("%s has lost its monitor, so it is ended", container.name)
                os.kill(first, signal.SIGKILL)
            elif first is None and container.over_at is None:
                container.over_at = now
            late = container.over_at is not None and now - container.over_at > CLIENT_S_MAX
            if lost or late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(clients[ref], signal.SIGKILL)

    # -- the end ---------------------------------------------------------------------------

    def ended(self, ref: MemberRef, code: int) -> Ending:
        """The client has ended. The container ends with it, whatever it does."""
        container = self._containers.get(ref)
        if container is None:
            return Ending(code, started=True)
        first = self._first(container)
        if first is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(first, signal.SIGKILL)
        del self._containers[ref]
        if container.runtime.name == "podman":
            started, starved = _number(container.folder / "pid") > 0, False
            if not started and code == 0:
                code = TERMINATED_CODE  # a client that gets SIGTERM early ends as if all were well
        else:
            began, _, oom = _text(container.folder / "state").partition(" ")
            known = began[:1].isdecimal()  # else no daemon answers any more
            started = not began.startswith(NEVER) if known else container.first > 0
            starved = oom == "true"
        self._start(self._remove(container))
        started = started or code not in OWN_CODES
        return Ending(TERMINATED_CODE if container.terminated else code, started, starved)

    async def _remove(self, container: Container) -> None:
        ignore = ("--ignore",) if container.runtime.name == "podman" else ()
        words = (*container.runtime.command, "rm", "--force", *ignore, container.name)
        code, text = await self._runs.run(words, seconds=SWEEP_S_MAX)
        if code and "no such container" not in text.lower():
            log.warning("cannot remove %s: %s", container.name, text.strip())
        else:
            shutil.rmtree(container.folder, ignore_errors=True)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    def clear(self) -> None:
        """What an earlier life has left."""
        sweep(self._directory)

    async def close(self) -> None:
        """The agent ends, and its members have ended or will be killed."""
        for ref, container in self._containers.items():
            self.signal(ref, signal.SIGKILL)
            self._start(self._remove(container))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SWEEP_S_MAX):
                await asyncio.gather(*self._removing)


def folders(
    launch: Launch, directory: str, extra: Mapping[str, str]
) -> tuple[str, Sequence[Mount]]:
    """The directory it starts in, and what it sees of this node."""
    found: list[Mount | None] = [Mount(directory, writable=True)]
    workdir = launch.workdir or directory
    if launch.package:
        found.append(Mount(launch.env["SHOAL_PACKAGE"], writable=False))
    elif launch.workdir:
        workdir = os.path.realpath(launch.workdir) if launch.uid else launch.workdir
        found.append(mounts.named_by_user("workdir", launch.workdir, launch.uid))
    own = extra.get("SHOAL_CHECKPOINT_DIR", "")
    chosen = launch.env.get("SHOAL_CHECKPOINT_DIR", "")
    if own and not chosen and "://" not in own:
        found.append(Mount(own, writable=True))
    elif chosen and "://" not in chosen:
        found.append(mounts.named_by_user("SHOAL_CHECKPOINT_DIR", chosen, launch.uid))
    found += mounts_of(launch)
    if kept := extra.get(OUTPUT, ""):
        found.append(Mount(kept, writable=True))
    if hosts := extra.get(HOSTFILE):
        found.append(Mount(os.path.dirname(hosts), writable=False))
    if launch.env.get(SECRETS):
        found.append(Mount(launch.env[SECRETS], writable=False))
    if pipes := launch.env.get(PIPES):  # how it reaches the daemon that limits its share of a GPU
        found.append(mounts.named_by_user(PIPES, pipes, launch.uid))
    paths = dict.fromkeys(mount for mount in found if mount is not None)
    return workdir, [mount for mount in paths if mount.path]


def _environment(
    launch: Launch, extra: Mapping[str, str], node: str, directory: str
) -> dict[str, str]:
    """Nothing that only makes sense outside the image, such as a PATH."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    env = {"PYTHONUNBUFFERED": "1", **ours, **extra, **launch.env}
    if launch.uid:  # it is not a user of the image, so it has no home there
        env.setdefault("HOME", directory)
    return {**env, "SHOAL_REF": str(launch.ref), NODE_MARK: node}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0


# What the kernel shows of the processes in a container.


def first_in_group(name: str) -> int:
    """The first process of the namespace in the cgroup whose path has this word; 0 if none has."""
    if not name:
        return 0
    for entry in os.listdir("/proc"):
        if entry.isdigit() and name in _text(Path(f"/proc/{entry}/cgroup")):
            lines = _text(Path(f"/proc/{entry}/status")).splitlines()
            ids = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
            if len(ids) == 2 and ids[1] == "1":
                return int(entry)
    return 0


def is_apart(pid: int) -> bool:
    """Is it in a process namespace other than ours?"""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/pid").st_ino != os.stat("/proc/self/ns/pid").st_ino
    return False


def inside(first: int) -> list[int]:
    """All living processes in the same namespace as this one, itself first."""
    try:
        space = os.stat(f"/proc/{first}/ns/pid").st_ino
    except OSError:
        return []
    found = [first]
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != first:
            with contextlib.suppress(OSError):
                seen = read_process(int(name))
                same = os.stat(f"/proc/{name}/ns/pid").st_ino == space
                if same and seen is not None and seen.state != "Z":
                    found.append(int(name))
    return found


def handles(pid: int, number: int) -> bool:
    """Does the process catch, ignore or hold back the signal?"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    masks = [
        int(line.split()[1], 16)
        for line in lines
        if line.startswith(("SigBlk", "SigIgn", "SigCgt"))
    ]
    return any(mask >> (number - 1) & 1 for mask in masks)

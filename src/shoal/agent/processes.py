"""The members' processes: start them, signal them, and leave none behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from shoal.agent.confine import rdma
from shoal.agent.confine.limits import (
    VISIBLE,
    Device,
    ceiling_of,
    devices,
    joining,
    renumbered,
    withheld,
)
from shoal.agent.confine.read_only import PREFIX
from shoal.agent.confine.tenant import Apart
from shoal.agent.faults import CannotStart
from shoal.agent.images.containers import Containers
from shoal.agent.images.runtimes import Runs
from shoal.agent.inherited import inherited_env
from shoal.agent.keeping.volumes import paths_of, read_only
from shoal.agent.launch.files import through
from shoal.agent.nearby import Nearby
from shoal.agent.notes import note
from shoal.agent.numbers import renamed
from shoal.agent.ownership import Ownership
from shoal.agent.process import Console, Ended, Place, Process, console_of, started
from shoal.agent.shares import PIPES
from shoal.agent.surroundings import Found
from shoal.agent.warm.pool import ZYGOTES_MAX, WarmPool
from shoal.agent.warm.rules import Recipe, default_modules, recipe, wanted_modules
from shoal.machine.cgroups import Ceiling, Cgroups, Group, Used
from shoal.machine.exits import MEMBERS
from shoal.machine.kernel import NODE_MARK, children
from shoal.machine.leftovers import end_marked
from shoal.machine.paths import MOUNTS, Hangs, ask
from shoal.model.commands import Launch, Prepare
from shoal.model.job import Fault, MemberRef

log = logging.getLogger("shoal.agent")

KILLED_CODE = 128 + signal.SIGKILL
CANNOT_START_CODE = 127  # as a shell reports a command that is not there
MARK = "SHOAL_REF"  # in the environment of everything a member starts
LOOK_S_MAX = 60.0
LOOK_AROUND_S = 1.0  # ancestry is read at most this often,
LOOK_AROUND_REST = 50  # and takes at most 1/50 of the time
PREPARED_S = 300.0  # a Prepare command is valid this long
SETTLED_S = 2.0  # a process that has loaded nothing new for this long has finished its imports


class Processes:
    """The living processes of one node, each leader of its own session and process group."""

    def __init__(self, node_directory: Path, groups: Cgroups, own: Sequence[int] = ()) -> None:
        """`own`: the machine's numbers of the node's GPUs."""
        self.node_mark = str(node_directory)
        self.groups = groups
        self._own = own
        self.apart = Apart(node_directory, groups)
        self._pids: dict[int, Process] = {}
        self._processes: dict[MemberRef, Process] = {}
        self.warm = WarmPool(self.node_mark)
        self._prepared: dict[
            str, tuple[Recipe, float]
        ] = {}  # for jobs that may come, and until when
        self._ownership = Ownership(MARK, str(node_directory / MEMBERS))
        self._look_around_at = 0.0
        self.runs = Runs(self.node_mark)
        self.containers = Containers(node_directory, self.runs)
        self.entered = Entered()
        self.rdma = False  # the node has InfiniBand or RoCE cards
        self.helpers: Sequence[Helper] = ()  # whose processes are our children too
        self.nearby: Nearby | None = None  # what is next to the GPUs, if the node has a tree

    def start(self, launch: Launch, directory: str, found: Found) -> None:
        """The member writes its output to a file by itself, so nothing can slow it down. Nothing
        but the member itself gets its private variables: no warm interpreter is made with them."""
        asked, launch = launch, renamed(launch, self._own)
        if launch.launcher:
            argv = through(launch, found.launch)
            launch = msgspec.structs.replace(launch, argv=argv)
        if launch.image:
            self._start_contained(launch, directory, found, self._near(asked, ceiling_of(launch)))
            return
        env = {
            **found.base,
            **found.extra,
            **launch.env,
            MARK: str(launch.ref),
            NODE_MARK: self.node_mark,
        }
        workdir = launch.workdir or found.folder
        apart = self.apart.holds(launch)
        paths = paths_of(launch) if MOUNTS else ()
        program, held, how = ask(paths, self._look_up, launch, found, env, workdir)
        before = (*PREFIX, *held, "--") if held and not apart else ()
        env |= found.private
        gone = self._withhold(launch, env)
        ceiling = self._near(asked, ceiling_of(launch, gone.values()))
        if self.nearby is not None:
            env = {**self.nearby.cards(asked), **env}
        group = self._group(launch.ref, ceiling)
        handle = os.open(f"{directory}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        task = None
        console = console_of(launch, handle, env, launch.uid if apart else 0)
        try:
            if apart:
                folders, closed = found.folders, [one.path for one in gone.values()]
                task = self.apart.task(
                    launch, directory, program, env, workdir, folders, closed, held
                )
                pid = self.apart.start(task, console.ends if console else handle, group)
            elif console is not None:
                words = [*console.taking(env), *joining(group, env, before), program]
                pid = started([*words, *launch.argv[1:]], workdir, env, handle)
            else:
                pid = self._start(launch, how, program, env, workdir, handle, group, before)
        except (OSError, CannotStart) as error:
            if group is not None:
                self.groups.discard(group)
            self.apart.leave(launch.uid if apart else 0)
            if console is not None:
                console.discard()
            if isinstance(error, CannotStart):
                raise
            raise CannotStart(f"cannot start {launch.argv[0]}: {error.strerror}") from None
        finally:
            os.close(handle)
        user = launch.uid if apart else 0
        gpus = ",".join(map(str, launch.gpus)) or "-"
        note(f"{launch.ref} starts: process {pid}, GPUs {gpus}")
        place = Place(env, workdir, task, words=before)
        self._add(Process(launch.ref, pid, how, ceiling, group, user, place), console)

    def _look_up(
        self, launch: Launch, found: Found, env: dict[str, str], workdir: str
    ) -> tuple[str, tuple[str, ...], Recipe | None]:
        """What the disk says: its program, the volumes that it must not change, and whether a warm
        interpreter could be it. Such a one imports what the job wants, which root must not do for
        a tenant."""
        apart = self.apart.holds(launch)
        if apart:
            self.apart.check(launch, workdir, found.folders)
            self.apart.tidy_path(launch, env, found.folders)
        program = find_program(launch.argv[0], workdir, env.get("PATH", os.defpath))
        held = read_only(launch)
        cold = apart or launch.interactive or bool(held)
        return program, held, None if cold else recipe(program, launch.argv, env, workdir)

    def _start(
        self,
        launch: Launch,
        how: Recipe | None,
        program: str,
        env: dict[str, str],
        workdir: str,
        output: int,
        group: Group | None,
        before: Sequence[str],
    ) -> int:
        pid = self.warm.fork(how, env, workdir, output, group) if how else None
        if pid is not None:
            note(f"{launch.ref} starts warm: process {pid}")
            return pid
        words = [*joining(group, env, before), program, *launch.argv[1:]]
        return started(words, workdir, env, output)

    def _withhold(self, launch: Launch, env: dict[str, str]) -> dict[int, Device]:
        """GPUs that the member was not given, which CUDA does not count, and network cards."""
        if not (self.groups.holds_devices or self.apart.holds(launch)):
            return {}
        found = devices()
        gone = withheld(launch, found)
        if gone and VISIBLE in env and PIPES not in launch.env:
            env[VISIBLE] = renumbered(env[VISIBLE], found, gone)
        if self.rdma and not launch.limits.rdma:  # numbers that no GPU has
            gone |= {-1 - number: card for number, card in enumerate(rdma.files())}
        return gone

    def user(self, launch: Launch) -> int:
        """The Unix user that the member runs as."""
        return self.own_user(launch) or os.geteuid()

    def own_user(self, launch: Launch) -> int:
        """The user of a tenant that is kept apart; 0: the agent's own."""
        return launch.uid if self.apart.holds(launch) else 0

    def _group(self, ref: MemberRef, ceiling: Ceiling, *, engine: bool = False) -> Group | None:
        try:
            return self.groups.make(str(ref), ceiling, engine=engine)
        except OSError as error:
            raise CannotStart(f"cannot limit what it may use: {error.strerror}") from error

    def _near(self, launch: Launch, ceiling: Ceiling) -> Ceiling:
        if self.nearby is None:
            return ceiling
        return self.nearby.bound(launch, ceiling, [one.ceiling for one in self._pids.values()])

    def _start_contained(
        self, launch: Launch, directory: str, found: Found, ceiling: Ceiling
    ) -> None:
        """In an image nothing of this node's Python exists, so it always starts cold."""
        group = self._group(launch.ref, ceiling, engine=True)
        own = Path(found.folder)
        handles = [os.open(f"{directory}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)]
        console = console_of(launch, handles[0], {}, 0)
        try:
            cards = rdma.files() if self.rdma and launch.limits.rdma else ()
            client = self.containers.client(launch, own, found.extra, found.private, group, cards)
            handles += client.handles
            words = joining(None if client.joins else group, client.env)
            words += client.words
            words = [*(console.taking(client.env) if console else []), *words]
            pid = started(words, directory, client.env, handles[0], client.handles)
        except (OSError, CannotStart) as error:
            self.containers.forget(launch.ref)
            if console is not None:
                console.discard()
            if group is not None:
                self.groups.discard(group)
            if isinstance(error, CannotStart):
                raise
            raise CannotStart(f"cannot start its container: {error.strerror}") from error
        finally:
            for handle in handles:
                os.close(handle)
        before = tuple(client.words[: -len(launch.argv)])
        place = Place(client.env, directory, contained=True, words=before)
        self._add(Process(launch.ref, pid, None, ceiling, group, place=place), console)

    def _add(self, process: Process, console: Console | None) -> None:
        if console is not None:
            process.console = console
            console.begin()
        self._pids[process.pid] = process
        self._processes[process.ref] = process

    def prepare(self, order: Prepare) -> None:
        """A member of this job may come here. Have a warm interpreter ready by then."""
        if order.image:
            return  # it is here now, and nothing in it can be kept warm
        if self.apart.holds(order):
            self.apart.prepare()
            return
        env = {**inherited_env(), **order.env}

        def look_up() -> Recipe | None:
            workdir = order.workdir or "/"
            program = find_program(order.argv[0], workdir, env.get("PATH", os.defpath))
            return recipe(program, order.argv, env, workdir)

        with contextlib.suppress(CannotStart, Hangs):
            found = ask(paths_of(order), look_up)
            if found is not None:
                self._prepared[order.job] = found, time.monotonic() + PREPARED_S
        while len(self._prepared) > ZYGOTES_MAX:
            del self._prepared[next(iter(self._prepared))]

    def tend(self) -> list[str]:
        """Called regularly: keep warm interpreters for members whose imports take long. Returns the
        jobs for which nothing is kept any more."""
        now = time.monotonic()
        if self._processes and now >= self._look_around_at:
            with contextlib.suppress(OSError):
                self._look_around({})
        over = [job for job, (_, until) in self._prepared.items() if now > until]
        for job in over:
            del self._prepared[job]
        for found, _ in self._prepared.values():
            self.warm.want(found, default_modules())
        for process in self._processes.values():
            if process.recipe is None:
                continue
            if not process.modules and now >= process.look_at:
                self._look_at(process, now)
            if process.modules:
                self.warm.want(process.recipe, process.modules)
        self.warm.tend()
        self.groups.tend()
        self.containers.watch({ref: process.pid for ref, process in self._processes.items()})
        return over

    def _look_at(self, process: Process, now: float) -> None:
        seen: tuple[str, ...] = ()
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            seen = wanted_modules(maps)
        if seen and seen == process.seen:
            process.modules = seen
        process.seen = seen
        if not seen:
            process.look_s = min(LOOK_S_MAX, process.look_s * 2)
        process.look_at = now + (SETTLED_S if seen else process.look_s)

    def kill_leftovers(self) -> int:
        """If keeper and agent of an earlier life were killed together, processes may have survived.
        They must not use the GPUs that this life gives to others."""
        return self.groups.clear() + end_marked(Path(self.node_mark))

    def owner(self, pid: int) -> MemberRef | None:
        """The member that a process of this machine belongs to, if that is certain."""
        if pid in self._pids:
            return self._pids[pid].ref
        owners = self._ownership.owners(pid)
        return next(iter(owners)) if len(owners) == 1 else None

    def all_of(self, ref: MemberRef) -> set[int]:
        """Every process of the member, as far as this node can see."""
        process = self.get(ref)
        if process is None:
            return set()
        found = set(process.group.pids()) if process.group is not None else set()
        self._look_around({})
        return found | {process.pid, *self._ownership.of(ref)}

    def get(self, ref: MemberRef) -> Process | None:
        return self._processes.get(ref)

    def pid(self, ref: MemberRef) -> int | None:
        process = self._processes.get(ref)
        return process.pid if process else None

    def leader(self, ref: MemberRef) -> int | None:
        """The first process of the member's own command: in a container, that is not our child."""
        return self.containers.first(ref) or self.pid(ref)

    def signal(self, ref: MemberRef, number: int) -> None:
        process = self._processes.get(ref)
        if process is not None and not self.containers.signal(ref, number):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def reap(self) -> list[Ended]:
        """Members that have ended since the last call."""
        ended = []
        gone: dict[int, MemberRef] = {}
        reaped = left = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                left = True
                break
            reaped = True
            code = os.waitstatus_to_exitcode(status)
            process = self._pids.pop(pid, None)
            if process is None:
                if not any(helper.ended(pid, code) for helper in self._helpers()):
                    self.warm.ended(pid, code)
                continue
            del self._processes[process.ref]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            contained = process.ref in self.containers
            ending = self.containers.ended(process.ref, code if code >= 0 else 128 - code)
            code = ending.code
            if process.console is not None:
                process.console.end(code)
            used, alone = Used(), False
            if process.group is not None:
                if code:  # only then somebody asks
                    used = process.group.used()
                alone = self.groups.discard(process.group, used=code != 0)
            self.apart.leave(process.uid)
            if contained and used.filled and code == KILLED_CODE:
                used = used._replace(killed=1)  # version 1 counts it in a group that is gone
            if ending.starved:  # docker counts it in a group of its own
                used = used._replace(killed=1, filled=True)
            alone = alone and not contained
            ended.append(Ended(process.ref, code, process.ceiling, used, ending.started, alone))
            gone[pid] = process.ref
        try:
            if reaped and left:  # only an end makes orphans
                self._kill_strays(gone)
        except OSError as error:  # without a free descriptor /proc cannot be read
            log.error("cannot look for processes that ended members left behind: %s", error)
        return ended

    def _kill_strays(self, gone: dict[int, MemberRef]) -> None:
        """A process that an ended member left in another session has become our child. Processes of
        living members stay, even without a mark."""
        for pid in self._adopted(gone):
            if self._ownership.owners(pid).isdisjoint(self._processes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def notice(self) -> None:
        """Called often: note new orphans while it is still visible which member they belong to."""
        with contextlib.suppress(OSError):
            self._adopted({})

    def _adopted(self, gone: dict[int, MemberRef]) -> list[int]:
        """Children that we did not start, each with its ancestry read."""
        ours = self._helping() | self._pids.keys()
        found = [pid for pid in children() if pid not in ours]
        if found and self._ownership.strangers(found):
            self._look_around(gone)
        return found

    def _look_around(self, gone: dict[int, MemberRef]) -> None:
        began = time.monotonic()
        living = {pid: process.ref for pid, process in self._pids.items()}
        living |= self.containers.roots() | self.entered.refs
        self._ownership.look(living, self._helping() - living.keys(), gone)
        now = time.monotonic()
        self._look_around_at = now + max(LOOK_AROUND_S, (now - began) * LOOK_AROUND_REST)

    def _helpers(self) -> tuple[Helper, ...]:
        return (self.runs, self.apart.launcher, self.entered, *self.helpers)

    def _helping(self) -> set[int]:
        found = set(self.warm.pids())
        for helper in self._helpers():
            found |= helper.pids()
        return found

    def __len__(self) -> int:
        return len(self._processes)


# Processes that users have started beside members: children of the agent, each with its member.


class Helper(Protocol):
    """Part of the agent with processes of its own."""

    def pids(self) -> set[int]: ...

    def ended(self, pid: int, code: int) -> bool: ...


class Entered:
    """A helper, but what its processes leave belongs to members."""

    def __init__(self) -> None:
        self.refs: dict[int, MemberRef] = {}
        self._ends: dict[int, asyncio.Future[int]] = {}

    def add(self, pid: int, ref: MemberRef) -> asyncio.Future[int]:
        """Gets its exit code as a shell reports it."""
        self.refs[pid] = ref
        end = self._ends[pid] = asyncio.get_running_loop().create_future()
        return end

    def pids(self) -> set[int]:
        return set(self.refs)

    def ended(self, pid: int, code: int) -> bool:
        if self.refs.pop(pid, None) is None:
            return False
        end = self._ends.pop(pid)
        if not end.done():
            end.set_result(code if code >= 0 else 128 - code)
        return True


# Finds the program of a member on this node, before it starts.


FOUND_S = 1.0  # the place of a program is not looked up again before
FOUND_MAX = 256
_found: dict[tuple[str, str], tuple[float, str]] = {}  # until when, by name and PATH


def find_program(program: str, workdir: str, path: str) -> str:
    if not os.path.isdir(workdir):
        raise CannotStart(f"workdir {workdir} is not a directory on this node", Fault.MISSING)
    if "/" in program:
        found = os.path.join(workdir, program)
        if not os.path.exists(found):
            raise CannotStart(f"{found} does not exist on this node", Fault.MISSING)
        if os.path.isdir(found) or not os.access(found, os.X_OK):
            raise CannotStart(f"{found} cannot be executed: is it a program, with chmod +x?")
        return found
    now = time.monotonic()
    until, found = _found.get((program, path), (0.0, ""))
    if now < until:
        return found
    for folder in path.split(":"):
        found = f"{folder}/{program}"
        if folder and os.access(found, os.X_OK) and not os.path.isdir(found):
            if len(_found) >= FOUND_MAX:
                _found.clear()
            _found[program, path] = now + FOUND_S, found
            return found
    raise CannotStart(f"no program {program!r} in PATH on this node", Fault.MISSING)

"""Keeps members of tenants apart, where the agent is root: folders, environment, what they see."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import shutil
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from shoal.agent.confine import limits
from shoal.agent.confine.launcher import (
    PRIVATE,
    Ends,
    Launcher,
    Order,
    Shown,
    mounts,
    spawn,
    within,
)
from shoal.agent.confine.ways import Ways
from shoal.agent.faults import CannotStart
from shoal.agent.inherited import build_env, for_tenant, inherited_env, usable_paths
from shoal.machine.cgroups import Ceiling, Cgroups, Group
from shoal.machine.files import make_folder
from shoal.machine.kernel import NODE_MARK, memory_folder
from shoal.machine.paths import ask
from shoal.model.commands import Launch, Prepare
from shoal.model.job import Fault
from shoal.model.node import OF_TENANTS

FILES_MAX = 65_536  # open files of a process
TENANTS = "tenants"  # in a node's folder: a home for each tenant
SCRATCH_FOLDER, TMP_FOLDER = "scratch", "tmp"  # in a member's folder
# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN
CAPABILITIES = (0, 1, 6, 7, 21)
BUILD_PROCESSES_MAX = 4_096
NO_MOUNTS = f"{OF_TENANTS}' jobs, which cannot run (the agent may not make mounts: CAP_SYS_ADMIN)"
NOT_ROOT = f"{OF_TENANTS} apart from each other (the agent is not root)"


class Task(NamedTuple):
    """A program of a tenant. `folders`: what it may see of the cluster's home, and whether to write
    there. `tmp` is its /tmp."""

    uid: int
    argv: tuple[str, ...]
    program: str
    env: dict[str, str]
    workdir: str
    folders: Mapping[str, bool]
    tmp: str
    shm: str = ""  # its /dev/shm, if not the same
    withheld: tuple[str, ...] = ()  # files that it must not open
    read_only: tuple[str, ...] = ()  # volumes
    covers: tuple[str, ...] = ()  # folders in its /tmp that hold only what it may see


class Apart:
    """`problem` says why this agent cannot keep tenants apart; empty if it can."""

    def __init__(self, node: Path, groups: Cgroups) -> None:
        self._given, self._node = str(node), os.path.realpath(node)
        self._ways = Ways()
        self._private = [os.path.realpath(place) for place in PRIVATE]
        self.groups = groups
        self.problem = _problem()
        self.binding = Binding(None if self.problem else groups.second)
        self.launcher = Launcher(str(node))
        self._living: dict[int, int] = {}  # members of each user
        self._python = _python()
        self._covers = _covers(self._private[:2], (self._node, *(one.path for one in self._python)))
        self.inside_tmp = frozenset(map(os.path.basename, self._covers))
        self._memory = memory_folder(Path(self._node))
        self._inherited = inherited_env(apart=True)

    def holds(self, order: Launch | Prepare) -> bool:
        """Is the member to run as its tenant's own user? An agent that is not root cannot do that,
        and says so. Root could, and never runs a tenant's program as itself."""
        return order.uid > 0 and os.geteuid() == 0

    def must_work(self) -> None:
        if self.problem:
            why = (
                "this node's agent may not make mounts (CAP_SYS_ADMIN), so it runs no tenant's job"
            )
            raise CannotStart(why, Fault.MISSING)

    def _home(self, uid: int) -> None:
        home = self._home_of(uid)
        try:
            own(home, uid)
        except FileNotFoundError:
            make_folder(os.path.dirname(home))
            own(home, uid)

    def _home_of(self, uid: int) -> str:
        return f"{self._node}/{TENANTS}/{uid}"

    def _account(self, order: Launch | Prepare) -> tuple[str, str]:
        return self._home_of(order.uid), order.tenant or str(order.uid)

    def _real(self, directory: str) -> str:
        """Of a folder that we made in the node's."""
        return f"{self._node}{directory.removeprefix(self._given)}"

    def folders(self, launch: Launch, directory: str) -> str:
        """Made for the member; returns its scratch folder. The folder around them stays ours, so
        that no file we write there can be replaced by a link."""
        self.must_work()
        self._home(launch.uid)
        uid, real = launch.uid, self._real(directory)
        for folder in (SCRATCH_FOLDER, TMP_FOLDER):
            own(f"{real}/{folder}", uid)
        for inner in self.inside_tmp:
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{real}/{TMP_FOLDER}/{inner}", 0o700)
        if os.lstat(f"{real}/output").st_uid != uid:
            os.chown(f"{real}/output", uid, uid, follow_symlinks=False)
        return f"{real}/{SCRATCH_FOLDER}"

    def environment(self, order: Launch | Prepare, shown: Iterable[str]) -> dict[str, str]:
        """Where the environment of a tenant's member begins: nothing of the operator's own."""
        usable = self._usable(order.uid, shown)
        return for_tenant(dict(self._inherited), *self._account(order), usable)

    def check(self, order: Launch, workdir: str, shown: Iterable[str]) -> None:
        """A folder that the tenant's user may not enter would be found empty, because it is
        covered, and one in /tmp would not be found."""
        real = self._ways.real(workdir)
        if any(within(real, one) for one in shown):
            return
        advice = "send the directory with the job: shoal run --pack"
        wall = self._ways.barrier(real, order.uid)
        if wall:
            who = f"the user {order.uid} of tenant {order.tenant}"
            raise CannotStart(f"{who} may not enter {wall}, so not {workdir}; {advice}")
        if any(within(real, place) for place in self._private):
            raise CannotStart(f"{workdir} is not there, as tenants have their own /tmp; {advice}")

    def tidy_path(self, order: Launch, env: dict[str, str], shown: Iterable[str]) -> None:
        """Programs are looked up where the tenant's user can find them, too."""
        path = env.get("PATH", os.defpath)
        env["PATH"] = usable_paths(path, self._usable(order.uid, shown)) or os.defpath

    def _usable(self, uid: int, shown: Iterable[str]) -> Callable[[str], bool]:
        def usable(path: str) -> bool:
            if not self._ways.barrier(path, uid):
                return True
            seen = (*shown, *(one.path for one in self._python))
            return any(within(path, one) for one in seen)

        return usable

    def task(
        self,
        launch: Launch,
        directory: str,
        program: str,
        env: dict[str, str],
        workdir: str,
        folders: Mapping[str, bool],
        withheld: Iterable[str],
        read_only: tuple[str, ...] = (),
    ) -> Task:
        """A member, about to be started."""
        return Task(
            uid=launch.uid,
            argv=launch.argv,
            program=program,
            env=env,
            workdir=workdir,
            folders=folders,
            tmp=f"{self._real(directory)}/{TMP_FOLDER}",
            covers=self._covers,
            shm=self.enter(launch.uid),
            withheld=() if self.groups.holds_devices else tuple(withheld),
            read_only=read_only,
        )

    def start(self, task: Task, ends: int | Ends, group: Group | None) -> int:
        """The id of its process, confined. `ends` may be just where its output goes."""
        if isinstance(ends, int):
            with open(os.devnull, "rb") as nothing:
                return self.start(task, Ends(nothing.fileno(), ends, ends), group)
        folders = {**task.folders, self._home_of(task.uid): True}
        show = self._ways.show
        shown = ask(
            folders,
            lambda: [show(path, task.uid, writable=how) for path, how in folders.items()],
        )
        private = dict.fromkeys(self._private[:2], task.tmp)
        if os.path.isdir(PRIVATE[2]):
            private[PRIVATE[2]] = task.shm or task.tmp
        order = Order(
            task.program,
            task.argv,
            task.env,
            task.workdir,
            task.uid,
            min(FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
            mounts(
                [*self._python, *shown],
                private,
                self._closed(task.withheld),
                task.read_only,
                task.covers,
            ),
            tuple(group.entrances) if group is not None else (),
            ends.terminal,
        )
        self.binding.know(task.uid)
        if not self.groups.unified:  # in version 2 each has a group of its own below that folder
            self.binding.enter()
        if limits.JOIN:
            return spawn(limits.JOIN, order, ends)
        return self.launcher.start(order, ends)

    def prepare(self) -> None:
        """A member may come."""
        if not limits.JOIN:
            self.launcher.warm_up()

    def enter(self, uid: int) -> str:
        """One more member of this user. All of them share memory, as processes of a gang do."""
        self._living[uid] = self._living.get(uid, 0) + 1
        if self._memory is None:
            return ""
        folder = f"{self._memory}/shm-{uid}"
        try:
            own(folder, uid)
        except FileNotFoundError:
            make_folder(str(self._memory), 0o711)
            own(folder, uid)
        return folder

    def leave(self, uid: int) -> None:
        """A member has ended. Files in memory would stay, so they go with the last one."""
        left = self._living.get(uid, 0) - 1
        if left > 0:
            self._living[uid] = left
        elif self._living.pop(uid, None) and self._memory is not None:
            folder = f"{self._memory}/shm-{uid}"
            try:
                os.rmdir(folder)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)

    def _closed(self, files: Iterable[str]) -> dict[str, str]:
        """A file that nobody but root may open takes their place."""
        closed = f"{self._node}/closed"
        if files:
            os.close(os.open(closed, os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW, 0o000))
        return dict.fromkeys(files, closed)

    def build(
        self,
        order: Launch | Prepare,
        argv: tuple[str, ...],
        path: Path,
        ends: int | Ends,
        more: Mapping[str, str] | None = None,
        shown: Iterable[str] = (),
    ) -> tuple[int, Group | None]:
        """Build an environment, or fetch a volume, as the tenant's user, who owns it from then on.
        `more`: variables of the job. `shown`: folders that it may read."""
        self.must_work()
        self._home(order.uid)
        own(path, order.uid)
        own(path / TMP_FOLDER, order.uid)
        place = os.path.realpath(path)
        env = for_tenant(
            inherited_env("PIP_", apart=True), *self._account(order), self._usable(order.uid, ())
        )
        env = {**build_env(env), **(more or {}), NODE_MARK: self._node}
        program = shutil.which(argv[0], path=env.get("PATH", os.defpath)) or f"/bin/{argv[0]}"
        tmp = f"{place}/{TMP_FOLDER}"
        folders = {**dict.fromkeys(shown, False), place: True}
        task = Task(order.uid, argv, program, env, place, folders, tmp)
        group = self.groups.make(f"build-{path.name}", Ceiling(processes=BUILD_PROCESSES_MAX))
        return self.start(task, ends, group), group


def own(folder: Path | str, uid: int) -> None:
    """A folder of the tenant's user alone. One that exists has to be that already."""
    with contextlib.suppress(FileNotFoundError):
        there = os.lstat(folder)
        if there.st_uid == uid and stat.S_ISDIR(there.st_mode):
            return
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        owner = os.fstat(handle).st_uid
        if owner == os.geteuid():
            os.fchown(handle, uid, uid)
        elif owner != uid:
            raise CannotStart(f"{folder} belongs to another user (uid {owner})")
    finally:
        os.close(handle)


def _python() -> list[Shown]:
    """The interpreter that runs Shoal, and Shoal itself, for users that may not enter where they
    are, such as root's home. An interpreter is often reached by several links."""
    found = {sys.prefix, sys.base_prefix, str(Path(__file__).absolute().parents[2])}
    link = sys.executable
    for _ in range(10):
        if not os.path.islink(link):
            break
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        found.add(os.path.dirname(os.path.dirname(link)))
    nobody = 2**31 - 2
    return [Ways().show(path, nobody, writable=False) for path in sorted(found - {"/", "/usr"})]


def _covers(places: Iterable[str], paths: Iterable[str]) -> tuple[str, ...]:
    """A cluster or a Python below /tmp: the first folder on the way there, in a member's own /tmp.
    It is made with that and covered, so that nothing of what it shows is made on the disk."""
    tops = {
        f"{place}/{path[len(place) + 1 :].partition('/')[0]}"
        for place in places
        for path in paths
        if within(path, place) and path != place
    }
    return tuple(sorted(tops))


def _problem() -> str:
    if os.geteuid() != 0:
        return NOT_ROOT
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                held = int(line.split()[1], 16)
                if not all(held >> one & 1 for one in CAPABILITIES):
                    return NO_MOUNTS
    return ""


# Keeps tenants' programs from ports that are not theirs, by a small program in the kernel.
#
# The policy has a range of ports for gangs and replicas. Inside it, a tenant's user may bind only
# the ports that its own members were given; everywhere else, it may bind what it likes. The kernel
# asks the program at each bind of a process in the node's groups of version 2. It goes with the
# agent; root, and users that are no tenant's, are not held to it. Landlock could do the same only
# by naming all other ports, one by one, at each start: 55,000 rules, 18 ms and some megabytes of
# the kernel's memory.


BPF = {"x86_64": 321, "aarch64": 280}.get(platform.machine(), 0)
MAP_CREATE, MAP_UPDATE, MAP_DELETE, PROGRAM_LOAD, LINK_CREATE = 0, 2, 3, 5, 28
HASH, ADDRESS_PROGRAM = 1, 18
BINDS = (8, 9)  # to addresses of version 4 and of version 6
USERS_FROM = 65_536  # keys of users; those below are ports
ENTRIES_MAX = 2 * 65_536
RANGE_KEY = 0  # nobody is given port 0
ATTRIBUTES_BYTES = 128
LOOK_UP, WHICH_USER = 1, 15  # functions of the kernel

libc = ctypes.CDLL(None, use_errno=True)


class Binding:
    """`problem` says why this kernel does not keep ports apart; empty if it does."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: the node's group of version 2, if there is one."""
        self.folder = folder
        self.problem = "no cgroup of version 2" if folder is None else ""
        self._map = -1
        self._links: list[int] = []
        self._range: tuple[int, ...] = ()
        self._users: set[int] = set()
        self._entered = False
        if folder is not None:
            try:
                self._attach(folder)
            except OSError as error:
                self.close()
                self.problem = f"no BPF: {error.strerror}"

    def _attach(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._map = _bpf(MAP_CREATE, struct.pack("=5I", HASH, 4, 8, ENTRIES_MAX, 0))
        group = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for bind in BINDS:
                program = _load(self._map, bind)
                try:
                    link = struct.pack("=4I", program, group, bind, 0)
                    self._links.append(_bpf(LINK_CREATE, link))
                finally:
                    os.close(program)
        finally:
            os.close(group)

    def give(self, uid: int, ports: Iterable[int], reserved: tuple[int, ...]) -> None:
        """A member of this user starts, and may bind these ports; nobody but the users whom they
        were given may bind the others of `reserved`: the first, and the first behind them."""
        if not self._links or len(reserved) != 2:
            return
        if reserved != self._range:
            self._set(RANGE_KEY, reserved[0] | reserved[1] << 32)
            self._range = reserved
        for port in ports:
            self._set(port, uid)

    def take_back(self, ports: Iterable[int]) -> None:
        if self._links:
            for port in ports:
                key = ctypes.c_uint32(port)
                where = ctypes.addressof(key)
                with contextlib.suppress(FileNotFoundError):
                    _bpf(MAP_DELETE, struct.pack("=IxxxxQ", self._map, where))

    def know(self, uid: int) -> None:
        """From now on this user is held to its ports. Users of the operator never are."""
        if self._links and uid not in self._users:
            self._set(USERS_FROM + uid, uid)
            self._users.add(uid)

    def enter(self) -> None:
        """The agent, and with it all that it starts from now on. The kernel takes up to 17 ms for
        that, so not each process of a tenant does it by itself."""
        if self._links and self.folder is not None and not self._entered:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))
            self._entered = True

    def close(self) -> None:
        for handle in (*self._links, self._map):
            if handle >= 0:
                os.close(handle)
        self._links, self._map = [], -1

    def _set(self, key: int, value: int) -> None:
        named, content = ctypes.c_uint32(key), ctypes.c_uint64(value)
        where = ctypes.addressof(named), ctypes.addressof(content)
        _bpf(MAP_UPDATE, struct.pack("=IxxxxQQ", self._map, *where))


def _load(ports: int, bind: int) -> int:
    code = _program(ports)
    text, terms = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"MIT")
    where = ctypes.addressof(text), ctypes.addressof(terms)
    form = struct.pack("=IIQQ44xI", ADDRESS_PROGRAM, len(code) // 8, *where, bind)
    return _bpf(PROGRAM_LOAD, form)


def _program(ports: int) -> bytes:
    """In the words of the kernel's machine: r7 is the port, r8 the user."""
    look = (_op(0x18, 1, 1, 0, ports), _op(0), _op(0xBF, 2, 10))  # r1 = the map; r2 = the stack
    steps = (
        _op(0x61, 7, 1, 24),  # r7 = the port, as it was given to bind
        _op(0xDC, 7, 0, 0, 16),  # in our order
        _op(0x63, 10, 7, -4),
        _op(0x85, 0, 0, 0, WHICH_USER),
        _op(0xBC, 8, 0),
        _op(0x15, 8, 0, 30),  # root: allow
        _op(0xBC, 1, 8),
        _op(0x04, 1, 0, 0, USERS_FROM),
        _op(0x63, 10, 1, -12),
        *look,
        _op(0x07, 2, 0, 0, -12),
        _op(0x85, 0, 0, 0, LOOK_UP),
        _op(0x15, 0, 0, 21),  # not a tenant's user: allow
        _op(0x62, 10, 0, -8, RANGE_KEY),
        *look,
        _op(0x07, 2, 0, 0, -8),
        _op(0x85, 0, 0, 0, LOOK_UP),
        _op(0x15, 0, 0, 14),  # no range is known: allow
        _op(0x61, 1, 0, 0),
        _op(0x61, 2, 0, 4),
        _op(0xAD, 7, 1, 11),  # below it: allow
        _op(0x3D, 7, 2, 10),  # behind it: allow
        *look,
        _op(0x07, 2, 0, 0, -4),
        _op(0x85, 0, 0, 0, LOOK_UP),
        _op(0x15, 0, 0, 2),  # it is nobody's: refuse
        _op(0x61, 1, 0, 0),
        _op(0x1D, 1, 8, 2),  # it is this user's: allow
        _op(0xB7, 0, 0, 0, 0),
        _op(0x95),
        _op(0xB7, 0, 0, 0, 1),
        _op(0x95),
    )
    return b"".join(steps)


def _op(code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, to | source << 4, offset, value)


def _bpf(command: int, attributes: bytes) -> int:
    if not BPF:
        raise OSError(0, "not for this processor")
    form = ctypes.create_string_buffer(attributes, ATTRIBUTES_BYTES)
    found = int(libc.syscall(BPF, command, form, ATTRIBUTES_BYTES))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found

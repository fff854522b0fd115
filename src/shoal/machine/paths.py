"""Questions about paths that may hang: a mount without its server holds whoever asks it.

Only file systems that something outside of this kernel answers for can hang. They are known from
the kernel's table of mounts, and each of them has threads of its own that ask it, so that no loop
waits for it and nobody who asks another one does. Everything else is asked directly: where there is
no such mount, nothing here takes a system call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from shoal.machine.kernel import unescaped

P = ParamSpec("P")
T = TypeVar("T")

ANSWER_S = 1.0  # how long a loop waits for an answer, once: then everybody is refused at once
HANGS_S = 5.0  # without an answer for so long, a mount hangs
LOOK_S = 5.0  # between two looks at a mount that somebody uses
NAMES_MAX = 16
KNOWN_S, KNOWN_MAX = 1.0, 4_096  # where a path leads is not looked up again for so long
WORKERS_MAX = 4  # threads of a mount for work that may take long, such as copying
# What a mount says whose server or daemon is gone: it does not answer.
GONE = {errno.EIO, errno.ENODEV, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.ESHUTDOWN}
GONE |= {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNABORTED, errno.ECONNREFUSED}
GONE |= {errno.ECONNRESET, errno.EREMOTEIO}
LINKS_MAX = 40  # as the kernel follows them
TABLE = "/proc/self/mountinfo"
# Without a block device, and yet answered for by this kernel alone.
LOCAL = """
aufs bcachefs binfmt_misc bpf btrfs cgroup cgroup2 configfs debugfs devpts devtmpfs ecryptfs
efivarfs erofs fusectl hugetlbfs mqueue nsfs overlay proc pstore ramfs rootfs rpc_pipefs securityfs
selinuxfs squashfs sysfs tmpfs tracefs zfs
"""


class Hangs(OSError):
    """The mount at `point` does not answer."""

    def __init__(self, point: str, since: float, error: str = "") -> None:
        at = time.strftime("%H:%M", time.localtime(time.time() - (time.monotonic() - since)))
        said = f": {error}" if error else ""
        super().__init__(errno.ETIMEDOUT, f"{point} does not answer since {at}{said}")
        self.point = point

    def __str__(self) -> str:
        return str(self.strerror)


class Mount:
    """Quick questions show whether it answers: one at a time is put to it."""

    def __init__(self, point: str, number: str) -> None:
        self.point, self.number = point, number
        self.gone: tuple[float, str] | None = None  # since when it says so, and what it says
        self.names: dict[str, None] = {}  # other paths that lead to it, by links
        self._owed: deque[float] = deque()  # when the quick questions without an answer were put
        self._look: Future[None] | None = None
        self._quick: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._slow: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._workers = {id(self._quick): 0, id(self._slow): 0}

    @property
    def since(self) -> float:
        """When the oldest of them was put, or the first was answered with an error of the mount."""
        try:
            asked = self._owed[0]
        except IndexError:
            asked = time.monotonic()
        return min(asked, self.gone[0]) if self.gone else asked

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.since

    def problem(self) -> Hangs:
        return Hangs(self.point, self.since, self.gone[1] if self.gone else "")

    def look(self) -> Future[None]:
        """Ask it something whose answer only its server knows, unless that is under way. Hangs: it
        answers that it is gone."""
        if self._look is None or self._look.done():
            self._look = self.put(self._stat, ())
        return self._look

    async def answers(self, within_s: float) -> bool:
        """Does it within this time? For a loop that goes on meanwhile."""
        until = time.monotonic() + within_s
        while (left_s := until - time.monotonic()) > 0:
            look = asyncio.wrap_future(self.look())
            look.add_done_callback(asyncio.Future.exception)  # it may come when nobody waits
            if (await asyncio.wait([look], timeout=left_s))[0]:
                if look.exception() is None:
                    return True
                await asyncio.sleep(min(ANSWER_S, left_s))
        return False

    def _stat(self) -> None:
        try:
            os.statvfs(self.point)
        except OSError as error:
            if error.errno in GONE:
                self.gone = (self.gone or (time.monotonic(),))[0], error.strerror or str(error)
                raise self.problem() from None
        self.gone = None

    def _refuse_if_silent(self) -> None:
        if self.silent_s > ANSWER_S:
            if self.gone:
                self.look()
            raise self.problem()

    async def beside(self, function: Callable[[], T]) -> T:
        """However long it takes, as long as the mount answers. Hangs: it does not."""
        self._refuse_if_silent()
        found = asyncio.wrap_future(self.work(function, ()))
        found.add_done_callback(asyncio.Future.exception)  # it may come when nobody waits
        while not (await asyncio.wait([found], timeout=ANSWER_S))[0]:
            if self.silent_s > HANGS_S:
                raise self.problem()
            self.look()
        return found.result()

    def ask(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        """For a loop's thread, which waits for a moment. Hangs: there was no answer."""
        if threading.current_thread().name == self.point:  # one of its own asks for more
            return function(*args)
        self._refuse_if_silent()
        try:
            try:
                return self.put(function, args).result(ANSWER_S)
            except TimeoutError:
                raise
            except Exception as error:  # if it is gone, nothing that was found out about it is true
                if not isinstance(error, OSError) or error.errno in GONE:
                    self.look().result(ANSWER_S)
                raise
        except TimeoutError:
            raise self.problem() from None

    def work(self, function: Callable[..., T], args: tuple[Any, ...]) -> Future[T]:
        """However long it takes."""
        self.look()
        return self._begin(self._slow, WORKERS_MAX, Task(function, args))

    def put(self, function: Callable[..., T], args: tuple[Any, ...]) -> Future[T]:
        self._owed.append(time.monotonic())
        return self._begin(self._quick, 1, Task(function, args, self._owed.popleft))

    def _begin(self, line: queue.SimpleQueue[Task], most: int, task: Task) -> Future[Any]:
        line.put(task)
        if self._workers[id(line)] < most:
            self._workers[id(line)] += 1
            # Not from a pool of Python's own: that waits for its threads when the process ends.
            threading.Thread(target=_serve, args=(line,), name=self.point, daemon=True).start()
        return task.future


class Task:
    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        done: Callable[[], object] = lambda: None,
    ) -> None:
        self.function, self.args, self.done = function, args, done
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            self.done()
            return
        try:
            answer = self.function(*self.args)
        except BaseException as error:
            self.done()
            self.future.set_exception(error)
        else:
            self.done()
            self.future.set_result(answer)


def _serve(line: queue.SimpleQueue[Task]) -> None:
    while True:
        line.get().run()


class Mounts:
    """The mounts of this machine that may hang."""

    def __init__(self) -> None:
        self._points: dict[str, Mount] = {}
        self._used: dict[object, tuple[str, ...]] = {}  # paths, by whoever needs them
        self._look_at = 0.0
        self._known: dict[str, Mount | None] = {}  # the same few paths for every job
        self._known_until = 0.0
        self._own: tuple[str, ...] = ()
        self._table: int | None = None
        self._changes: select.epoll | None = None

    def __bool__(self) -> bool:
        return bool(self._points)

    def follow(self, own: str) -> None:
        """Read the table, now and when it changes. A mount that holds `own`, where this process
        keeps its files, is not asked in this way: without it the process can do nothing."""
        self._own = (own, os.path.realpath(own))
        self._table = os.open(TABLE, os.O_RDONLY | os.O_CLOEXEC)
        self._changes = select.epoll()
        self._changes.register(self._table, select.EPOLLPRI)
        asyncio.get_running_loop().add_reader(self._changes.fileno(), self._changed)
        self.read()

    def _changed(self) -> None:
        if self._changes is not None:
            self._changes.poll(0)
        self.read()

    def read(self) -> None:
        with open(TABLE, errors="surrogateescape") as table:
            points = {point: line.partition(" ")[0] for line in table if (point := _point(line))}
        self._known = {}
        own = [f"{place}/" for place in self._own]
        before = {(mount.point, mount.number): mount for mount in self._points.values()}
        self._points = {
            point: before.get((point, number)) or Mount(point, number)
            for point, number in points.items()
            if point != "/" and not any(place.startswith(f"{point}/") for place in own)
        }
        for mount in self._points.values():
            if mount.gone:  # another one may be there now, with the same number
                mount.look()

    def use(self, user: object, paths: Iterable[str]) -> None:
        """Until it leaves, the mounts below these paths are looked at."""
        if self._points:
            self._used[user] = tuple(self.under(paths))

    def leave(self, user: object) -> None:
        if self._used:
            self._used.pop(user, None)

    def hanging(self) -> list[Mount]:
        """Those that do not answer. Called regularly."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            used = dict.fromkeys(path for paths in self._used.values() for path in paths)
            gone = [mount for mount in self._points.values() if mount.gone]
            for mount in (*self.under(used).values(), *gone):
                mount.look()
        return [mount for mount in self._points.values() if mount.silent_s >= HANGS_S]

    def of(self, path: str) -> Mount | None:
        """Links are followed here, so that nothing of a mount is touched that may hang."""
        if not self._points:
            return None
        now = time.monotonic()
        if now >= self._known_until or len(self._known) >= KNOWN_MAX:
            self._known, self._known_until = {}, now + KNOWN_S
        if path not in self._known:
            self._known[path] = self._find(path)
        return self._known[path]

    def _find(self, path: str) -> Mount | None:
        here = next((place for place in self._own if path.startswith(f"{place}/")), "")
        todo, links = path[len(here) :].split("/")[::-1], 0
        while todo:
            part = todo.pop()
            if part == "..":
                here = here.rpartition("/")[0]
            if part in ("", ".", ".."):
                continue
            here = f"{here}/{part}"
            if mount := self._points.get(here):
                return mount
            try:
                target = os.readlink(here)
            except OSError:
                continue
            links += 1
            if links > LINKS_MAX:
                return None
            here = "" if target.startswith("/") else here.rpartition("/")[0]
            todo += target.split("/")[::-1]
        return None

    def under(self, paths: Iterable[str]) -> dict[str, Mount]:
        """Those of the paths that may hang."""
        if not self._points:
            return {}
        found: dict[str, Mount] = {}
        for path in dict.fromkeys(paths):
            mount = self.of(path) if path.startswith("/") else None
            if mount is not None:
                found[path] = mount
                if not f"{path}/".startswith(f"{mount.point}/") and len(mount.names) < NAMES_MAX:
                    mount.names[path] = None
        return found


MOUNTS = Mounts()


def ask(paths: Iterable[str], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function finds out about these paths, in a moment. Hangs: one does not answer."""
    mounts = {id(mount): mount for mount in MOUNTS.under(paths).values()}
    if not mounts:
        return function(*args, **kwargs)
    first, *others = mounts.values()
    for mount in others:
        mount.ask(os.statvfs, (mount.point,))
    return first.ask(lambda: function(*args, **kwargs), ())


async def asked(path: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same beside the loop, however long it takes."""
    mount = MOUNTS.of(path)
    if mount is None:
        return await asyncio.to_thread(function, *args, **kwargs)
    return await asyncio.wrap_future(mount.work(lambda: function(*args, **kwargs), ()))


def close(path: str, *handles: int) -> None:
    """Files below this path: to close one, a mount is asked, too."""
    mount = MOUNTS.of(path)
    for handle in handles:
        if mount is None:
            os.close(handle)
        else:
            mount.work(os.close, (handle,))


def entering(workdir: str, words: list[str]) -> tuple[str, list[str]]:
    """Where to start a process, and its words: it enters a folder that may hang by itself, because
    whoever starts it waits until it has begun."""
    if not MOUNTS.under((workdir, words[0])):
        return workdir, words
    return "/", ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"', workdir, *words]


def _point(line: str) -> str:
    """The place of a mount that may hang; empty for any other. Fields: see proc(5)."""
    before, _, after = line.partition(" - ")
    with contextlib.suppress(IndexError):
        device, place, kind = before.split()[2], before.split()[4], after.split()[0]
        if kind.startswith("fuse") and kind != "fusectl":
            return unescaped(place)
        if device.startswith("0:") and kind not in LOCAL.split():
            return unescaped(place)
    return ""

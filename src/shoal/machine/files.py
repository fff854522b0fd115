"""Files that must be whole, private, our own, or held by one process at a time; the names of those
in a node's folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# In HOME/nodes/NAME: several programs of the node read or write them.
SPEC = "spec.json"
LINK_FILE = "link.json"  # where its agent dials the head; without it, the agent listens
LINK_PROBLEM = "link.problem"  # one line, while the head cannot be reached
CONTACT = "contact"  # written when a controller has spoken to the agent
LEAVING = "leaving"  # exists when the node wants to leave
STARTER_LOCK = "starter.lock"
SUPERVISOR_LOCK = "supervisor.lock"  # in HOME
TUNNELS = "tunnels"  # a note for each encrypted network that the node is part of
AGENT_LOCK = "agent.lock"  # free only when every process of the node is gone
FORMAT_FILE = "format.json"  # which version has written to it

LINKS_MAX = 40
OWN_BYTES_MAX = 16 * 1024 * 1024


def write_private(path: Path, data: bytes) -> None:
    """Replace a file whole or not at all; nobody else may read it."""
    # Several machines may share the folder, and processes on two of them may have the same number.
    # So may threads write the same file.
    own = f"{os.uname().nodename[:32]}.{os.getpid()}.{threading.get_native_id()}"
    temporary = path.with_name(f".{path.name}.{own}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            rest = memoryview(data)
            while rest:  # a nearly full disk writes a part and reports no error
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """A new or removed name in it survives a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Set to 1 where no process of another user can exist: in a container that holds no capability, so
# that nobody in it can become somebody else. Kubernetes lets all users write to an `emptyDir`.
ONE_USER = "SHOAL_ONE_USER"


def require_own(folder: Path) -> None:
    """Refuse a folder that another user made or could replace, because we would obey what is in it.
    A folder of ours that others may enter is closed to them, unless all users may write to it. A
    missing folder is fine."""
    for here, info, last in _way(folder):
        if stat.S_ISLNK(info.st_mode):
            if info.st_uid not in _trusted():
                raise _refusal(here, f"is a link that {_owner(info)} made; name the folder itself")
        elif last:
            _require_private(here, info)
        elif info.st_uid not in _trusted():
            raise _refusal(here, f"belongs to {_owner(info)}, who could replace what is in it")
        elif _shared(info):
            advice = "choose a folder elsewhere, or take that right away with: chmod go-w"
            raise _refusal(here, f"is writable for others, who could replace {folder}; {advice}")


def read_own(path: Path) -> bytes:
    """The content of a plain file of our own."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path, "is a link; it must be a plain file") from None
        raise
    try:
        info = os.fstat(handle)
        if info.st_uid not in _trusted():
            raise _refusal(path, f"belongs to {_owner(info)}")
        if not stat.S_ISREG(info.st_mode):
            raise _refusal(path, "is not a plain file")
        return os.read(handle, OWN_BYTES_MAX)
    finally:
        os.close(handle)


def tighten(folder: Path) -> None:
    """Make files in our folder private; refuse files that another user put there."""
    for path in folder.iterdir():
        info = path.lstat()
        if info.st_uid not in _trusted():
            raise _refusal(path, f"belongs to {_owner(info)}; remove it")
        if stat.S_ISLNK(info.st_mode) or not info.st_mode & 0o077:
            continue
        path.chmod(0o700 if stat.S_ISDIR(info.st_mode) else 0o600)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for a socket file that is short enough for the kernel (107 bytes), however deep it
    lies: through a descriptor of its directory."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{path.name}"
    finally:
        os.close(handle)


def lock(path: Path) -> int | None:
    """Lock the file for as long as this process, or a child that kept the descriptor, lives; None
    if another holds it. The kernel releases it when the last holder is gone, however it ended."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + GLANCE_S
    while not _flock(handle, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            os.close(handle)
            return None
        time.sleep(GLANCE_S / 50)
    return handle


def held(path: Path) -> bool:
    """Does a living process hold the lock? Looking takes it for a moment."""
    try:
        handle = os.open(path, os.O_RDONLY)  # works on a read-only disk, too
    except FileNotFoundError:
        return False
    try:
        return not _flock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


# A process that only tests a lock holds it for an instant: wait that out.
GLANCE_S = 0.5


def _flock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _way(folder: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Every directory and link that a path leads through; True with the last one."""
    here, todo, links = Path("/"), list(folder.absolute().parts[1:]), 0
    yield here, os.lstat(here), not todo
    while todo:
        name = todo.pop(0)
        if name == "..":
            here = here.parent
            continue
        here = here / name
        try:
            info = os.lstat(here)
        except FileNotFoundError:
            return
        if stat.S_ISLNK(info.st_mode):
            links += 1
            if links > LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            yield here, info, False
            target = Path(os.readlink(here))
            here = Path("/") if target.is_absolute() else here.parent
            todo = [part for part in target.parts if part != "/"] + todo
        else:
            yield here, info, not todo


def _require_private(folder: Path, info: os.stat_result) -> None:
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    if info.st_uid != os.geteuid():
        raise _refusal(folder, f"belongs to {_owner(info)}; choose a folder of your own")
    if info.st_mode & 0o002 or folder == Path("/"):
        # Not ours to close: others work in it, as in /tmp.
        raise _refusal(folder, f"is open to all users; choose a folder in it, e.g. {folder}/shoal")
    if info.st_mode & 0o077:
        os.chmod(folder, 0o700)


def _trusted() -> set[int]:
    """Us and root; in containers that show root as nobody, the owner of "/"."""
    return {0, os.geteuid(), os.lstat("/").st_uid}


def _shared(info: os.stat_result) -> bool:
    """May others rename files in this directory?"""
    if info.st_mode & stat.S_ISVTX or os.environ.get(ONE_USER) == "1":
        return False
    by_group = bool(info.st_mode & 0o020) and info.st_gid not in (0, os.getegid())
    return by_group or bool(info.st_mode & 0o002)


def _owner(info: os.stat_result) -> str:
    return "root" if info.st_uid == 0 else f"another user (uid {info.st_uid})"


def _refusal(path: Path, reason: str) -> PermissionError:
    return PermissionError(errno.EPERM, reason, str(path))


def make_folder(path: str, mode: int = 0o700) -> None:
    """The folders around it are there but for the first time."""
    try:
        os.mkdir(path, mode)
    except OSError:
        os.makedirs(path, mode=mode, exist_ok=True)

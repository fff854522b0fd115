"""Keeps folders read-only for a process and all that it starts, then becomes the program.

    python read_only.py FOLDER... -- PROGRAM [WORD...]

The folders are mounted over themselves in a mount namespace of the process's own. Without root that
takes a user namespace in which the user keeps its id; its rights in there end when the program
starts, so it cannot change the mounts back. It imports little, because a job waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
MOUNT_SETATTR = 442  # the same number on all architectures
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1

# What becomes `PROGRAM [WORD...]` with the folders before "--".
PREFIX = (sys.executable, "-I", "-S", os.path.abspath(__file__))

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)


class Failure(Exception):
    """Why the kernel does not do it."""


def main(words: list[str]) -> None:
    end = words.index("--")
    try:
        _enter()
        hold(words[:end])
        os.chdir(os.getcwd())  # it may be inside one of them, reached before that was read-only
    except (Failure, OSError) as error:
        sys.exit(f"a volume cannot be kept read-only on this node: {error}")
    program = words[end + 1 :]
    try:
        os.execv(program[0], program)
    except OSError as error:
        sys.exit(f"cannot start {program[0]}: {error.strerror}")


def _enter() -> None:
    user, group = os.getuid(), os.getgid()
    own = CLONE_NEWUSER if os.geteuid() else 0
    _check(libc.unshare(CLONE_NEWNS | own), "no namespace for mounts")
    if own:
        _write("setgroups", "deny")
        _write("uid_map", f"{user} {user} 1")
        _write("gid_map", f"{group} {group} 1")
    _check(libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None), "cannot separate mounts")


def hold(folders: list[str]) -> None:
    """In this mount namespace, with all mounts inside of them."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    for folder in folders:
        path = os.fsencode(os.path.realpath(folder))
        _check(libc.mount(path, path, None, MS_BIND | MS_REC, None), f"cannot mount {folder}")
        done = libc.syscall(
            ctypes.c_long(MOUNT_SETATTR),
            ctypes.c_int(AT_FDCWD),
            ctypes.c_char_p(path),
            ctypes.c_uint(AT_RECURSIVE),
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        )
        if done != 0 and ctypes.get_errno() == errno.ENOSYS:
            raise Failure("this needs Linux 5.12 or newer")
        _check(done, f"cannot make {folder} read-only")


def _write(name: str, text: str) -> None:
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise Failure(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Members as processes: start them, signal them, and see that nothing of them stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from shoal.kernel import NODE_MARK, children, kill_marked, variable
from shoal.model.commands import Launch
from shoal.model.job import MemberRef

CANNOT_START_CODE = 127  # as a shell reports a command that is not there
MARK = "SHOAL_REF"  # in the environment of all that a member starts


class CannotStart(Exception):
    """A reason that a user can act on."""


class Members:
    """The living processes of one node, each leader of its own session and process group."""

    def __init__(self, node_directory: Path) -> None:
        self._node_mark = str(node_directory)
        self._pids: dict[int, MemberRef] = {}
        self._processes: dict[MemberRef, subprocess.Popen[bytes]] = {}
        # Should keeper and agent be killed together, at least the members themselves follow.
        setpriv = shutil.which("setpriv")
        self._prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []

    def start(self, launch: Launch, directory: Path) -> None:
        """Output goes to a file that the member writes by itself: nobody can slow it down."""
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **launch.env, MARK: str(launch.ref)}
        env[NODE_MARK] = self._node_mark
        workdir = launch.workdir or str(directory)
        program = _find(launch.argv[0], workdir, env.get("PATH", os.defpath))
        handle = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = subprocess.Popen(
                [*self._prefix, program, *launch.argv[1:]],
                cwd=workdir,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                start_new_session=True,
            )
        except OSError as error:
            raise CannotStart(f"cannot start {launch.argv[0]}: {error.strerror}") from None
        finally:
            os.close(handle)
        self._pids[process.pid] = launch.ref
        self._processes[launch.ref] = process

    def kill_leftovers(self) -> int:
        """Keeper and agent of an earlier life may have been killed together: what survived that
        must not use the GPUs that this life gives away."""
        return kill_marked(NODE_MARK, self._node_mark.__eq__)

    def signal(self, ref: MemberRef, number: int) -> None:
        process = self._processes.get(ref)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def reap(self) -> list[tuple[MemberRef, int]]:
        """Members that ended since the last call, with codes as a shell gives them."""
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ref = self._pids.pop(pid, None)
            if ref is not None:
                process = self._processes.pop(ref)
                code = os.waitstatus_to_exitcode(status)
                process.returncode = code  # it was reaped here, so let Popen not look for it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                ended.append((ref, code if code >= 0 else 128 - code))
        self._kill_strays()
        return ended

    def _kill_strays(self) -> None:
        """What a member left behind in a session of its own has become our child."""
        living = {str(ref) for ref in self._processes}
        for pid in children():
            if pid not in self._pids and variable(pid, MARK) not in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def __len__(self) -> int:
        return len(self._processes)


def _find(program: str, workdir: str, path: str) -> str:
    if not os.path.isdir(workdir):
        raise CannotStart(f"workdir {workdir} is not a directory on this node")
    if "/" in program:
        found = os.path.join(workdir, program)
        if not os.path.exists(found):
            raise CannotStart(f"{found} does not exist on this node")
        if os.path.isdir(found) or not os.access(found, os.X_OK):
            raise CannotStart(f"{found} cannot be executed: is it a program, with chmod +x?")
        return found
    found_in_path = shutil.which(program, path=path)
    if found_in_path is None:
        raise CannotStart(f"no program {program!r} in PATH on this node")
    return found_in_path

"""Short commands of the runtime that the agent runs beside the members, and waits for.

Code that waits for the agent's children must skip those in `pids()` and pass them to `ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import signal
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from fcntl import ioctl
from termios import TIOCSWINSZ

from shoal.kernel import NODE_MARK

TEXT_BYTES_MAX = 16 * 1024
WINDOW = struct.pack("HHHH", 50, 250, 0, 0)  # rows and columns: lines that are not wrapped
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
LOST_CODE = 255


class Run:
    """One command: what it printed last, and its exit code when it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self.process = process
        self.screen = screen
        self.text = ""
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class Runs:
    def __init__(self, node_mark: str) -> None:
        self._env = {NODE_MARK: node_mark}
        self._running: dict[int, Run] = {}

    async def run(
        self,
        words: Sequence[str],
        *,
        seconds: float,
        env: Mapping[str, str] | None = None,
        said: Callable[[str], None] | None = None,
    ) -> tuple[int, str]:
        """The exit code and the last of what it printed. `said` gets new text as it comes: the
        command prints to a terminal of its own, because most show progress only there."""
        screen, side = pty.openpty()
        try:
            ioctl(side, TIOCSWINSZ, WINDOW)
            process = subprocess.Popen(  # noqa: ASYNC220 (it returns when the program has begun)
                words,
                env={**os.environ, **self._env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=side,
                stderr=side,
                start_new_session=True,
            )
        except OSError:
            os.close(screen)
            raise
        finally:
            os.close(side)
        os.set_blocking(screen, False)
        run = self._running[process.pid] = Run(process, screen)
        loop = asyncio.get_running_loop()
        loop.add_reader(screen, self._read, run, said)
        try:
            code = await asyncio.wait_for(asyncio.shield(run.ended), seconds)
            self._read(run, said)
            return code, run.text
        except TimeoutError:
            return LOST_CODE, f"{run.text}\nit took longer than {seconds:.0f} s"
        finally:
            loop.remove_reader(screen)
            os.close(screen)
            if not run.ended.done():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _read(self, run: Run, said: Callable[[str], None] | None) -> None:
        try:
            data = os.read(run.screen, 1 << 16)
        except BlockingIOError:
            return
        except OSError:  # the command has closed its side
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(run.screen)
            return
        text = ESCAPES.sub("", data.decode(errors="replace")).replace("\r\n", "\n")
        run.text = (run.text + text)[-TEXT_BYTES_MAX:]
        if said is not None:
            said(text)

    def pids(self) -> set[int]:
        return set(self._running)

    def ended(self, pid: int, code: int) -> bool:
        """The process is no more and was waited for; was it ours?"""
        run = self._running.pop(pid, None)
        if run is None:
            return False
        run.process.returncode = code
        if not run.ended.done():
            run.ended.set_result(code if code >= 0 else 128 - code)
        return True

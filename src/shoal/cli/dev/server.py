"""Runs in the job of `shoal dev`: starts the editor's server, says where it is, and ends it when
nobody has used it for a while. It is sent as text, so it uses nothing but the standard library."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READY = "shoal dev: ready "  # and where it is, as JSON; the client looks for this line
LOCAL = "127.0.0.1"
ASLEEP_S = 10.0  # a wait that takes so much longer was interrupted by a sleep of the job
LOOK_S = (0.5, 15.0)  # how often to look whether it is used: a tenth of the idle time, within this
START_S = 300.0
ANSWER_S = 20.0
NOT_FOUND = 404
END_S = 10.0
KEEP_S, KEEP_REST = 2.0, 20  # what changed is copied this often, and takes 1/20 of the time at most
FILES_MAX = 20_000
SKIPPED = (".git", "__pycache__", ".ipynb_checkpoints", "node_modules", ".venv")


class Jupyter:
    """Used: a cell runs, a kernel or a terminal answers, a program runs in a terminal. That a page
    is open does not count: it asks the server something every few seconds."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token
        self.path = "/lab?token="

    def words(self, folder: str) -> list[str]:
        program = shutil.which("jupyter-lab")
        if program is None:
            fix = "install it in the environment that the job uses: pip install jupyterlab"
            sys.exit(f"there is no JupyterLab here (no jupyter-lab in the PATH); {fix}")
        return [
            program,
            "--no-browser",
            f"--ServerApp.ip={LOCAL}",
            f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={folder}",
            *(["--allow-root"] if os.geteuid() == 0 else []),
        ]

    def environment(self) -> dict[str, str]:
        return {"JUPYTER_TOKEN": self.token}

    def used(self, pid: int) -> float:
        """When it was last used."""
        kernels, terminals = self._ask("/api/kernels"), self._ask("/api/terminals")
        busy = any(kernel.get("execution_state") == "busy" for kernel in kernels)
        if busy or (terminals and works_in_terminal(pid)):
            return time.time()
        return max((moment(one["last_activity"]) for one in (*kernels, *terminals)), default=0.0)

    def _ask(self, path: str) -> Any:
        request = urllib.request.Request(
            f"http://{LOCAL}:{self.port}{path}?no_track_activity=1",
            headers={"Authorization": f"token {self.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == NOT_FOUND:
                return []  # a server without terminals, as its user wants it
            raise


def moment(text: str) -> float:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def works_in_terminal(server: int) -> bool:
    """Is there a program that was started in a shell of one of the server's terminals?"""
    parents, terminals = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            parents[int(name)], terminals[int(name)] = int(words[1]), int(words[4])
    shells = {pid for pid, parent in parents.items() if parent == server and terminals[pid]}
    return any(parent in shells for parent in parents.values())


class Code:
    """VS Code in the browser. Used: a window is open."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token
        self.path = "/?tkn="

    def words(self, folder: str) -> list[str]:
        where = [f"--host={LOCAL}", f"--port={self.port}", f"--connection-token={self.token}"]
        if program := shutil.which("openvscode-server"):
            return [program, *where, f"--default-folder={folder}"]
        if program := shutil.which("code"):
            return [program, "serve-web", "--accept-server-license-terms", *where]
        fix = "install openvscode-server or VS Code's command line there, or leave --editor out"
        sys.exit(f"there is no VS Code server here (openvscode-server, code) in the PATH; {fix}")

    def environment(self) -> dict[str, str]:
        return {}

    def used(self, pid: int) -> float:  # noqa: ARG002
        """When it was last used: now, if a connection is open."""
        mine, established = f":{self.port:04X}", "01"
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        words = [line.split() for line in lines]
        if any(one[1].endswith(mine) and one[3] == established for one in words):
            return time.time()
        return 0.0


EDITORS: dict[str, Any] = {"jupyter": Jupyter, "code": Code}


def main(name: str, idle_s: float) -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        port = probe.getsockname()[1]
    editor = EDITORS[name](port, secrets.token_hex(24))
    copy = Copy.made()
    folder = copy.folder if copy else os.getcwd()
    process = subprocess.Popen(
        editor.words(folder),
        cwd=folder,
        env={**os.environ, **editor.environment()},
        stdin=subprocess.DEVNULL,
    )
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    if not answers(port, process):
        code = process.wait()
        return code if code > 0 else 1
    with tempfile.TemporaryDirectory(prefix="shoal-dev-") as private:
        token = Path(private) / "token"  # output can be read by people who may not connect
        token.write_text(editor.token)
        place = {"port": port, "path": editor.path, "token": str(token)}
        print(READY + json.dumps(place), flush=True)
        used = used_until_end(editor, process, idle_s, folder, copy)
    if copy:
        copy.keep()
    if not used:
        print(f"[shoal: nobody has used it for {spoken(idle_s)}]", flush=True)
        return 0
    if process.returncode == 0:
        print("[shoal: its editor was shut down]", flush=True)
    return 128 - process.returncode if process.returncode < 0 else process.returncode


class Copy:
    """A package is read-only, so the editor works on a copy of it. What changes there is copied to
    the output folder, whose files are kept at the head."""

    def __init__(self, top: str, folder: str, output: str) -> None:
        self.folder = folder
        self._top, self._output = top, output
        self._seen = dict(self._files())
        self._next = 0.0

    @classmethod
    def made(cls) -> Copy | None:
        package, output = os.environ.get("SHOAL_PACKAGE"), os.environ.get("SHOAL_OUTPUT")
        if not package or not output:
            return None
        inside = os.path.relpath(os.path.realpath("."), os.path.realpath(package))
        top = os.path.join(os.environ["SHOAL_SCRATCH"], "work")
        shutil.copytree(package, top, dirs_exist_ok=True, symlinks=True)
        for one, folders, files in os.walk(top):
            for name in (".", *folders, *files):
                path = os.path.join(one, name)
                if not os.path.islink(path):
                    os.chmod(path, os.stat(path).st_mode | 0o600)
        return cls(top, os.path.normpath(os.path.join(top, inside)), output)

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Every file, and what changes when it changes."""
        for one, folders, files in os.walk(self._top):
            folders[:] = [name for name in folders if name not in SKIPPED]
            for name in files:
                path = os.path.join(one, name)
                with contextlib.suppress(OSError):
                    seen = os.lstat(path)
                    if stat.S_ISREG(seen.st_mode):
                        yield os.path.relpath(path, self._top), (seen.st_mtime_ns, seen.st_size)

    def tend(self) -> None:
        """As often as it costs little."""
        if time.monotonic() >= self._next:
            began = time.monotonic()
            self.keep()
            took_s = time.monotonic() - began
            self._next = time.monotonic() + max(KEEP_S, KEEP_REST * took_s)

    def keep(self) -> None:
        for name, state in self._files():
            if self._seen.get(name) == state:
                continue
            self._seen[name] = state
            target = os.path.join(self._output, name)
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                part = f"{self._top}.part"
                shutil.copy2(os.path.join(self._top, name), part)
                shutil.move(part, target)  # half a file would be kept, too


def answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    """False if it ends before it answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        with contextlib.suppress(OSError), socket.create_connection((LOCAL, port), ANSWER_S):
            return True
        time.sleep(0.1)
    print(f"it does not answer after {START_S:.0f} s", file=sys.stderr)
    end(process)
    return False


def used_until_end(
    editor: Any,
    process: subprocess.Popen[bytes],
    idle_s: float,
    folder: str,
    copy: Copy | None,
) -> bool:
    """True if it ended by itself; False if it was ended because nobody used it."""
    last = time.time()
    pause_s = min(LOOK_S[1], max(LOOK_S[0], idle_s / 10)) if idle_s else LOOK_S[1]
    look_at = time.monotonic() + pause_s
    while True:
        began, wait_s = time.monotonic(), min(pause_s, KEEP_S)
        try:
            process.wait(wait_s)
            return True
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() - began > wait_s + ASLEEP_S:
            last = time.time()  # the job was asleep, and somebody woke it
        if copy:
            copy.tend()
        if not idle_s or time.monotonic() < look_at:
            continue
        look_at = time.monotonic() + pause_s
        try:
            last = max(last, editor.used(process.pid))
        except (OSError, ValueError, KeyError):
            last = time.time()  # it is too busy to answer
        if time.time() - last > idle_s:
            last = max(last, newest(folder))  # someone may only write text
        if time.time() - last > idle_s:
            end(process)
            return False


def newest(folder: str) -> float:
    """When a file there was last written, among the first FILES_MAX. Programs write to hidden
    folders on their own, and so does a cluster to its home."""
    found, left = 0.0, FILES_MAX
    node = os.path.realpath(os.environ.get("SHOAL_NODE_DIR", "/"))
    for one, folders, files in os.walk(os.path.realpath(folder)):
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED
            and not name.startswith(".")
            and not node.startswith(os.path.join(one, name, ""))
        ]
        left -= len(files)
        for name in files:
            with contextlib.suppress(OSError):
                found = max(found, os.lstat(os.path.join(one, name)).st_mtime)
        if left < 0:
            break
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def spoken(seconds: float) -> str:
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))

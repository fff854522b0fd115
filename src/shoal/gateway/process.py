"""The HAProxy process: started so that it outlives us, found again, reloaded, stopped."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from shoal.files import write_private
from shoal.gateway.binary import Binary, GatewayError
from shoal.gateway.runtime import Runtime, RuntimeFailure

START_TIMEOUT_S = 10.0
RELOAD_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.01
# While nobody is there to cut the access log it may grow to this; then lines are dropped.
FILE_BYTES_MAX = 1 << 30
# A full log must not end the proxy: the signal that a limit sends is ignored.
LAUNCH = 'ulimit -f "$0"; trap "" XFSZ; exec "$@"'


class Proxy:
    """The proxy of one directory, whoever started it."""

    def __init__(self, directory: Path, binary: Binary) -> None:
        self.directory = directory
        self.binary = binary
        self.runtime = Runtime(directory / "runtime.sock")
        self.master = Runtime(directory / "master.sock")
        self.access_log = directory / "access.log"
        self._config = directory / "haproxy.cfg"
        self._pid_file = directory / "haproxy.pid"
        self._said = directory / "haproxy.log"
        self._child: subprocess.Popen[bytes] | None = None

    def pid(self) -> int | None:
        """The master's, if it is alive and ours."""
        try:
            pid = int(self._pid_file.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return None
        return pid if self._is_ours(pid) else None

    def running(self) -> str | None:
        """The digest of the configuration that is being served; None if nothing is."""
        if self.pid() is None:
            return None
        try:
            said = self.runtime.info().get("description", "")
        except RuntimeFailure:
            return None
        return said.removeprefix("shoal:")

    def check(self, text: str) -> Path:
        """Write a candidate and let HAProxy read it."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(Path(__file__).with_name("hold.lua"), self.directory / "hold.lua")
        candidate = self.directory / "candidate.cfg"
        write_private(candidate, text.encode())
        try:
            done = subprocess.run(
                [self.binary.path, "-c", "-q", "-f", candidate],
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GatewayError(f"cannot run {self.binary.path}: {error}") from None
        if done.returncode:
            raise GatewayError(f"HAProxy refuses the configuration: {alert(done.stderr)}")
        return candidate

    def start(self, text: str, digest: str) -> None:
        self.stop(grace_s=0)
        self.check(text).replace(self._config)
        self._pid_file.unlink(missing_ok=True)
        before = self._said.stat().st_size if self._said.exists() else 0
        with self.access_log.open("ab") as out, self._said.open("ab") as said:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", LAUNCH, str(FILE_BYTES_MAX // 512), *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=said,
                start_new_session=True,
                cwd=self.directory,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.running() != digest or not self._master_answers():
            if self._child.poll() is not None or time.monotonic() > deadline:
                self.stop(grace_s=0)
                with self._said.open("rb") as file:
                    file.seek(before)
                    text = file.read().decode(errors="replace")
                raise GatewayError(f"HAProxy did not start: {alert(text)}")
            time.sleep(POLL_S)

    def _command(self) -> list[str]:
        master = f"{self.directory}/master.sock,mode,600"
        files = ["-f", str(self._config), "-p", str(self._pid_file)]
        return [str(self.binary.path), "-W", "-S", master, *files]

    def reload(self, text: str, digest: str) -> None:
        """Open connections stay with the old worker until they are done; new ones go to the new
        worker over the same listening sockets."""
        candidate = self.check(text)
        before = self._config.read_bytes()
        candidate.replace(self._config)
        answer = self.master.ask("reload")
        if "Success=0" in answer:  # 2.7 and later say so; the old worker goes on
            write_private(self._config, before)
            raise GatewayError(f"HAProxy refuses the configuration: {alert(answer)}")
        deadline = time.monotonic() + RELOAD_TIMEOUT_S
        while self.running() != digest or not self._master_answers():
            if time.monotonic() > deadline:
                raise GatewayError(f"HAProxy did not take the new configuration; see {self._said}")
            time.sleep(POLL_S)

    def stop(self, grace_s: float = STOP_TIMEOUT_S) -> bool:
        """End it, after what is in flight if that takes no longer than the grace; True if there
        was one."""
        pid = self.pid() or self._orphan()
        if pid is None:
            return False
        steps = [(signal.SIGUSR1, grace_s)] if grace_s else []
        for number, wait_s in [*steps, (signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 5.0)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                if not self._is_ours(pid):
                    return True
                time.sleep(POLL_S)
        raise GatewayError(f"HAProxy (process {pid}) cannot be ended")

    def _master_answers(self) -> bool:
        """A master starts itself anew once its worker is ready, and is deaf for that moment."""
        try:
            return bool(self.master.ask("show proc"))
        except RuntimeFailure:
            return False

    def ports(self) -> set[tuple[str, int]]:
        """Where the configuration that runs listens."""
        if not self._config.exists():
            return set()
        found = re.findall(r"^ +bind (\S+):(\d+)", self._config.read_text(), re.MULTILINE)
        return {(address.strip("[]"), int(port)) for address, port in found}

    def _is_ours(self, pid: int) -> bool:
        if self._child is not None:
            self._child.poll()  # a dead child would else look alive
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return os.fsencode(self._config) in command

    def _orphan(self) -> int | None:
        """A worker whose master was killed is ending, but may hold the ports for a while."""
        with contextlib.suppress(RuntimeFailure, ValueError):
            pid = int(self.runtime.info().get("Pid", "0"))
            return pid if self._is_ours(pid) else None
        return None


def alert(text: str) -> str:
    """The one line of HAProxy's messages that says what is wrong."""
    lines = [line for line in text.splitlines() if "[ALERT]" in line] or text.splitlines()[-1:]
    if not lines:
        return "it did not say why"
    line = re.sub(r"^\[ALERT\]\s*\(\d+\) : (config : )?", "", lines[0])
    return re.sub(r"\[[^\]]*\.cfg:(\d+)\]", r"line \1", line).strip()

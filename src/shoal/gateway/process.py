"""The HAProxy process: starts it so that it outlives us, finds it again, reloads and stops it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from shoal.gateway.binary import Binary, GatewayError, Presence
from shoal.gateway.quote import Refused
from shoal.gateway.stats import Runtime, RuntimeFailure
from shoal.machine.files import held, lock, write_private

START_TIMEOUT_S = 10.0
RELOAD_TIMEOUT_S = 20.0
ASKED_MAX = 5
ASK_AGAIN_S = 0.2
POLL_S = 0.01
LOG_BYTES_MAX = 64 << 20  # then it becomes the previous file, and one previous file is kept
# The shell exits and leaves the proxy without a parent, so it is the same to the controller that
# started it and to the next. A pipe opened both ways neither blocks nor breaks without a reader.
LAUNCH = '"$@" 1<>access.fifo & echo $! > haproxy.pid'
# The proxy knows nothing of the head's environment, which may hold its passwords.
NOTHING: dict[str, str] = {}
# It runs in its directory and uses only relative paths, so the directory can be moved.
COMMAND = ["-W", "-S", "unix@master.sock,mode,600", "-f", "haproxy.cfg"]


class Proxy:
    """The proxy of one directory. An earlier controller may have started it."""

    def __init__(self, directory: Path, binary: Binary) -> None:
        self.directory = directory
        self.binary = binary
        self.presence = Presence(directory)
        self.runtime = Runtime(directory / "runtime.sock")
        self.master = Runtime(directory / "master.sock")
        self.access_log = directory / "access.log"
        self._config = directory / "haproxy.cfg"
        self._said = directory / "haproxy.log"

    def pid(self) -> int | None:
        """The master's process id, if it is alive and ours."""
        return self.presence.pid()

    def running(self) -> str | None:
        """The digest of the running configuration; None if no proxy runs. The caller stops what is
        left on None, and with it every connection, so a live proxy that is slow to answer is asked
        again."""
        for _ in range(ASKED_MAX):
            if self.pid() is None:
                return None
            try:
                said = self.runtime.info().get("description", "")
            except RuntimeFailure:
                time.sleep(ASK_AGAIN_S)
                continue
            return said.removeprefix("shoal:")
        return None

    def check(self, text: str) -> Path:
        """Write a candidate file and let HAProxy check it."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(Path(__file__).with_name("hold.lua"), self.directory / "hold.lua")
        candidate = self.directory / "candidate.cfg"
        write_private(candidate, text.encode())
        try:
            done = subprocess.run(
                [self.binary.path, "-c", "-f", candidate.name],
                cwd=self.directory,
                env=NOTHING,
                stdin=subprocess.DEVNULL,  # it would ask for the passphrase of a key
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GatewayError(f"cannot run {self.binary.path}: {error}") from None
        if done.returncode:
            raise Refused(f"HAProxy refuses the configuration: {alert(done.stderr)}")
        return candidate

    def start(self, text: str, digest: str) -> None:
        self.presence.stop(grace_s=0)
        self.check(text).replace(self._config)
        before = self._said.stat().st_size if self._said.exists() else 0
        pipe = self.directory / "access.fifo"
        if not pipe.exists():
            os.mkfifo(pipe, 0o600)
        self.access_log.touch(0o600)
        self._launch()
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.running() != digest or not self._master_answers():
            if self.pid() is None or time.monotonic() > deadline:
                self.presence.stop(grace_s=0)
                with self._said.open("rb") as file:
                    file.seek(before)
                    text = file.read().decode(errors="replace")
                raise GatewayError(f"HAProxy did not start: {alert(text)}")
            time.sleep(POLL_S)

    def _launch(self) -> None:
        lock_handle = lock(self.presence.lock)
        if lock_handle is None:
            raise GatewayError(f"another process holds {self.presence.lock}")
        try:
            with self._said.open("ab") as said:
                subprocess.run(
                    ["/bin/sh", "-c", LAUNCH, "sh", str(self.binary.path), *COMMAND],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    start_new_session=True,
                    cwd=self.directory,
                    env=NOTHING,
                    pass_fds=[lock_handle],
                    check=True,
                )
        finally:
            os.close(lock_handle)

    def keep_log(self) -> None:
        """Start the log writer, unless one runs."""
        if held(self.directory / "access.lock") or self.pid() is None:
            return
        words = [str(Path(__file__).with_name("logwriter.py")), str(LOG_BYTES_MAX)]
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-I", "-S", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=self.directory,
            check=True,
        )

    def reload(self, text: str, digest: str) -> None:
        """The old worker finishes its open connections. The new worker takes new ones on the same
        listening sockets."""
        candidate = self.check(text)
        before = self._config.read_bytes()
        candidate.replace(self._config)
        answer = self.master.ask("reload")
        if "Success=0" in answer:  # reported since 2.7; the old worker keeps running
            write_private(self._config, before)
            raise GatewayError(f"HAProxy refuses the configuration: {alert(answer)}")
        deadline = time.monotonic() + RELOAD_TIMEOUT_S
        while self.running() != digest or not self._master_answers():
            if time.monotonic() > deadline:
                raise GatewayError(f"HAProxy did not take the new configuration; see {self._said}")
            time.sleep(POLL_S)

    def _master_answers(self) -> bool:
        """A master restarts itself when its worker is ready, and does not answer meanwhile."""
        try:
            return bool(self.master.ask("show proc"))
        except RuntimeFailure:
            return False

    def ports(self) -> set[tuple[str, int]]:
        """Where the running configuration listens."""
        if not self._config.exists():
            return set()
        found = re.findall(r"^ +bind (\S+):(\d+)", self._config.read_text(), re.MULTILINE)
        return {(address.strip("[]"), int(port)) for address, port in found}


def alert(text: str) -> str:
    """The line of HAProxy's messages that says what is wrong."""
    lines = [line for line in text.splitlines() if "[ALERT]" in line] or text.splitlines()[-1:]
    if not lines:
        return "it did not say why"
    line = re.sub(r"^\[ALERT\]\s*\(\d+\) : (config : )?", "", lines[0])
    return re.sub(r"\[[^\]]*\.cfg:(\d+)\]", r"line \1", line).strip()

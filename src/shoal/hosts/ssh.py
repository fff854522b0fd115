"""Runs scripts on other hosts with the system's `ssh` and the user's own keys and settings."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from shoal.hosts.spec import HostSpec

CONNECT_S = 10
SSH_FAILED = 255
WORDS_MAX = 300
OPTIONS = (
    "BatchMode=yes",  # there is no terminal to type a password
    f"ConnectTimeout={CONNECT_S}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=4",
    "ControlMaster=auto",  # one connection for all scripts on a host
    "ControlPersist=60",
    "LogLevel=ERROR",
)
# What ssh prints, and what a user can do about it.
MEANINGS = {
    "Permission denied": "ssh is refused ({said}); is your key in the agent (ssh-add -l) and in "
    "the host's authorized_keys, and the user right?",
    "Host key verification failed": "its host key is not known here; connect once by hand to check "
    "it: ssh {target}",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key has changed; if that is expected, "
    "remove the old one: ssh-keygen -R {host}",
    "Could not resolve hostname": "no such name: {host}; use its address, or add it to "
    "~/.ssh/config",
    "Connection refused": "it answers, but not to ssh; is sshd running on that port?",
    "timed out": "it does not answer; is it on, and is the address right?",
    "No route to host": "it does not answer; is it on, and is the address right?",
}


class RemoteError(Exception):
    """A script failed; one line that a user can act on."""


class Ssh:
    """Connections that stay open between scripts, until `close`."""

    def __init__(self) -> None:
        if shutil.which("ssh") is None:
            raise RemoteError("ssh is not installed on this machine; install openssh-client")
        self._directory = Path(tempfile.mkdtemp(prefix="shoal-ssh-"))
        self._used: dict[str, HostSpec] = {}

    def run(
        self,
        spec: HostSpec,
        script: str,
        *arguments: str,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> str:
        """Returns the script's output. Its arguments are $1, $2, ..."""
        self._used[spec.target] = spec
        remote = shlex.join(["sh", "-c", script, "sh", *arguments])
        # The connection that stays open keeps stderr open: a pipe would never end.
        with tempfile.TemporaryFile() as said:
            try:
                done = subprocess.run(
                    [*self._argv(spec), remote],
                    input=stdin,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    timeout=timeout_s,
                )
            except subprocess.TimeoutExpired:
                raise RemoteError(f"it was not done within {timeout_s:.0f} s") from None
            said.seek(0)
            words = said.read().decode(errors="replace")
        if done.returncode == SSH_FAILED:
            raise RemoteError(_meaning(spec, words))
        if done.returncode != 0:
            raise RemoteError(_last_line(words) or f"it ended with code {done.returncode}")
        return done.stdout.decode(errors="replace")

    def close(self) -> None:
        for spec in self._used.values():
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [*self._argv(spec, "-O", "exit")],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=CONNECT_S,
                )
        shutil.rmtree(self._directory, ignore_errors=True)

    def _argv(self, spec: HostSpec, *more: str) -> list[str]:
        argv = ["ssh", "-o", f"ControlPath={self._directory}/%C"]
        for option in OPTIONS:
            argv += ["-o", option]
        if spec.port is not None:
            argv += ["-p", str(spec.port)]
        if spec.user is not None:
            argv += ["-l", spec.user]
        return [*argv, *more, spec.host]


def _meaning(spec: HostSpec, words: str) -> str:
    said = _last_line(words)
    for sign, meaning in MEANINGS.items():
        if sign in words:
            return meaning.format(said=said, target=spec.target, host=spec.host)
    return f"ssh: {said}" if said else "ssh could not connect and gave no reason"


def _last_line(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:WORDS_MAX] if lines else ""

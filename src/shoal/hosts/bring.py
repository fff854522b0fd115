"""Brings hosts over ssh to the state that the file asks for, many at a time; a failure affects one
host."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import shlex
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from shoal import extensions
from shoal.hosts.spec import Act, Facts, HostSpec, Outcome, Receipt, Software, Unfit, plan

AT_ONCE_MAX = 16
INSTALL_S = 1_200.0  # a host's connection to a registry may be slow
JOIN_S = 180.0
LEAVE_S = 1_800.0  # its jobs move elsewhere first
VERIFY_S = 120.0
VERIFY_PAUSE_S = 0.5

Tell = Callable[[str, str], None]  # (node, action)


class Head(Protocol):
    """The cluster that the hosts join."""

    url: str
    token: str

    def state(self, node: str) -> str:
        """The node's health in the cluster; empty if there is no node of this name."""


class Task(NamedTuple):
    """What all hosts have in common."""

    head: Head
    software: Software
    python: str  # the version that is preferred on hosts, because functions are sent there
    wheel: Wheel
    tell: Tell


def bring(
    task: Task, wanted: Sequence[HostSpec], unwanted: Sequence[HostSpec], ssh: Ssh
) -> list[Outcome]:
    """One outcome for each host, in the order of the file, then the hosts that leave."""

    def join(spec: HostSpec) -> Outcome:
        return _guarded(task, spec, lambda begun: _bring_one(task, spec, ssh, begun))

    def leave(spec: HostSpec) -> Outcome:
        return _guarded(task, spec, lambda begun: _dismiss(task, spec, ssh, begun))

    with ThreadPoolExecutor(AT_ONCE_MAX, thread_name_prefix="host") as pool:
        # Hosts that leave go first: another host may take over a name or a machine.
        left = list(pool.map(leave, unwanted))
        return [*pool.map(join, wanted), *left]


def join_words(spec: HostSpec, url: str) -> tuple[str, ...]:
    """The arguments of `shoal` on the host; the token is sent through stdin."""
    words = ["join", url, "--name", spec.node]
    if spec.place is not None:
        words += ["--place", spec.place]
    if spec.gpus is not None:
        words += ["--gpus", str(spec.gpus)]
    for name, value in sorted(spec.labels.items()):
        words += ["--label", f"{name}={value}"]
    return tuple(words)


def _guarded(task: Task, spec: HostSpec, act: Callable[[list[Act]], str]) -> Outcome:
    """`act` returns the state, and records what it has begun."""
    begun: list[Act] = []
    why = ""
    try:
        state = act(begun)
    except (RemoteError, Unfit) as error:
        state, why = "failed", str(error)
    task.tell(spec.node, f"{state}: {why}" if why else state)
    return Outcome(host=spec.target, node=spec.node, state=state, did=tuple(begun), why=why)


def _bring_one(task: Task, spec: HostSpec, ssh: Ssh, begun: list[Act]) -> str:
    task.tell(spec.node, "connecting")
    software = task.software
    facts = look(ssh, spec, task.python)
    digest = "" if spec.python else task.wheel.digest
    wanted = Receipt(
        msgspec.structs.replace(software, digest=digest), join_words(spec, task.head.url)
    )
    in_cluster = task.head.state(spec.node) not in ("", "lost")
    acts = plan(spec, wanted, facts, in_cluster=in_cluster)
    for act in acts:
        begun.append(act)
        match act:
            case Act.LEAVE:
                task.tell(spec.node, "leaving: its jobs move elsewhere first")
                run_shoal(ssh, spec, "leave", timeout_s=LEAVE_S)
            case Act.INSTALL:
                task.tell(spec.node, f"installing Shoal {software.shoal}")
                install(ssh, spec, facts, task.wheel)
            case Act.JOIN:
                task.tell(spec.node, "joining")
                run_shoal(ssh, spec, *wanted.join, token=task.head.token, timeout_s=JOIN_S)
    if not acts:
        return "unchanged"
    task.tell(spec.node, "waiting until the node is ready")
    _verify(task.head, spec)
    ssh.run(spec, NOTE, stdin=msgspec.json.encode(wanted))
    return "joined"


def _dismiss(task: Task, spec: HostSpec, ssh: Ssh, begun: list[Act]) -> str:
    task.tell(spec.node, "leaving: it is no longer in the file")
    begun.append(Act.LEAVE)
    run_shoal(ssh, spec, "leave", timeout_s=LEAVE_S)
    ssh.run(spec, FORGET)
    return "left"


def look(ssh: Ssh, spec: HostSpec, python: str) -> Facts:
    return read_facts(ssh.run(spec, LOOK, python, spec.python or ""))


def install(ssh: Ssh, spec: HostSpec, facts: Facts, wheel: Wheel) -> None:
    ssh.run(spec, INSTALL, facts.python, wheel.name, stdin=wheel.data, timeout_s=INSTALL_S)


def run_shoal(ssh: Ssh, spec: HostSpec, *words: str, token: str = "", timeout_s: float) -> str:
    """Shoal's own command, with the host's interpreter."""
    given = spec.python or ""
    return ssh.run(spec, SHOAL, given, *words, stdin=f"{token}\n".encode(), timeout_s=timeout_s)


def _verify(head: Head, spec: HostSpec) -> None:
    deadline = time.monotonic() + VERIFY_S
    while head.state(spec.node) != "ready":
        if time.monotonic() > deadline:
            raise RemoteError(
                f"it joined, but is not ready after {VERIFY_S:.0f} s; see `shoal nodes` and the "
                "node's log there"
            )
        time.sleep(VERIFY_PAUSE_S)


# The shell scripts that run on a host, and the parsing of their output.


HOME = 'home="${SHOAL_HOME:-$HOME/.shoal}"\n'

# $1: the preferred Python version, $2: the interpreter from the hosts file, or empty.
LOOK = (
    HOME
    + r"""
echo "home $home"
version='import sys; print("%d.%d" % sys.version_info[:2])'
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
installed='from importlib.metadata import version; print("shoal", version("shoal"))'
case "$2" in "~/"*) given="$HOME/${2#??}" ;; *) given="$2" ;; esac
names="python$1 python3 python3.14 python3.13 python3.12 python3.11 /usr/local/bin/python3"
for python in ${given:-$names $HOME/.local/bin/python$1}; do
    found=$("$python" -c "$version" 2>/dev/null) || continue
    if [ -n "$given" ] || "$python" -c "$new_enough"; then
        echo "python $(command -v "$python")"
        echo "version $found"
        break
    fi
    echo "found $found ($python)"
done
"${given:-$home/venv/bin/python}" -c "$installed" 2>/dev/null
parent="$home"
while [ ! -d "$parent" ]; do parent=$(dirname "$parent"); done
echo "free_kb $(df -Pk "$parent" | awk 'END { print $4 }')"
for link in "$home"/nodes/*/link.json; do
    [ ! -e "$link" ] || echo "node $(basename "$(dirname "$link")")"
done
[ ! -r "$home/host.json" ] || echo "receipt $(cat "$home/host.json")"
"""
)

# $1: the interpreter, $2: the wheel's name. The wheel is on stdin.
INSTALL = (
    HOME
    + r"""
set -e
umask 077
mkdir -p "$home"
wheel="$home/$2"
cat >"$wheel"
receipt="$home/host.json"
[ ! -e "$receipt" ] || mv "$receipt" "$receipt.before"
venv="$home/venv"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "$1" -m venv "$venv" >"$home/install.log" 2>&1 || {
        rm -rf "$venv"
        echo "it cannot make a virtual environment: install the venv module of $1 there" \
            "(Debian: apt install python3-venv)" >&2
        exit 1
    }
fi
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }
{
    # Not removed first: if pip fails, the node still has what it runs.
    before=$("$venv/bin/python" -c "import shoal; print(shoal.__version__)" 2>/dev/null) || before=
    # pip does not replace another build of the same version.
    pip install "$wheel" && case "$2" in
        "shoal-$before-"*) pip install --force-reinstall --no-deps "$wheel" ;;
    esac
} >"$home/install.log" 2>&1 || {
    echo "pip failed there: $(grep -i error "$home/install.log" | tail -n 1)" \
        "(all of it is in $home/install.log)" >&2
    [ ! -e "$receipt.before" ] || mv "$receipt.before" "$receipt"
    exit 1
}
rm -f "$wheel" "$receipt.before"
"""
)

# The receipt is on stdin.
NOTE = (
    HOME + 'set -e\numask 077\ncat >"$home/.host.json"\nmv "$home/.host.json" "$home/host.json"\n'
)
FORGET = HOME + 'rm -f "$home/host.json"\n'

# $1: the interpreter, or empty for the environment's; then the arguments of shoal. The token is on
# stdin, because other users can read command lines.
SHOAL = (
    HOME
    + r"""
python="${1:-$home/venv/bin/python}"
case "$python" in "~/"*) python="$HOME/${python#??}" ;; esac
shift
IFS= read -r SHOAL_JOIN_TOKEN && export SHOAL_JOIN_TOKEN
exec "$python" -m shoal.main "$@"
"""
)


def read_facts(text: str) -> Facts:
    told: dict[str, str] = {}
    others: list[str] = []
    nodes: list[str] = []
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "found":
            others.append(value)
        elif name == "node":
            nodes.append(value)
        else:
            told[name] = value
    return Facts(
        home=told.get("home", ""),
        python=told.get("python", ""),
        version=told.get("version", ""),
        found=", ".join(others),
        shoal=told.get("shoal", ""),
        free_mb=int(told.get("free_kb") or 0) // 1024,
        nodes=tuple(nodes),
        receipt=_receipt(told.get("receipt", "")),
    )


def _receipt(text: str) -> Receipt | None:
    """A receipt that cannot be read counts as none: everything is done again."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=Receipt)
    return None


# Builds a wheel of the running Shoal, however it was installed, so that hosts get the same.


# The same files always make the same bytes, so that the digest identifies the content.
THEN = (1980, 1, 1, 0, 0, 0)
LEFT_OUT = ("__pycache__",)


class Wheel(NamedTuple):
    name: str
    data: bytes
    digest: str


def build_wheel(version: str) -> Wheel:
    info = f"shoal-{version}.dist-info"
    files = dict(_package())
    files[f"{info}/METADATA"] = _metadata(version)
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/entry_points.txt"] = _entry_points()
    record = "".join(f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    data = _pack(files)
    return Wheel(f"shoal-{version}-py3-none-any.whl", data, hashlib.sha256(data).hexdigest())


def _package() -> list[tuple[str, bytes]]:
    root = Path(__file__).parent.parent
    return [
        (f"shoal/{path.relative_to(root)}", path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part in LEFT_OUT for part in path.parts)
    ]


def _metadata(version: str) -> bytes:
    """With dependencies and extras. An editable install's metadata may be of an older version."""
    told = metadata.metadata("shoal")
    kept = [
        f"{name}: {value}"
        for name in ("Requires-Python", "Requires-Dist", "Provides-Extra")
        for value in told.get_all(name) or ()
    ]
    return "\n".join(
        ["Metadata-Version: 2.1", "Name: shoal", f"Version: {version}", *kept, ""]
    ).encode()


def _entry_points() -> bytes:
    """The command, and the extensions that are ours."""
    text = ""
    for group in ("console_scripts", *extensions.GROUPS):
        found = metadata.entry_points(group=group)
        ours = [entry for entry in found if entry.module.startswith("shoal.")]
        text += f"[{group}]\n" + "".join(f"{entry.name} = {entry.value}\n" for entry in ours)
    return text.encode()


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _pack(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, THEN)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return packed.getvalue()


# Runs scripts on other hosts with the system's `ssh` and the user's own keys and settings.


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

"""This machine's nodes that dial in to a head: started, waited for, and ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.forms.failure import Failure
from shoal.machine.files import AGENT_LOCK, CONTACT, LEAVING, LINK_FILE, LINK_PROBLEM, STARTER_LOCK

if TYPE_CHECKING:
    from shoal.control.home import ClusterConfig, Home


Notify = Callable[[str], None]

JOIN_TIMEOUT_S = 120.0
TOLD_TIMEOUT_S = 2.5  # an agent looks once a second whether it should leave
REPORT_TIMEOUT_S = 30.0  # for a starter to report the end of its agent
POLL_S = 0.1


def here(home: Home) -> list[Path]:
    """The folders of nodes of this machine that dial a head, and run."""
    from shoal.machine.files import held

    if not home.nodes.is_dir():
        return []
    return [
        folder
        for folder in sorted(home.nodes.iterdir())
        if (folder / LINK_FILE).exists()
        and (held(folder / STARTER_LOCK) or held(folder / AGENT_LOCK))
    ]


def name_before(home: Home, url: str) -> str:
    """The name that this machine had in that cluster; empty if it had none, or several."""
    from shoal.engines.linked.joining import head_of

    folders = home.nodes.iterdir() if home.nodes.is_dir() else ()
    names = [folder.name for folder in folders if head_of(folder) == url]
    return names[0] if len(names) == 1 else ""


def start(folder: Path, *more: str) -> None:
    """In the background; a node whose starter runs is left as it is, unless `more` says it."""
    command = [sys.executable, "-m", "shoal.agent.starter", str(folder), *more]
    subprocess.run(command, stdin=subprocess.DEVNULL, cwd="/", check=True)


def become_starter(folder: Path) -> None:
    """This process goes on as the node's starter, and ends with the node."""
    os.execv(
        sys.executable,
        [sys.executable, "-m", "shoal.agent.starter", str(folder), "--foreground"],
    )


def wait_for_contact(folder: Path, begun_ns: int, progress: Notify) -> None:
    """Until the head has spoken to the agent. Failure, with the reason, if it does not."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    contact = folder / CONTACT
    while time.monotonic() < deadline:
        if contact.exists() and contact.stat().st_mtime_ns >= begun_ns:
            return
        if refused(folder) and (folder / LINK_PROBLEM).stat().st_mtime_ns >= begun_ns:
            break  # waiting does not help
        progress(_problem(folder) or "waiting for the head")
        time.sleep(POLL_S)
    reason = _problem(folder) or f"see {folder / 'agent.log'}"
    raise Failure(f"{folder.name} could not be linked to the head: {reason}")


def refused(folder: Path) -> bool:
    """The head no longer accepts the node's key."""
    return "join again" in _problem(folder)


def _problem(folder: Path) -> str:
    try:
        return (folder / LINK_PROBLEM).read_text().strip()
    except OSError:
        return ""


def replace(folder: Path, progress: Notify) -> str:
    """Replace its starter and its agent by those of this version, if nothing runs there; returns
    what runs there. A starter that a service manager started stays: it starts the new agent."""
    from shoal.control.lifecycle import end_agent
    from shoal.control.upgrading import IDLE_S
    from shoal.model.resources import plural

    deadline = time.monotonic() + IDLE_S
    while (members := _members(folder)) and time.monotonic() < deadline:
        progress(f"waiting for {plural(members, 'member')} of jobs")
        time.sleep(POLL_S)
    if members:
        return plural(members, "member") + " of jobs"
    progress(f"replacing the agent of {folder.name}")
    if not _supervised(folder):
        _take_over(folder)
    end_agent(folder)
    wait_for_contact(folder, time.time_ns(), progress)
    return ""


def _take_over(folder: Path) -> None:
    before = _starter(folder)
    start(folder, "--take-over")
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while _starter(folder) in (0, before):
        if time.monotonic() > deadline:
            raise Failure(f"{folder.name} has no new starter; see {folder / 'starter.log'}")
        time.sleep(POLL_S)


def _supervised(folder: Path) -> bool:
    try:
        words = Path(f"/proc/{_starter(folder)}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"--foreground" in words


def _starter(folder: Path) -> int:
    """Its process; 0 if none runs."""
    from shoal.machine.files import held

    try:
        return int((folder / STARTER_LOCK).read_text()) if held(folder / STARTER_LOCK) else 0
    except (OSError, ValueError):
        return 0


def leave(folder: Path, timeout_s: float, progress: Notify) -> int:
    """Ask to leave, wait, and stop what is left; returns the number of members stopped."""
    from shoal.control.lifecycle import end_node
    from shoal.machine.files import held, write_private
    from shoal.model.resources import plural

    write_private(folder / LEAVING, b"")
    begun, members = time.monotonic(), 0
    while held(folder / AGENT_LOCK):
        members = _members(folder)
        if time.monotonic() - begun > max(timeout_s, TOLD_TIMEOUT_S):
            progress("stopping the remaining jobs")
            break
        progress(f"waiting for {plural(members, 'member')} of jobs" if members else "leaving")
        time.sleep(POLL_S)
    else:
        members = 0
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while held(folder / STARTER_LOCK) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    end_node(folder)
    for name in (LINK_FILE, LEAVING, LINK_PROBLEM):
        (folder / name).unlink(missing_ok=True)
    return members


def _members(folder: Path) -> int:
    try:
        return sum(1 for _ in (folder / "members").iterdir())
    except OSError:
        return 0


# The nodes of a head's own machine, in a cluster with several heads: they dial in like those of
# other machines, so that they belong to whichever head leads.


PATIENCE_S = 60.0  # until a head leads


def starter(home: Home, config: ClusterConfig) -> Callable[[str], None]:
    """Starts them when the controller is there: it gets the controller's URL."""

    def start(url: str) -> None:
        if config.database:
            _start(home, config, url)

    return start


def _start(home: Home, config: ClusterConfig, url: str) -> None:
    import msgspec

    from shoal.client import Client
    from shoal.control.reach import machine_address
    from shoal.engines.agentlink import write_spec
    from shoal.engines.linked.joining import prepare
    from shoal.machine.files import LINK_FILE
    from shoal.model.node import JOINED

    address, token = machine_address(config.host), ""
    for one in config.nodes:
        spec = msgspec.structs.replace(one, origin=JOINED, address=address)
        folder = home.node(spec.id)
        if (folder / LINK_FILE).exists() and not refused(folder):
            write_spec(folder, spec)
            _show_heads(home, folder / LINK_FILE)
        else:
            if not token:
                with Client.at_home(home.path, patience_s=PATIENCE_S) as client:
                    token = client.join_token()
            prepare(home.path, url, token, spec, PATIENCE_S)
        start(folder)


def _show_heads(home: Home, file: Path) -> None:
    """The node may know only heads that do not lead any more."""
    import msgspec

    from shoal.client import Client
    from shoal.link.wire import LinkFile
    from shoal.machine.files import write_private

    with Client.at_home(home.path, patience_s=PATIENCE_S) as client:
        urls = tuple(head.url for head in client.heads())
    link = msgspec.json.decode(file.read_bytes(), type=LinkFile)
    if urls and urls != link.heads:
        write_private(file, msgspec.json.encode(msgspec.structs.replace(link, heads=urls)))

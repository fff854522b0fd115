"""`shoal demo`: a small cluster starts, loses a node, recovers, and is removed again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shoal.cli.command import verb

if TYPE_CHECKING:
    from shoal.cli.demo.result import DemoResult
    from shoal.cli.demo.screen import Screen
    from shoal.cli.demo.state import DemoState
    from shoal.client import Client
    from shoal.control.home import Home
    from shoal.model.events import Recorded

# On an idle machine the jobs take half of this.
LIMIT_S = 55.0
KILL_AFTER_S = 4.0
FRAME_S = 0.12
SURVIVORS_S = 3.0  # a killed process takes a moment to disappear

NEXT = (
    "try next:",
    "  shoal up --nodes 4 --gpus 8          start a cluster of your own",
    "  shoal run -n 2 -g 8 -- COMMAND...    run a gang of two members with 8 GPUs each",
    "  shoal status                         see the cluster on one screen",
    "  shoal page                           see it live in a browser",
)


@verb(home=False, on_head=True)
def demo(json: bool) -> int:
    """Watch a small cluster lose a node and recover, in half a minute.

    Four virtual nodes with 8 GPUs each start in a temporary folder, separate
    from any cluster of yours. They get two dozen jobs, each a real process: a
    training run, a map, gangs, and a service under load. One node is killed,
    and its jobs run again on other nodes. A link shows the same in a browser.
    At the end everything is stopped and removed. The exit code is 0 if
    everything went as promised, else 1.

    Examples:
      shoal demo
      shoal demo | cat            plain lines
      shoal demo --json | jq .promises
    """
    from shoal.cli.demo.result import result_of
    from shoal.cli.demo.screen import choose
    from shoal.cli.demo.state import DemoState
    from shoal.cli.screen import show
    from shoal.forms.failure import REFUSED

    state, begun = DemoState(), time.monotonic()
    try:
        with choose(state, quiet=json, terminal=show.at_terminal()) as screen, _ends_cleanly():
            submitted, left_behind = _play(state, screen)
    except KeyboardInterrupt:
        show.note("interrupted; everything was stopped and removed")
        raise
    result = result_of(state, submitted, int((time.monotonic() - begun) * 1000), left_behind)
    if json:
        show.as_json(result)
    else:
        _print_summary(result)
    return 0 if result.kept else REFUSED


def _play(state: DemoState, screen: Screen) -> tuple[int, str]:
    """Run the demo; returns the number of jobs, and what could not be removed."""
    import shutil
    import tempfile

    from shoal.control.home import Home

    folder = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    home = Home(folder / "home")
    submitted = 0
    try:
        submitted = _perform(state, screen, home)
    finally:
        with _uninterrupted():
            screen.caption("stopping everything")
            left_behind = _clear(home)
            shutil.rmtree(folder, ignore_errors=True)
    return submitted, left_behind or (f"{folder} is still there" if folder.exists() else "")


def _perform(state: DemoState, screen: Screen, home: Home) -> int:
    from shoal.cli.demo import plan as demo_plan
    from shoal.client import Client
    from shoal.control.home import ClusterConfig
    from shoal.control.lifecycle import bring_up
    from shoal.forms.request import carried

    shape = f"{demo_plan.NODES} virtual nodes with {demo_plan.GPUS} GPUs each"
    screen.caption(f"starting {shape}")
    # If torch is installed a node may keep it warm, and torch creates a folder of its own.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(home.path / "torch")
    bring_up(home, ClusterConfig(nodes=demo_plan.nodes(), port=0), lambda _: None)
    with Client.at_home(home.path) as client:
        screen.page(client.page_link())
        env, workdir = carried(os.environ), str(home.path.parent)
        specs = demo_plan.jobs(env, workdir)
        if _can_serve():
            served = client.submit_service(demo_plan.service(env, workdir))
            specs.append(demo_plan.asker(served.url, env, workdir))
        screen.caption(f"submitting {len(specs)} jobs to {shape}")
        for spec in specs:
            client.submit(spec)
        screen.caption(
            f"{len(specs)} jobs submitted; a node will be killed in {KILL_AFTER_S:.0f} s"
        )
        _watch(client, state, screen, home, len(specs))
    return len(specs)


def _can_serve() -> bool:
    """Without a load balancer the demo has no service."""
    from shoal.gateway.binary import GatewayError, find_binary

    try:
        find_binary()
    except GatewayError:
        return False
    return True


def _watch(client: Client, state: DemoState, screen: Screen, home: Home, submitted: int) -> None:
    begun, seen = time.monotonic(), 0
    while time.monotonic() - begun < LIMIT_S:
        view = client.events(after=seen, wait_s=FRAME_S)
        seen = view.next_after
        _take(state, screen, view.events)
        if not state.killed_node and time.monotonic() - begun > KILL_AFTER_S:
            _kill_node(state, screen, home)
        if state.all_finished(submitted) and (state.back_ms is not None or not state.killed_node):
            return
        screen.refresh()


def _take(state: DemoState, screen: Screen, records: list[Recorded]) -> None:
    was_back = state.back_ms is not None
    for record in records:
        state.take(record.event)
        screen.happened(record.event)
    if state.back_ms is not None and not was_back:
        screen.caption(f"{state.killed_node} is back; the remaining jobs run")


def _kill_node(state: DemoState, screen: Screen, home: Home) -> None:
    """Kill the node's agent with SIGKILL, without any warning."""
    import msgspec

    victim = state.victim()
    pid = int(msgspec.json.decode((home.node(victim) / "agent.json").read_bytes())["pid"])
    state.kill(victim, int(time.time() * 1000))
    os.kill(pid, signal.SIGKILL)
    screen.caption(f"{victim} was killed (SIGKILL); its jobs must run again on other nodes")


def _clear(home: Home) -> str:
    """Stop everything; returns what could not be stopped."""
    from shoal.control.lifecycle import LifecycleError, take_down

    try:
        take_down(home, lambda _: None)
    except LifecycleError as error:
        return str(error)
    deadline = time.monotonic() + SURVIVORS_S
    while (left := _survivors(home.path.parent)) and time.monotonic() < deadline:
        time.sleep(FRAME_S)
    return f"processes are still running: {', '.join(map(str, left))}" if left else ""


def _survivors(folder: Path) -> list[int]:
    """Processes that were started for this folder, or inside it."""
    import psutil

    mark, found = str(folder), []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if any(mark in word for word in words) or (process.info["cwd"] or "").startswith(mark):
            found.append(process.pid)
    return found


def _print_summary(result: DemoResult) -> None:
    from shoal.cli.demo.result import numbers, promises
    from shoal.cli.screen.show import line

    for text in numbers(result):
        line(text, "bold")
    for text, kept in promises(result):
        line(text, "green" if kept else "red bold")
    line("")
    for text in NEXT:
        line(text)


@contextlib.contextmanager
def _ends_cleanly() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal as an interrupt, so that the cleanup still runs."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C during the cleanup would leave processes behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

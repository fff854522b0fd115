"""`shoal demo`: a small cluster starts, loses a node, recovers, and is removed again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from shoal.cli.command import flag, verb

if TYPE_CHECKING:
    from shoal.cli.demo.plan import DemoResult, Loss
    from shoal.cli.demo.screen import Screen
    from shoal.cli.demo.state import DemoState, Sights
    from shoal.cli.screen.paint import Keys
    from shoal.client import Client
    from shoal.control.home import Home
    from shoal.core.state.events.log import Recorded
    from shoal.model.views import ServiceView

# On an idle machine the jobs take half of this. A busy one, or somebody who kills nodes, gets more
# for as long as something happens.
LIMIT_S = 55.0
QUIET_S = 40.0
LONGEST_S = 300.0
KILL_AFTER_S = 4.0
SAVED_STEP = 20  # the training run loses its node when it has saved this one ...
KILL_BY_S = 15.0  # ... or, from this time on, any step
FRAME_S = 0.12
READY_S = 30.0  # the service usually takes two
FOLDER_CHARACTERS_MAX = 45
SURVIVORS_S = 3.0  # a killed process takes a moment to disappear

NEXT = (
    "try next:",
    "  shoal up --nodes 4 --gpus 8          start a cluster of your own",
    "  shoal run -n 2 -g 8 -- COMMAND...    run a gang: two members, 8 GPUs each",
    "  shoal status                         see the cluster on one screen",
    "  shoal page                           see it live in a browser",
)


@verb(
    flag("--keep", help="Leave the cluster up at the end, with its page."), home=False, on_head=True
)
def demo(keep: bool, json: bool) -> int:
    """Watch a small cluster lose a node and recover, in 30 s.

    Four virtual nodes with 8 GPUs each start in a temporary folder, separate
    from any cluster of yours. They get two dozen jobs, each a real process: a
    training run, a map, gangs, and a service under load. The node under the
    training run is killed; the run continues from its checkpoint, and no request
    fails. Press 1 to 4 to kill a node yourself. A link shows the same in a
    browser. At the end you see what was lost, and everything is stopped and
    removed. The exit code is 0 if everything went as promised, else 1.

    Examples:
      shoal demo
      shoal demo --keep           look around afterwards
      shoal demo | cat            plain lines
      shoal demo --json | jq .promises
    """
    from shoal.cli.demo.plan import result_of
    from shoal.cli.demo.screen import choose
    from shoal.cli.demo.state import DemoState, Sights
    from shoal.cli.screen import show
    from shoal.forms.failure import REFUSED

    state, sights, begun = DemoState(), Sights(), time.monotonic()
    try:
        screen = choose(state, sights, quiet=json, terminal=show.at_terminal())
        with screen, _ends_cleanly():
            played = _play(state, sights, screen, keep)
    except KeyboardInterrupt:
        show.note("interrupted; everything was stopped and removed")
        raise
    took_ms = int((time.monotonic() - begun) * 1000)
    result = result_of(
        state, played.submitted, took_ms, played.left_behind, sights, played.loss, played.kept
    )
    if json:
        show.as_json(result)
    else:
        _print_summary(result)
    return 0 if result.kept else REFUSED


class Played(NamedTuple):
    """`left_behind`: what could not be removed; `kept`: the home of the cluster that is up."""

    submitted: int
    loss: Loss | None
    left_behind: str = ""
    kept: str = ""


def _play(state: DemoState, sights: Sights, screen: Screen, keep: bool) -> Played:
    import shutil
    import tempfile

    from shoal.control.home import Home

    # The gateway's sockets need a short path, which the user's own folder may not be.
    short = len(tempfile.gettempdir()) <= FOLDER_CHARACTERS_MAX
    folder = Path(tempfile.mkdtemp(prefix="shoal-demo-", dir=None if short else "/tmp"))
    home = Home(folder / "home")
    played = Played(0, None)
    over = False
    with _typed() as keys:
        try:
            played = _perform(state, sights, screen, home, keys)
            over = True
        finally:
            if not (keep and over):
                with _uninterrupted():
                    screen.caption("stopping everything")
                    left_behind = _clear(home)
                    shutil.rmtree(folder, ignore_errors=True)
    if keep:
        return played._replace(kept=str(home.path))
    return played._replace(
        left_behind=left_behind or (f"{folder} is still there" if folder.exists() else "")
    )


@contextlib.contextmanager
def _typed() -> Iterator[Keys]:
    """From the first moment to the last: what is typed is not echoed into the picture, and what
    nobody read is not left to the shell."""
    from shoal.cli.screen.paint import Keys

    with Keys() as keys:
        try:
            yield keys
        finally:
            keys.forget()


def _perform(state: DemoState, sights: Sights, screen: Screen, home: Home, keys: Keys) -> Played:
    from shoal.cli.demo import plan as demo_plan
    from shoal.cli.demo.plan import loss_of
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
        served = None
        if _can_serve():
            served = client.submit_service(demo_plan.service(env, workdir))
        submitted = len(specs) + (served is not None)
        screen.caption(f"submitting {submitted} jobs to {shape}")
        for spec in specs:
            job = client.submit(spec).id
            if spec.name == demo_plan.TRAIN:
                sights.training.job = job
        if served is not None:
            url = _ready(client, served.name, screen).url
            sights.serving.job = client.submit(demo_plan.asker(url, env, workdir)).id
        screen.caption(f"{submitted} jobs submitted; the training run will soon lose a node")
        keys.forget()  # typed before there was a node to kill
        _watch(client, state, sights, screen, home, keys, submitted)
        return Played(submitted, loss_of(client.ledger()))


def _ready(client: Client, service: str, screen: Screen) -> ServiceView:
    """As soon as its clients may begin. If it does not get ready, they will count failures."""
    until = time.monotonic() + READY_S
    while (view := client.service(service)).state != "ready" and time.monotonic() < until:
        screen.refresh()
        time.sleep(FRAME_S)
    return view


def _can_serve() -> bool:
    """Without a load balancer the demo has no service."""
    from shoal.gateway.binary import GatewayError, find_binary

    try:
        find_binary()
    except GatewayError:
        return False
    return True


def _watch(
    client: Client,
    state: DemoState,
    sights: Sights,
    screen: Screen,
    home: Home,
    keys: Keys,
    submitted: int,
) -> None:
    begun, seen = time.monotonic(), 0
    until = begun + LIMIT_S
    while time.monotonic() < until:
        view = client.events(after=seen, wait_s=FRAME_S)
        seen = view.next_after
        _take(state, sights, screen, view.events)
        sights.look(client, time.monotonic())
        key = keys.wait(0)
        if key:
            keys.forget()  # a key that is held down would kill the node again when it is back
        victim = _chosen(state, screen, key) or _due(state, sights, begun)
        if victim:
            _kill_node(victim, state, screen, home)
        if victim or view.events:
            until = min(begun + LONGEST_S, max(until, time.monotonic() + QUIET_S))
        if state.all_finished(submitted) and state.all_back:
            return
        screen.refresh()


def _due(state: DemoState, sights: Sights, begun: float) -> str:
    """The node that the demo kills by itself, unless somebody has already made the training run go
    on from a checkpoint. While a node is away it kills no other: the run that lost a member is
    still being stopped, and a service with a replica on each would lose both."""
    since_s = time.monotonic() - begun
    saved = sights.training.saved
    ready = since_s > KILL_AFTER_S and saved >= (SAVED_STEP if since_s < KILL_BY_S else 1)
    if not ready or not state.all_back or any(sights.training.resumed.values()):
        return ""
    victim = state.victim(sights.training.job)
    return victim if state.may_kill(victim) else ""


def _chosen(state: DemoState, screen: Screen, key: str) -> str:
    """The node whose number was pressed."""
    names = sorted(state.nodes)
    if not key.isdecimal() or not 1 <= int(key) <= len(names):
        return ""
    node = names[int(key) - 1]
    if state.may_kill(node):
        return node
    screen.caption(f"{node} is not ready: it cannot be killed now")
    return ""


def _take(state: DemoState, sights: Sights, screen: Screen, records: list[Recorded]) -> None:
    away = not state.all_back
    for record in records:
        state.take(record.event)
        sights.training.take(record.event)
        screen.happened(record.event)
    if away and state.all_back:
        screen.caption(f"{state.kills[-1].node} is back; the remaining jobs run")


def _kill_node(victim: str, state: DemoState, screen: Screen, home: Home) -> None:
    """Kill the node's agent with SIGKILL, without any warning."""
    import msgspec

    pid = int(msgspec.json.decode((home.node(victim) / "agent.json").read_bytes())["pid"])
    state.kill(victim, int(time.time() * 1000))
    with contextlib.suppress(ProcessLookupError):  # it is being started again
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
    from shoal.cli.demo.plan import numbers, promises
    from shoal.cli.screen.show import line

    for text in numbers(result):
        line(text, "bold")
    for text, kept in promises(result):
        line(text, "green" if kept else "red bold")
    line("")
    if not result.kept_home:
        for text in NEXT:
            line(text)
        return
    line("the cluster is still up:")
    folder = Path(result.kept_home).parent
    for words, what in (
        (f"shoal page --home {result.kept_home}", "its page"),
        (f"shoal top --home {result.kept_home}", "the same in this terminal"),
        (f"shoal down --home {result.kept_home}", f"stop it; then remove {folder}"),
    ):
        line(f"  {words}    {what}")


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

"""One member of this node: a record with an explicit state machine, from its launch to its end."""

from __future__ import annotations

import asyncio
import enum
import os
import time
from collections.abc import Iterable

from shoal.agent.starter import GRACE
from shoal.model.commands import Launch
from shoal.model.job import Fault, MemberRef
from shoal.model.progress import Beat, spent_of
from shoal.model.report import MemberExit

# On `shoal down` members get this long after SIGTERM, whatever they asked for.
SHUTDOWN_GRACE_S = 5.0


def grace_s(launches: Iterable[Launch]) -> float:
    """A machine that leaves gives its members their own grace time, within a bound."""
    most = float(os.environ.get(GRACE, "0"))
    wanted = [launch.stop_grace_ms / 1000 for launch in launches]
    return max(SHUTDOWN_GRACE_S, min(most, max(wanted, default=0.0)))


class State(enum.Enum):
    """Where a member is in its life on this node."""

    LAUNCHED = "launched"  # the command to start it has been taken
    PREPARING = "preparing"  # its package or environment is not here yet
    RUNNING = "running"  # it has a process
    DOZING = "dozing"  # it is being put to sleep
    ASLEEP = "asleep"  # none of its processes runs
    WAKING = "waking"  # it is being woken
    DUMPING = "dumping"  # it is to stop; its stacks are saved first
    STOPPING = "stopping"  # it got SIGTERM; SIGKILL follows after the grace time
    ENDED = "ended"  # its exit is known, but not reported: output is on the way, or the disk slow
    REPORTED = "reported"  # its exit is in every report until the controller acknowledges it
    LEFTOVER = "leftover"  # only output is left, of this life or an earlier one


NAPPING = (State.DOZING, State.ASLEEP, State.WAKING)
LIVING = (State.RUNNING, *NAPPING, State.DUMPING, State.STOPPING)  # it has a process

# Each edge and what causes it. Any other change is a bug, and raises.
EDGES = {
    (State.LAUNCHED, State.PREPARING): "something it needs has to be fetched or built",
    (State.LAUNCHED, State.RUNNING): "its process has started",
    (State.LAUNCHED, State.ENDED): "it cannot start",
    (State.PREPARING, State.RUNNING): "it has all it needs, and its process has started",
    (State.PREPARING, State.ENDED): "it cannot start, or is stopped before it does",
    (State.RUNNING, State.DUMPING): "it is to stop, and to say first what it was doing",
    (State.RUNNING, State.STOPPING): "it is to stop",
    (State.RUNNING, State.ENDED): "its process has ended",
    (State.RUNNING, State.DOZING): "it is to sleep",
    (State.DOZING, State.ASLEEP): "all its processes are stopped",
    (State.DOZING, State.RUNNING): "it could not be put to sleep",
    (State.ASLEEP, State.WAKING): "it is to wake",
    (State.WAKING, State.RUNNING): "its processes go on",
    (State.WAKING, State.ASLEEP): "its GPUs have no room for it",
    **{(state, State.STOPPING): "it is to stop" for state in NAPPING},
    **{(state, State.ENDED): "its process has ended" for state in NAPPING},
    (State.DUMPING, State.STOPPING): "its stacks are saved",
    (State.DUMPING, State.ENDED): "its process ended while its stacks were being saved",
    (State.STOPPING, State.ENDED): "its process has ended",
    (State.ENDED, State.REPORTED): "its output has arrived, or took too long",
    (State.REPORTED, State.LEFTOVER): "its exit is acknowledged, but output is still to be shipped",
}


class Member:
    """`task` prepares it, puts it to sleep, wakes it or saves its stacks; `kill` is the timer for
    SIGKILL; `why` says what it was doing when it was stopped, or why it was killed, and `fault`
    whether its node is to blame; `exit` is None until its process has ended."""

    __slots__ = (
        "alone",
        "ended_at",
        "exit",
        "fault",
        "kill",
        "ref",
        "state",
        "task",
        "unwritten",
        "user",
        "why",
    )

    def __init__(self, ref: MemberRef, state: State = State.LAUNCHED) -> None:
        self.ref = ref
        self.state = state
        self.task: asyncio.Task[None] | None = None
        self.kill: asyncio.TimerHandle | None = None
        self.why = ""
        self.fault = Fault.NONE
        self.exit: MemberExit | None = None
        self.ended_at = 0.0
        self.unwritten = False  # its exit is on the way to the disk
        self.user = 0  # of a tenant that is kept apart
        self.alone = False  # nobody has a file of it open: its folders can be another's

    def become(self, state: State) -> None:
        if (self.state, state) not in EDGES:
            raise AssertionError(f"{self.ref} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def end(
        self, code: int, why: str, beat: Beat | None, fault: Fault, *, stopped: bool
    ) -> MemberExit:
        """The process is over, or never was. What was under way for it is called off."""
        self.become(State.ENDED)
        if self.kill is not None:
            self.kill.cancel()
        step, spent, saved = None, None, 0
        if beat is not None:
            step, spent, saved = beat.step, spent_of(beat), beat.saved_step
        self.exit = MemberExit(self.ref, code, why, stopped, step, fault, spent, saved)
        self.ended_at = time.monotonic()
        return self.exit

"""Events as sentences: one per event."""

from __future__ import annotations

import shlex
from typing import assert_never

from shoal.cli.screen.after_words import AfterHappening, about_after
from shoal.cli.screen.array_words import about_array
from shoal.cli.screen.identity_words import about_identity
from shoal.cli.screen.notice_words import about_annotation, about_rule
from shoal.cli.screen.order_words import about_order
from shoal.cli.screen.show import printable
from shoal.cli.screen.sleep_words import SleepHappening, about_sleep
from shoal.forms.units import duration_text, shortened
from shoal.model.events import (
    ArrayEvent,
    BudgetEvent,
    BudgetFreed,
    BudgetHeld,
    BudgetWarned,
    ClockJumped,
    ClusterRestored,
    ControllerStarted,
    Event,
    FabricMeasured,
    IdentityEvent,
    JobAdopted,
    JobCheckpointed,
    JobClaimed,
    JobEvent,
    JobFinished,
    JobIdled,
    JobLabelled,
    JobNoted,
    JobPlaced,
    JobPromoted,
    JobRequeued,
    JobReserved,
    JobRunning,
    JobStopping,
    JobSubmitted,
    JobUnclaimed,
    JobUsed,
    JobWaited,
    MemberExited,
    MemberLost,
    MembersStarted,
    NodeChecked,
    NodeEnding,
    NodeEvent,
    NodeIntended,
    NodeJoined,
    NodeJudged,
    NodeLabelled,
    NodeLost,
    NodeReady,
    NodeSilent,
    OrderEvent,
    PolicyChanged,
    ReplicaDraining,
    ReplicaReady,
    RuleEvent,
    ServiceEvent,
    ServiceScaled,
    ServiceSet,
    ServiceStopped,
    ServiceStopping,
)
from shoal.model.health import Standing
from shoal.model.job import JobSpec, Outcome, StopCause
from shoal.model.moments import moment_text
from shoal.model.node import NodeIntent
from shoal.model.resources import Slice, plural
from shoal.model.service import Scale
from shoal.model.views import ProgressView

NODES_NAMED_MAX = 6
COMMAND_CHARACTERS_MAX = 60

INTENT_WORDS = {
    NodeIntent.OPEN: "is open for jobs again",
    NodeIntent.CORDONED: "is cordoned: nothing new starts on it",
    NodeIntent.DRAINING: "is being drained: its jobs move to other nodes",
    NodeIntent.REMOVED: "was removed from the cluster",
}
OUTCOME_WORDS = {
    Outcome.SUCCEEDED: "succeeded",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "was cancelled",
    Outcome.TIMED_OUT: "ran out of time",
}
STATE_WORDS = {
    "succeeded": "has succeeded",
    "failed": "has failed",
    "cancelled": "was cancelled",
    "timed-out": "ran out of time",
}
CAUSE_WORDS = {
    StopCause.CANCEL: "cancelled",
    StopCause.TIME_LIMIT: "time limit reached",
    StopCause.FAILURE: "failed",
    StopCause.NODE_LOSS: "node lost",
    StopCause.DRAIN: "its node is being drained",
    StopCause.PREEMPT: "another job needs the room",
    StopCause.RESIZE: "its size changes",
    StopCause.MOVE: "it moves to other nodes",
    StopCause.HANG: "it hangs",
    StopCause.BUDGET: "its budget is used up",
    StopCause.IDLE: "its GPUs are not used",
}
STANDING_WORDS = {
    Standing.OK: "is healthy",
    Standing.SUSPECT: "is suspected to be slow or faulty",
    Standing.QUARANTINED: "is in quarantine",
}


def sentence(event: Event) -> str:
    """One printable line without a full stop, whatever the names contain."""
    if isinstance(event, AfterHappening):
        text = about_after(event)
    elif isinstance(event, JobLabelled | JobNoted | JobWaited):
        text = f"{event.job} {about_annotation(event)}"
    elif isinstance(event, SleepHappening):
        text = f"{event.job} {about_sleep(event)}"
    elif isinstance(event, ArrayEvent):
        text = f"{event.job} {about_array(event)}"
    elif isinstance(event, JobEvent):
        text = f"{event.job} {_about_job(event)}"
    elif isinstance(event, ServiceEvent):
        text = f"service {event.service} {_about_service(event)}"
    elif isinstance(event, NodeEvent):
        text = f"{event.node} {_about_node(event)}"
    elif isinstance(event, BudgetEvent):
        text = f"tenant {event.tenant} {_about_budget(event)}"
    elif isinstance(event, OrderEvent):
        text = f"order {event.order} {about_order(event)}"
    elif isinstance(event, RuleEvent):
        text = about_rule(event)
    elif isinstance(event, IdentityEvent):
        text = about_identity(event)
    else:
        text = _about_cluster(event)
    return printable(text)


def shape_text(spec: JobSpec) -> str:
    """The size of a gang: '2 members with 8 GPUs, 1 CPU each'."""
    each = " each" if spec.members > 1 or spec.elastic else ""
    members = plural(spec.members, "member")
    if spec.elastic:
        members = f"{members_text(spec)} members"
    return f"{members} with {spec.demand}{each}"


def members_text(spec: JobSpec) -> str:
    """As in a job file: '4', or '2..8' for an elastic gang."""
    return f"{spec.members}..{spec.members_max}" if spec.elastic else str(spec.members)


def replicas_text(scale: Scale) -> str:
    """As in a service file: '1 replica', or '1..8 replicas'."""
    if scale.least == scale.most:
        return plural(scale.most, "replica")
    return f"{scale.least}..{scale.most} replicas"


def command_text(command: tuple[str, ...]) -> str:
    return shortened(printable(shlex.join(command)), COMMAND_CHARACTERS_MAX)


def state_text(state: str) -> str:
    """A job's state as the rest of a sentence about it."""
    return STATE_WORDS.get(state, f"is {state}")


def exit_text(code: int) -> str:
    """Shells use codes above 128 for signals."""
    if 128 < code <= 128 + 64:
        return f"exit code {code} (signal {code - 128})"
    return f"exit code {code}"


def progress_text(progress: ProgressView) -> str:
    """'step 120/600, loss 1.9, 4m 0s left; member 2 is slow', as far as known."""
    of = f"/{progress.steps_total}" if progress.steps_total else ""
    words = [f"step {progress.step}{of}"]
    if progress.loss is not None:
        words.append(f"loss {progress.loss:.3g}")
    if progress.left_ms is not None:
        words.append(f"{duration_text(progress.left_ms)} left")
    slow = progress.slow
    if not slow:
        return ", ".join(words)
    who = f"member {slow[0]} is" if len(slow) == 1 else f"{plural(len(slow), 'member')} are"
    return f"{', '.join(words)}; {who} slow"


# fmt: off
JobHappening = (
    JobSubmitted | JobPlaced | JobReserved | JobClaimed | JobUnclaimed | JobPromoted
    | MembersStarted | JobRunning | MemberExited | MemberLost | JobCheckpointed | JobIdled | JobUsed
    | JobStopping | JobRequeued | JobAdopted | JobFinished
)
NodeHappening = (
    NodeJoined | NodeReady | NodeSilent | NodeLost | NodeIntended | NodeEnding | NodeLabelled
    | NodeChecked | NodeJudged
)
# fmt: on


def _about_job(event: JobHappening) -> str:
    match event:
        case JobSubmitted():
            name = f" as '{event.spec.name}'" if event.spec.name else ""
            return (
                f"was submitted{name}: {shape_text(event.spec)}: {command_text(event.spec.command)}"
            )
        case JobPlaced():
            return f"was placed{_try(event.attempt)}: {event.why or _nodes(_on(event.slices))}"
        case JobReserved():
            return _reserved(event)
        case JobClaimed():
            return f"gets room made for it on {_nodes(_on(event.slices))}{_because(event.why)}"
        case JobUnclaimed():
            return f"no longer gets room made for it{_because(event.why)}"
        case JobPromoted():
            return f"now comes first among jobs of its priority{_because(event.why)}"
        case MembersStarted():
            return f"started {_members(event.members)} and waits for the rest{_try(event.attempt)}"
        case JobRunning():
            return f"is running{_try(event.attempt)}"
        case MemberExited():
            end = "finished" if event.code == 0 else f"ended with {exit_text(event.code)}"
            return f"member {event.member} {end} on {event.node}{_because(event.why)}"
        case MemberLost():
            return f"lost member {event.member} on {event.node}{_because(event.why)}"
        case JobCheckpointed():
            return f"saved its work up to step {event.step}"
        case JobIdled():
            return f"is idle{_because(event.why)}"
        case JobUsed():
            return f"is no longer idle{_because(event.why)}"
        case JobStopping():
            return f"is being stopped ({CAUSE_WORDS[event.cause]}){_because(event.why)}"
        case JobRequeued():
            wait_ms = event.not_before_ms - event.at_ms
            later = f" in {wait_ms / 1000:.1f} s" if wait_ms > 0 else ""
            return f"will run again{later} ({CAUSE_WORDS[event.cause]}){_because(event.why)}"
        case JobAdopted():
            return f"continues on {event.node}{_because(event.why)}"
        case JobFinished():
            code = "" if event.outcome is Outcome.SUCCEEDED else f" with {exit_text(event.code)}"
            return f"{OUTCOME_WORDS[event.outcome]}{code}{_because(event.why)}"
        case _:
            assert_never(event)


def _about_node(event: NodeHappening) -> str:
    match event:
        case NodeJoined():
            place = f" at {event.spec.place}" if event.spec.place else ""
            return f"joined{place}{_because(event.why)}"
        case NodeReady():
            return f"is ready{_because(event.why)}"
        case NodeSilent():
            return f"is silent{_because(event.why)}"
        case NodeLost():
            return f"{'died' if event.dead else 'was given up'}{_because(event.why)}"
        case NodeIntended():
            return f"{INTENT_WORDS[event.intent]}{_because(event.why)}"
        case NodeEnding():
            if event.end is not None:
                return event.why
            whose = "of its own" if event.own else "that an operator set"
            return f"has no end {whose}{_because(event.why)}"
        case NodeLabelled():
            return f"was {event.why}" if event.why else "has other labels or taints"
        case NodeChecked():
            return f"{'passed' if event.passed else 'failed'} a check{_because(event.why)}"
        case NodeJudged():
            return f"{STANDING_WORDS[event.record.standing]}{_because(event.why)}"
        case _:
            assert_never(event)


ServiceHappening = (
    ServiceSet | ServiceScaled | ReplicaReady | ReplicaDraining | ServiceStopping | ServiceStopped
)


def _about_service(event: ServiceHappening) -> str:
    match event:
        case ServiceSet():
            verb = "goes back to" if event.back else "starts"
            return f"{verb} version {event.version}{_because(event.why)}"
        case ServiceScaled():
            return f"needs {plural(event.wanted, 'replica')}{_because(event.why)}"
        case ReplicaReady():
            return f"has replica {event.job} ready{_because(event.why)}"
        case ReplicaDraining():
            return f"is draining replica {event.job}{_because(event.why)}"
        case ServiceStopping():
            return f"is being stopped{_because(event.why)}"
        case ServiceStopped():
            return f"stopped{_because(event.why)}"
        case _:
            assert_never(event)


def _about_budget(event: BudgetWarned | BudgetHeld | BudgetFreed) -> str:
    match event:
        case BudgetWarned():
            return f"was warned about its budget{_because(event.why)}"
        case BudgetHeld():
            return f"has used up its budget{_because(event.why)}"
        case BudgetFreed():
            return f"has budget again{_because(event.why)}"
        case _:
            assert_never(event)


def _about_cluster(
    event: ControllerStarted | ClusterRestored | PolicyChanged | ClockJumped | FabricMeasured,
) -> str:
    match event:
        case ClusterRestored():
            return (
                f"the cluster was restored from its backup of {moment_text(event.saved_ms)}: "
                f"what happened later is lost, and new jobs begin at j{event.first_job}"
            )
        case ControllerStarted():
            return (
                f"the controller restarted (start {event.epoch})"
                if event.epoch > 1
                else "the controller started"
            )
        case ClockJumped() | FabricMeasured():
            return event.why
        case PolicyChanged():
            policy = event.policy
            return (
                f"the policy is now '{policy.name}': order {policy.order}, "
                f"placement {policy.placement}, preempt {policy.preempt}"
            )
        case _:
            assert_never(event)


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _try(attempt: int) -> str:
    return f" (attempt {attempt})" if attempt > 1 else ""


def _members(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"member {numbers[0]}"
    named = ", ".join(str(number) for number in numbers[:NODES_NAMED_MAX])
    more = f" and {len(numbers) - NODES_NAMED_MAX} more" if len(numbers) > NODES_NAMED_MAX else ""
    return f"members {named}{more}"


def _reserved(event: JobReserved) -> str:
    """Without the expected start: that changes, and `shoal why` shows it."""
    if not event.nodes:
        return "is first in the queue"
    return f"has room reserved on {_nodes(event.nodes)} for when the jobs there end"


def _on(slices: tuple[Slice, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slice_.node for slice_ in slices))


def _nodes(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NODES_NAMED_MAX} more" if len(names) > NODES_NAMED_MAX else ""
    return ", ".join(names[:NODES_NAMED_MAX]) + more

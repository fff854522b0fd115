"""Every kind of event declares its sentence, what it is about, and who may see it."""

from __future__ import annotations

import typing

import msgspec
import pytest

from shoal.core.state.events.arrays import (
    ArrayCancelled,
    ArrayFinished,
    ArrayRetried,
    ArraySubmitted,
    TrialJudged,
)
from shoal.core.state.events.base import EventBase
from shoal.core.state.events.budgets import BudgetFreed, BudgetHeld, BudgetWarned, KeyFreed, KeyHeld
from shoal.core.state.events.cluster import (
    ClockJumped,
    ClusterRestored,
    ControllerStarted,
    PolicyChanged,
)
from shoal.core.state.events.identity import (
    ApiKeyAdded,
    ApiKeyRevoked,
    IdentityEvent,
    KeyRemoved,
    KeySet,
    SignInEnded,
    TenantAdded,
    TenantRemoved,
    TokenRemoved,
    TokenSet,
    UserRemoved,
    UserSet,
)
from shoal.core.state.events.log import KINDS, QUIET, Event, Recorded, published
from shoal.core.state.events.neighbors import (
    JobGivenUp,
    JobHanded,
    JobLeaseAsked,
    JobReturned,
    JobRunsAway,
    JobSettled,
    JobTaken,
    JobWithdrawn,
)
from shoal.core.state.events.nodes import (
    FabricMeasured,
    NodeChecked,
    NodeEnding,
    NodeIntended,
    NodeJoined,
    NodeJudged,
    NodeLabelled,
    NodeLost,
    NodeReady,
    NodeSilent,
)
from shoal.core.state.events.notices import RuleRemoved, RuleSet
from shoal.core.state.events.queue import (
    JobClaimed,
    JobLabelled,
    JobLeased,
    JobNoted,
    JobPromoted,
    JobReleased,
    JobReserved,
    JobSubmitted,
    JobUnclaimed,
    JobUnreserved,
    JobWaited,
)
from shoal.core.state.events.runs import (
    JobAdopted,
    JobBegan,
    JobCheckpointed,
    JobFinished,
    JobIdled,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobStopping,
    JobUnsaved,
    JobUsed,
    MemberExited,
    MemberLost,
    MembersStarted,
)
from shoal.core.state.events.schedules import (
    ScheduleMissed,
    SchedulePaused,
    ScheduleRan,
    ScheduleRemoved,
    ScheduleResumed,
    ScheduleSet,
    ScheduleSkipped,
)
from shoal.core.state.events.services import (
    ReplicaDraining,
    ReplicaReady,
    ServiceScaled,
    ServiceSet,
    ServiceStopped,
    ServiceStopping,
    SiteAsked,
    SiteEnded,
    SiteHeard,
    SitesTold,
)
from shoal.core.state.events.sleep import (
    JobAsleep,
    JobAwake,
    JobDozing,
    JobTouched,
    JobWaking,
    MembersAsleep,
    MembersAwake,
    SleepRefused,
    WakeRefused,
)
from shoal.core.state.events.supply import NodesOrdered, OrderChanged, OrderEnded, OrderUnused
from shoal.model.fabric import Fabric
from shoal.model.far import Far
from shoal.model.health import CheckResult, Record, Standing, Suspicion
from shoal.model.identity import ApiKey, NodeKey, Role, TenantRecord, Token, User
from shoal.model.job import Job, JobSpec, Outcome, SleepCause, StopCause
from shoal.model.node import End, NodeIntent, NodeSpec
from shoal.model.notice import Rule
from shoal.model.phrases import exit_text
from shoal.model.policy import Policy
from shoal.model.resources import Slice
from shoal.model.schedule import ScheduleSpec
from shoal.model.service import ServiceSpec
from shoal.model.supply import OrderPhase, Supply
from shoal.model.sweep import IndexRange, Sweep
from shoal.model.workflow import WorkflowJob

SPEC = JobSpec(command=("python", "train.py"), name="big", members=2, gpus=8)
CHAT = ServiceSpec(name="chat", replica=JobSpec(command=("serve",)))
GPU = Supply(name="gpu", engine="slurm", gpus=8, most=2, lot=2)
NODE = NodeSpec(id="n1", cpu_milli=4000, memory_mb=1024, gpus=8, place="b1/r1")

TOKEN = Token(id="0a1b2c3d", user="bob", tenant="lab", role=Role.MEMBER, hash="0" * 64)
KEY = NodeKey(id="0a1b2c3d", hash="0" * 64, node="n1")
API_KEY = ApiKey(id="0a1b2c3d4e5f", hash="0" * 64, tenant="lab", services=("chat",), user="bob")
HOUR = 3_600_000
NIGHTLY = ScheduleSpec(
    name="nightly",
    cron="0 3 * * *",
    timezone="Europe/Berlin",
    jobs=(WorkflowJob("nightly", JobSpec(command=("true",), tenant="lab")),),
)
FAR = Far(site="south", address="192.0.2.1", port=9080, certificate="")

SENTENCES: list[tuple[Event, str]] = [
    (
        JobSubmitted(at_ms=0, job="j1", spec=SPEC),
        "j1 was submitted as 'big': 2 members with 8 GPUs, 1 CPU each: python train.py",
    ),
    (
        JobPlaced(at_ms=0, job="j1", attempt=1, slices=(Slice("n1"),), master="m", why="it fits"),
        "j1 was placed: it fits",
    ),
    (
        JobPlaced(
            at_ms=0,
            job="j1",
            attempt=2,
            slices=(Slice("n1"), Slice("n2"), Slice("n1")),
            master="m",
            why="",
        ),
        "j1 was placed (attempt 2): n1, n2",
    ),
    (
        JobSubmitted(at_ms=0, job="j1", spec=JobSpec(command=("x",), members=2, members_max=8)),
        "j1 was submitted: 2..8 members with 1 CPU each: x",
    ),
    (
        JobReserved(at_ms=0, job="j1", start_ms=9000, nodes=("n1",), why="expected to start"),
        "j1 has room reserved on n1 for when the jobs there end",
    ),
    (
        JobReserved(at_ms=1000, job="j1", start_ms=61_000, nodes=("n1", "n2"), why=""),
        "j1 has room reserved on n1, n2 for when the jobs there end",
    ),
    (
        JobReserved(at_ms=1000, job="j1", start_ms=None, nodes=("n1",), why=""),
        "j1 has room reserved on n1 for when the jobs there end",
    ),
    (
        JobReserved(at_ms=1000, job="j1", start_ms=1000, nodes=("n1",), why=""),
        "j1 has room reserved on n1 for when the jobs there end",
    ),
    (
        JobClaimed(at_ms=0, job="j1", slices=(Slice("n1"), Slice("n1")), why="j2 is stopped"),
        "j1 is having room made on n1: j2 is stopped",
    ),
    (
        JobUnreserved(at_ms=0, job="j1", why="lab holds 2 of at most 2 GPUs"),
        "j1 no longer has room reserved: lab holds 2 of at most 2 GPUs",
    ),
    (
        JobUnclaimed(at_ms=0, job="j1", why="n1 is lost"),
        "j1 no longer has room being made: n1 is lost",
    ),
    (
        JobDozing(
            at_ms=0,
            job="j7",
            attempt=1,
            cause=SleepCause.USER,
            host_mb=(0,),
            why="put to sleep by ann",
        ),
        "j7 is being put to sleep by ann",
    ),
    (
        JobDozing(
            at_ms=0, job="j7", attempt=1, cause=SleepCause.PREEMPT, host_mb=(0,), why="makes room"
        ),
        "j7 is being put to sleep: makes room",
    ),
    (
        MembersAsleep(at_ms=0, job="j7", attempt=1, members=(0, 2), host_mb=(0, 0)),
        "j7 has 2 members asleep",
    ),
    (
        JobAsleep(at_ms=0, job="j7", attempt=1, took_ms=2_600, memory_mb=4096, why=""),
        "j7 is asleep and holds no GPU, after 2.6s, 4096 MB of GPU memory per member",
    ),
    (
        JobAsleep(at_ms=0, job="j7", attempt=1, took_ms=0, memory_mb=0, why=""),
        "j7 is asleep and holds no GPU",
    ),
    (
        WakeRefused(
            at_ms=0,
            job="j7",
            attempt=1,
            member=0,
            node="n1",
            again_ms=60_000,
            why="stays asleep, because there is no room for it on n1: GPU 0 has 1 MB free",
        ),
        "j7 stays asleep, because there is no room for it on n1: GPU 0 has 1 MB free",
    ),
    (
        SleepRefused(at_ms=0, job="j7", attempt=1, member=1, node="n1", why="no memory"),
        "j7 goes on: no memory",
    ),
    (
        JobTouched(at_ms=0, job="j7", attempt=1, why="is waking because ann ran it"),
        "j7 is waking because ann ran it",
    ),
    (
        JobTouched(at_ms=0, job="j7", attempt=1, why="put to sleep by ann", wants=False),
        "j7 stays asleep: put to sleep by ann",
    ),
    (
        JobWaking(at_ms=0, job="j7", attempt=1, gpus=((1,),), why="is woken after 1m"),
        "j7 is woken after 1m",
    ),
    (
        MembersAwake(at_ms=0, job="j7", attempt=1, members=(0,)),
        "j7 has 1 member awake",
    ),
    (
        JobAwake(at_ms=0, job="j7", attempt=1, took_ms=1_200, why="goes on after 1m of sleep"),
        "j7 goes on after 1m of sleep (waking took 1.2s)",
    ),
    (
        JobStopping(at_ms=0, job="j1", attempt=1, cause=StopCause.PREEMPT, why="j2 goes first"),
        "j1 is being stopped (another job needs the room): j2 goes first",
    ),
    (
        JobLeased(at_ms=0, job="j1", until_ms=1_795_050_000_000, who="ann"),
        "j1 has a lease until 2026-11-19 01:00 UTC by ann",
    ),
    (
        JobGivenUp(at_ms=0, job="j1", attempt=2, neighbor="west", why="its lease is over"),
        "j1 was given up at west: its lease is over",
    ),
    (
        JobRequeued(
            at_ms=0, job="j1", attempt=1, cause=StopCause.RESIZE, not_before_ms=0, why="to 4"
        ),
        "j1 will run again (its size changes): to 4",
    ),
    (
        JobBegan(at_ms=9, job="j1", attempt=1, members=(2,), startup_ms=36_000, by="output"),
        "j1 began to work after 36s, when it wrote its first line (member 2)",
    ),
    (
        JobUnsaved(at_ms=9, job="j1", attempt=1, failed=1),
        "j1 could not save its work once, and runs on; its output says why",
    ),
    (
        JobUnsaved(at_ms=9, job="j1", attempt=1, failed=3),
        "j1 could not save its work 3 times in a row, and runs on; its output says why",
    ),
    (
        JobIdled(at_ms=9, job="j1", attempt=1, since_ms=1, why="has used nothing for 8 s"),
        "j1 is idle: has used nothing for 8 s",
    ),
    (
        JobUsed(at_ms=9, job="j1", attempt=1, why="it uses its GPUs again"),
        "j1 is no longer idle: it uses its GPUs again",
    ),
    (
        JobLabelled(at_ms=9, job="j1", labels={"run": "a"}, why="run=a, old- by ada"),
        "j1 was labeled run=a, old- by ada",
    ),
    (
        JobNoted(at_ms=9, job="j1", text="lr too high", who="ada"),
        "j1 has a note by ada: lr too high",
    ),
    (JobNoted(at_ms=9, job="j1", text="", who="ada"), "j1 lost its notes by ada"),
    (
        JobWaited(at_ms=9, job="j1", since_ms=0, waited_ms=3_600_000),
        "j1 has been waiting for 1h",
    ),
    (
        RuleSet(
            at_ms=9,
            tenant="lab",
            who="ada",
            rule=Rule(id="r1", owner="ada", tenant="lab", wish="failed=https://u:p@x.org/secret"),
        ),
        "rule r1 for notices was added by ada: failed=https://x.org/...",
    ),
    (
        RuleRemoved(at_ms=9, tenant="lab", rule="r1", who="ada"),
        "rule r1 for notices was removed by ada",
    ),
    (
        BudgetWarned(at_ms=0, tenant="red", why="red has used 8.0 of 10 GPU-hours this month"),
        "tenant red was warned about its budget: red has used 8.0 of 10 GPU-hours this month",
    ),
    (
        BudgetHeld(at_ms=0, tenant="red", why="all of it"),
        "tenant red has used up its budget: all of it",
    ),
    (
        KeyHeld(at_ms=0, key="k1", tenant="red", until_ms=9, why="7 of 5 tokens"),
        "key k1 has used up its tokens: 7 of 5 tokens",
    ),
    (
        KeyFreed(at_ms=0, key="k1", tenant="red", why="its quota is new or larger"),
        "key k1 has tokens again: its quota is new or larger",
    ),
    (
        BudgetFreed(at_ms=0, tenant="red", why="a new month"),
        "tenant red has budget again: a new month",
    ),
    (
        NodesOrdered(at_ms=0, order="o1", supply=GPU, nodes=("gpu-1", "gpu-2"), why="j1 waits"),
        "order o1 asks gpu for 2 nodes: j1 waits",
    ),
    (
        OrderChanged(at_ms=0, order="o1", phase=OrderPhase.PENDING, reason="Resources"),
        "order o1 is pending at its supplier: Resources",
    ),
    (
        OrderChanged(at_ms=0, order="o1", phase=OrderPhase.RUNNING, release="idle for 10 min"),
        "order o1 is being released: idle for 10 min",
    ),
    (
        OrderEnded(at_ms=0, order="o1", supply="gpu", failed=True, why="NODE_FAIL"),
        "order o1 of gpu failed: NODE_FAIL",
    ),
    (OrderUnused(at_ms=5, order="o1", since_ms=5), "order o1 is not used"),
    (OrderUnused(at_ms=5, order="o1", since_ms=None), "order o1 is in use or needed again"),
    (
        PolicyChanged(at_ms=0, policy=Policy(name="mine", order="fifo")),
        "the policy is now 'mine': order fifo, placement shoal, preempt rank",
    ),
    (
        MembersStarted(at_ms=0, job="j1", attempt=1, members=(0,)),
        "j1 started member 0 and waits for the rest",
    ),
    (
        MembersStarted(at_ms=0, job="j1", attempt=3, members=tuple(range(9))),
        "j1 started members 0, 1, 2, 3, 4, 5 and 3 more and waits for the rest (attempt 3)",
    ),
    (JobRunning(at_ms=0, job="j1", attempt=1), "j1 is running"),
    (JobRunning(at_ms=0, job="j1", attempt=2), "j1 is running (attempt 2)"),
    (
        MemberExited(at_ms=0, job="j1", attempt=1, member=3, node="n2", code=0),
        "j1 member 3 finished on n2",
    ),
    (
        MemberExited(at_ms=0, job="j1", attempt=1, member=3, node="n2", code=137, why="killed"),
        "j1 member 3 ended with exit code 137 (signal 9) on n2: killed",
    ),
    (
        MemberLost(at_ms=0, job="j1", attempt=1, member=0, node="n2", why="it vanished"),
        "j1 lost member 0 on n2: it vanished",
    ),
    (
        JobStopping(at_ms=0, job="j1", attempt=1, cause=StopCause.DRAIN, why="n1 is drained"),
        "j1 is being stopped (its node is being drained): n1 is drained",
    ),
    (
        JobRequeued(
            at_ms=1000,
            job="j1",
            attempt=1,
            cause=StopCause.FAILURE,
            not_before_ms=3500,
            why="exit 1",
        ),
        "j1 will run again in 2.5 s (failed): exit 1",
    ),
    (
        JobRequeued(
            at_ms=1000, job="j1", attempt=1, cause=StopCause.NODE_LOSS, not_before_ms=0, why=""
        ),
        "j1 will run again (node lost)",
    ),
    (
        JobAdopted(at_ms=0, job="j1", attempt=1, node="n1", why="it was alive"),
        "j1 continues on n1: it was alive",
    ),
    (
        JobFinished(at_ms=0, job="j1", attempt=1, outcome=Outcome.SUCCEEDED, code=0, why=""),
        "j1 succeeded",
    ),
    (
        JobFinished(at_ms=0, job="j1", attempt=1, outcome=Outcome.TIMED_OUT, code=124, why="late"),
        "j1 ran out of time with exit code 124: late",
    ),
    (
        NodeJoined(at_ms=0, node="n1", spec=NODE, incarnation=1, why="new"),
        "n1 joined at b1/r1: new",
    ),
    (NodeReady(at_ms=0, node="n1", why="clean"), "n1 is ready: clean"),
    (NodeSilent(at_ms=0, node="n1", why="no report for 5 s"), "n1 is silent: no report for 5 s"),
    (NodeLost(at_ms=0, node="n1", incarnation=1, dead=True, why="gone"), "n1 died: gone"),
    (NodeLost(at_ms=0, node="n1", incarnation=1, dead=False, why=""), "n1 was given up"),
    (
        ServiceSet(at_ms=0, service="chat", spec=CHAT, version=2, why="asked for by a user"),
        "service chat starts version 2: asked for by a user",
    ),
    (
        ServiceSet(at_ms=0, service="chat", spec=CHAT, version=1, back=True, why="it failed"),
        "service chat rolls back to version 1: it failed",
    ),
    (
        ServiceScaled(at_ms=0, service="chat", wanted=3, why="busy"),
        "service chat needs 3 replicas: busy",
    ),
    (
        ReplicaReady(at_ms=0, service="chat", job="j7", why="its probe answered"),
        "service chat has replica j7 ready: its probe answered",
    ),
    (
        ReplicaDraining(at_ms=0, service="chat", job="j7", why="version 1 is replaced"),
        "service chat is draining replica j7: version 1 is replaced",
    ),
    (
        ServiceStopping(at_ms=0, service="chat", why="stopped by a user"),
        "service chat is being stopped: stopped by a user",
    ),
    (
        ServiceStopped(at_ms=0, service="chat", why="all its replicas have ended"),
        "service chat stopped: all its replicas have ended",
    ),
    (
        SiteAsked(at_ms=0, service="chat", site="west", version=2),
        "service chat goes to west in version 2",
    ),
    (
        SiteHeard(at_ms=0, service="chat", site="west", has=2, ready=2),
        "service chat is ready at west in version 2",
    ),
    (
        SiteHeard(at_ms=0, service="chat", site="west", has=1, ready=2, why="it exited 3"),
        "service chat is at west in version 1: it exited 3",
    ),
    (
        SiteHeard(at_ms=0, service="chat", site="west", has=0, ready=0),
        "service chat is not at west",
    ),
    (
        SiteEnded(at_ms=0, service="chat", site="west", why="west was declared gone by ada"),
        "service chat has ended at west: west was declared gone by ada",
    ),
    (
        SitesTold(at_ms=0, service="chat", doors=(FAR,)),
        "service chat is called from south",
    ),
    (
        SitesTold(at_ms=0, service="chat", doors=()),
        "service chat is called from no other cluster",
    ),
    (
        JobPromoted(at_ms=0, job="j1", why="is 31.0 h old"),
        "j1 moved to the front of its priority: is 31.0 h old",
    ),
    (
        JobCheckpointed(at_ms=0, job="j1", attempt=1, step=120),
        "j1 saved its work up to step 120",
    ),
    (
        NodeChecked(
            at_ms=0, node="n1", result=CheckResult(id="h1"), passed=False, why="disk is slow"
        ),
        "n1 failed a check: disk is slow",
    ),
    (
        NodeJudged(
            at_ms=0,
            node="n1",
            record=Record(standing=Standing.QUARANTINED),
            why="check failed: disk is slow",
        ),
        "n1 is in quarantine: check failed: disk is slow",
    ),
    (
        NodeIntended(at_ms=0, node="n1", intent=NodeIntent.CORDONED, why="by hand"),
        "n1 is cordoned: nothing new starts on it: by hand",
    ),
    (
        NodeEnding(at_ms=0, node="n1", end=End(9000), own=True, why="ends in 9s (spot notice)"),
        "n1 ends in 9s (spot notice)",
    ),
    (
        NodeEnding(at_ms=0, node="n1", end=None, own=False, why="taken back by ann"),
        "n1 has no end that an operator set: taken back by ann",
    ),
    (
        NodeLabelled(at_ms=0, node="n1", labels={"pool": "a"}, why="labeled pool=a by ann"),
        "n1 was labeled pool=a by ann",
    ),
    (
        JobReleased(at_ms=0, job="j2", by="j1", why="j1 (prepare) succeeded"),
        "j2 no longer waits for j1: j1 (prepare) succeeded",
    ),
    (
        ScheduleSet(at_ms=0, schedule="lab/nightly", spec=NIGHTLY, next_ms=HOUR, why="set by ann"),
        "schedule lab/nightly was set to '0 3 * * *' Europe/Berlin; next at 1970-01-01 01:00 UTC",
    ),
    (
        ScheduleRan(at_ms=0, schedule="default/n", due_ms=HOUR, next_ms=2 * HOUR, job="j7"),
        "schedule n ran as j7, due at 1970-01-01 01:00 UTC",
    ),
    (
        ScheduleMissed(
            at_ms=0, schedule="default/n", count=2, first_ms=0, last_ms=1, next_ms=2, why="down"
        ),
        "schedule n was missed: down",
    ),
    (
        ScheduleSkipped(at_ms=0, schedule="default/n", due_ms=0, next_ms=1, why="j7 runs"),
        "schedule n skipped the run due at 1970-01-01 00:00 UTC: j7 runs",
    ),
    (
        SchedulePaused(at_ms=0, schedule="default/n", why="paused by ann"),
        "schedule n is paused: paused by ann",
    ),
    (
        ScheduleResumed(at_ms=0, schedule="default/n", next_ms=HOUR),
        "schedule n goes on, next at 1970-01-01 01:00 UTC",
    ),
    (ScheduleRemoved(at_ms=0, schedule="default/n"), "schedule n was removed"),
    (
        ClusterRestored(
            at_ms=9 * HOUR,
            saved_ms=3 * HOUR,
            epoch=1010,
            first_job=2501,
            first_attempt=370,
            first_order=1,
        ),
        "the cluster was restored from its backup of 1970-01-01 03:00 UTC: what happened later is "
        "lost, and new jobs begin at j2501",
    ),
    (
        FabricMeasured(at_ms=0, id="t1", nodes=("a", "b"), fabric=Fabric(), why="1 link was slow"),
        "1 link was slow",
    ),
    (ClockJumped(at_ms=0, drift_ms=9000, why="the clock was set"), "the clock was set"),
    (
        TenantAdded(at_ms=0, tenant=TenantRecord(name="lab", uid=61000), who="ann"),
        "tenant lab was added by ann (Unix user 61000)",
    ),
    (TenantRemoved(at_ms=0, tenant="lab", who="ann"), "tenant lab was removed by ann"),
    (
        UserSet(at_ms=0, user=User(name="bob", roles={"lab": Role.MEMBER, "*": Role.VIEWER})),
        "user bob was set: member of lab, viewer of every tenant",
    ),
    (UserRemoved(at_ms=0, user="bob"), "user bob was removed"),
    (TokenSet(at_ms=0, token=TOKEN, who="ann"), "token 0a1b2c3d of bob was set by ann"),
    (TokenRemoved(at_ms=0, token="0a1b2c3d"), "token 0a1b2c3d was removed"),
    (
        SignInEnded(at_ms=0, token="", session="s", until_ms=1, who="operator"),
        "a sign-in of the operator was ended by operator",
    ),
    (
        ApiKeyAdded(at_ms=0, tenant="lab", key=API_KEY, who="ann"),
        "the key 0a1b2c3d4e5f of bob for chat was added by ann",
    ),
    (
        ApiKeyAdded(
            at_ms=0, tenant="lab", key=msgspec.structs.replace(API_KEY, services=()), who="ann"
        ),
        "the key 0a1b2c3d4e5f of bob for all services of lab was added by ann",
    ),
    (
        ApiKeyRevoked(at_ms=0, tenant="lab", key="0a1b2c3d4e5f", why="it has expired"),
        "the key 0a1b2c3d4e5f was revoked: it has expired",
    ),
    (KeySet(at_ms=0, key=KEY, who="ann"), "the key of n1 was set by ann (0a1b2c3d)"),
    (
        KeySet(at_ms=0, key=NodeKey(id="0a1b2c3d", hash="0" * 64)),
        "a join token was set (0a1b2c3d)",
    ),
    (KeyRemoved(at_ms=0, key="0a1b2c3d", why="n1 left"), "key 0a1b2c3d was removed: n1 left"),
    (
        ArraySubmitted(
            at_ms=0,
            job="j7",
            spec=JobSpec(command=("x",), sweep=Sweep(ranges=(IndexRange(0, 99),), at_most=8)),
        ),
        "j7 was submitted: an array of 100 elements, at most 8 at a time",
    ),
    (
        ArrayCancelled(at_ms=0, job="j7", why="cancelled by anna"),
        "j7 is being cancelled: cancelled by anna",
    ),
    (
        ArrayRetried(at_ms=0, job="j7", index=3, why="retried by anna"),
        "j7 goes on: retried by anna (index 3)",
    ),
    (
        TrialJudged(
            at_ms=0,
            job="j7.3",
            attempt=1,
            rung=1,
            at_step=90,
            step=91,
            metric="loss",
            value=2.3114,
            rank=2,
            count=9,
            goes_on=True,
        ),
        "j7.3 reached step 90: loss 2.311 is 2nd of 9; it goes on",
    ),
    (
        TrialJudged(
            at_ms=0,
            job="j7.3",
            attempt=1,
            rung=1,
            at_step=90,
            step=91,
            metric="loss",
            value=None,
            rank=13,
            count=13,
            goes_on=False,
        ),
        "j7.3 reached step 90: loss not a number is 13th of 13; it stops",
    ),
    (
        ArrayFinished(at_ms=0, job="j7", outcome=Outcome.FAILED, code=1, why="2 of 100 failed"),
        "j7 ended, failed: 2 of 100 failed",
    ),
    (
        JobHanded(at_ms=0, job="j1", attempt=2, neighbor="west", why="west would start it at once"),
        "j1 was handed over to west: west would start it at once",
    ),
    (
        JobTaken(at_ms=0, job="j1", attempt=2, neighbor="west", id="j93"),
        "j1 was taken by west, as j93 there",
    ),
    (JobRunsAway(at_ms=0, job="j1", attempt=2, neighbor="west"), "j1 is running at west"),
    (
        JobLeaseAsked(
            at_ms=0, job="j1", attempt=2, neighbor="west", until_there_ms=9, until_here_ms=9
        ),
        "j1 may run on at west",
    ),
    (
        JobWithdrawn(at_ms=0, job="j1", attempt=2, neighbor="west", why="it is late"),
        "j1 is being taken back from west: it is late",
    ),
    (
        JobWithdrawn(
            at_ms=0, job="j1", attempt=2, neighbor="west", why="cancelled by ada", cancelled=True
        ),
        "j1 is being cancelled at west: cancelled by ada",
    ),
    (
        JobReturned(
            at_ms=0, job="j1", attempt=2, neighbor="west", why="it is late", away_after_ms=9
        ),
        "j1 came back from west: it is late",
    ),
    (
        JobSettled(at_ms=0, job="j1", attempt=2, neighbor="west", gpu_ms=5_400_000, money=3),
        "j1 has ended at west after 1.50 GPU-hours",
    ),
    (ControllerStarted(at_ms=0, epoch=1), "the controller started"),
    (ControllerStarted(at_ms=0, epoch=4), "the controller restarted (start 4)"),
]


@pytest.mark.parametrize(("event", "text"), SENTENCES)
def test_an_event_reads_as_a_sentence(event: Event, text: str) -> None:
    assert event.sentence() == text


def test_every_kind_of_event_has_a_sentence_that_is_shown_here() -> None:
    assert {type(event) for event, _ in SENTENCES} == set(KINDS) == set(typing.get_args(Event))


class Stranger:
    """Somebody who sees nothing but what belongs to everybody."""

    admin = sees_all = False

    def sees_job(self, job: str) -> bool:
        return False

    def sees_tenant(self, tenant: str, at_ms: int) -> bool:
        return False

    def sees_service(self, service: str, at_ms: int) -> bool:
        return False

    def policy(self, policy: Policy) -> Policy:
        return Policy(name="as far as you may see")

    def text(self, text: str) -> str:
        return text and "(a reason)"


class Viewer(Stranger):
    """Somebody who sees every tenant and changes nothing."""

    sees_all = True

    def sees_job(self, job: str) -> bool:
        return True

    def sees_tenant(self, tenant: str, at_ms: int) -> bool:
        return True

    def sees_service(self, service: str, at_ms: int) -> bool:
        return True

    def text(self, text: str) -> str:
        return text


FOR_ALL = {
    *(NodeJoined, NodeReady, NodeSilent, NodeLost, NodeIntended, NodeEnding, NodeLabelled),
    *(NodeChecked, FabricMeasured, ClockJumped, PolicyChanged, ControllerStarted, ClusterRestored),
}


@pytest.mark.parametrize("event", [event for event, _ in SENTENCES])
def test_a_stranger_sees_only_the_cluster_and_nobody_elses_reasons(event: Event) -> None:
    shown = event.shown_to(Stranger())
    assert (shown is not None) == (type(event) in FOR_ALL)
    if shown is not None:
        assert getattr(shown, "why", "") in ("", "(a reason)")


@pytest.mark.parametrize("event", [event for event, _ in SENTENCES])
def test_a_viewer_of_all_tenants_sees_all_but_who_may_do_what(event: Event) -> None:
    assert event.shown_to(Viewer()) == (None if isinstance(event, IdentityEvent) else event)


@pytest.mark.parametrize(("event", "text"), SENTENCES)
def test_a_sentence_begins_with_its_subject(event: Event, text: str) -> None:
    assert event.subject
    if not isinstance(event, FabricMeasured | ClockJumped):  # their reason is the sentence
        assert text.startswith(f"{event.subject} ")


def test_frequent_events_are_named_in_the_order_of_stored_indexes() -> None:
    """A database uses an index only for a condition in the very words that it was made with."""
    assert QUIET == (
        "JobSubmitted",
        "JobReserved",
        "MembersStarted",
        "MemberExited",
        "JobCheckpointed",
    )


def test_every_kind_of_event_has_an_effect() -> None:
    assert [kind for kind in KINDS if kind.apply is EventBase.apply] == []


SECRET = JobSpec(
    command=("x",), env={"SHOAL_TASKS_SECRET": "s3cret"}, notify=("https://u:s3cret@x.org/s3cret",)
)
SECRETS: list[Event] = [
    JobSubmitted(at_ms=0, job="j1", spec=SECRET),
    ArraySubmitted(at_ms=0, job="j1", spec=SECRET),
    ArrayRetried(at_ms=0, job="j1", index=None, why="", record=Job(id="j1", number=1, spec=SECRET)),
    ServiceSet(at_ms=0, service="chat", version=1, spec=ServiceSpec(name="chat", replica=SECRET)),
    ScheduleSet(
        at_ms=0,
        schedule="lab/n",
        next_ms=1,
        spec=ScheduleSpec(name="n", cron="0 3 * * *", jobs=(WorkflowJob("n", SECRET),)),
    ),
    RuleSet(
        at_ms=0,
        tenant="lab",
        rule=Rule(id="r1", owner="ada", tenant="lab", wish="failed=https://x.org/s3cret"),
    ),
    TokenSet(at_ms=0, token=msgspec.structs.replace(TOKEN, hash="s3cret")),
    KeySet(at_ms=0, key=msgspec.structs.replace(KEY, hash="s3cret")),
]


@pytest.mark.parametrize("event", SECRETS, ids=lambda event: type(event).__name__)
def test_what_is_published_holds_no_secret(event: Event) -> None:
    assert b"s3cret" in msgspec.json.encode(event)
    (shown,) = published([Recorded(7, event)])
    assert b"s3cret" not in msgspec.json.encode(shown)
    assert shown.text == event.sentence()


def test_a_judgment_shows_a_tenant_only_what_its_own_jobs_led_to() -> None:
    own = Suspicion(at_ms=1, why="j1 was slow", job="j1")
    others = Suspicion(at_ms=2, why="j2 was slow", job="j2")
    record = Record(standing=Standing.SUSPECT, why="j2 was slow", suspicions=(own, others))
    event = NodeJudged(at_ms=3, node="n1", record=record, why="j2 was slow")

    class Owner(Stranger):
        def sees_job(self, job: str) -> bool:
            return job == "j1"

        def text(self, text: str) -> str:
            return text

    shown = event.shown_to(Owner())
    assert shown is not None
    assert (shown.record.suspicions, shown.why, shown.record.why) == ((own,), "", "")


@pytest.mark.parametrize("cause", StopCause)
def test_every_cause_has_its_words(cause: StopCause) -> None:
    event = JobStopping(at_ms=0, job="j1", attempt=1, cause=cause, why="")
    assert event.sentence().startswith("j1 is being stopped (")


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_its_words(outcome: Outcome) -> None:
    event = JobFinished(at_ms=0, job="j1", attempt=1, outcome=outcome, code=0, why="")
    assert event.sentence().startswith("j1 ")


@pytest.mark.parametrize("intent", NodeIntent)
def test_every_intent_has_its_words(intent: NodeIntent) -> None:
    assert (
        NodeIntended(at_ms=0, node="n1", intent=intent).sentence().startswith(("n1 is ", "n1 was "))
    )


def test_a_hostile_command_stays_on_one_line() -> None:
    spec = JobSpec(command=("echo", "a\nb\x1b[2J" + "x" * 10_000))
    text = JobSubmitted(at_ms=0, job="j1", spec=spec).sentence()
    assert text.isprintable()
    assert len(text) < 200


def test_exit_codes_beyond_128_name_the_signal() -> None:
    assert exit_text(1) == "exit code 1"
    assert exit_text(143) == "exit code 143 (signal 15)"
    assert exit_text(255) == "exit code 255"

"""The truth about sleep: who really sleeps, against what the log says and the policy allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeEnding
from shoal.core.state.events.runs import (
    JobAdopted,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobStopping,
)
from shoal.core.state.events.sleep import (
    JobAsleep,
    JobAwake,
    JobDozing,
    JobTouched,
    JobWaking,
    MembersAsleep,
    SleepRefused,
    WakeRefused,
)
from shoal.model.job import MemberRef, SleepCause
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy, Sleeping
from shoal.model.report import Request, WakeJob
from storm.jobtruth import JobTruth, must_fit
from storm.lives import Lives, Untruth
from storm.timeline import Timeline
from storm.witness import NapWitness


class Sleep:
    """One sleep of a job, as the log has it. `host_mb`: promised to each member."""

    __slots__ = ("asleep", "host_mb", "waking", "wants")

    def __init__(self, event: JobDozing) -> None:
        self.host_mb = list(event.host_mb)
        self.wants = event.cause in (SleepCause.PREEMPT, SleepCause.TURN)
        self.asleep = False
        self.waking = False


class SleepTruth(NapWitness):
    """By the records of the nodes: no GPU has two that are awake, no memory is promised twice, and
    a member goes on exactly where it stood still."""

    def __init__(
        self,
        timeline: Timeline,
        policy: Policy,
        lives: Lives,
        jobs: Mapping[str, JobTruth],
        specs: Mapping[str, NodeSpec],
    ) -> None:
        self._timeline = timeline
        self._policy = policy
        self._lives = lives
        self._jobs = jobs
        self._specs = specs  # as the nodes are
        self.known = specs  # as the log knows them
        self._sleeps: dict[str, Sleep] = {}
        self._awake_ms: dict[str, int] = {}  # since when the job is awake
        self._ending: set[str] = set()  # nodes of which an end was known
        self._woken: set[str] = set()  # jobs that have slept in this attempt
        self._touched: set[str] = set()  # jobs that somebody wanted to wake

    # -- what happens on the nodes ---------------------------------------------------------

    def froze(self, ref: MemberRef) -> None:
        life = self._lives.all[ref]
        if life.still_ms is not None:
            raise Untruth(f"{ref} stands still already")
        life.still_ms = self._timeline.now_ms

    def fell_asleep(self, ref: MemberRef, memory_mb: int) -> None:
        life = self._lives.all[ref]
        life.asleep, life.moved_mb = True, memory_mb
        self._must_fit(life.node)

    def is_woken(self, ref: MemberRef, gpus: tuple[int, ...]) -> None:
        life = self._lives.all[ref]
        if not life.asleep:
            raise Untruth(f"{ref} is woken, and does not sleep")
        if len(gpus) != len(life.gpus):
            raise Untruth(f"{ref} had {len(life.gpus)} GPUs, and is woken on {len(gpus)}")
        if gpus != life.gpus and not self._specs[life.node].remaps:
            raise Untruth(f"{ref} is woken on other GPUs of {life.node}, which cannot do that")
        self._lives.must_be_free(life.node, gpus, life.gpu_milli, f"{ref} was woken")
        life.asleep, life.gpus = False, gpus
        self._must_fit(life.node)

    def goes_on(self, ref: MemberRef, own_ms: int) -> None:
        life, now_ms = self._lives.all[ref], self._timeline.now_ms
        if life.still_ms is None:
            raise Untruth(f"{ref} goes on, and never stood still")
        worked_ms = life.awake_ms(now_ms)
        life.gone_ms += now_ms - life.still_ms
        life.still_ms, life.moved_mb = None, 0
        if worked_ms != own_ms - life.started_ms:
            raise Untruth(f"{ref} had worked for {worked_ms} ms, and goes on elsewhere")

    def _must_fit(self, node: str) -> None:
        must_fit(self._specs[node], self._lives.on_node(node), self._jobs)

    # -- what users want -------------------------------------------------------------------

    def asked(self, request: Request) -> None:
        if isinstance(request, WakeJob):
            self._touched.add(request.job)

    @property
    def left_alone(self) -> list[str]:
        """Jobs that sleep until somebody wakes them."""
        return [job for job, sleep in self._sleeps.items() if not sleep.wants and not sleep.waking]

    # -- what the log says -----------------------------------------------------------------

    def see(self, event: Event) -> None:
        match event:
            case PolicyChanged():
                self._policy = event.policy
            case NodeEnding():
                self._ending.add(event.node)
            case JobRunning() | JobAdopted():
                self._awake_ms[event.job] = event.at_ms
                self._woken.discard(event.job)
            case JobDozing():
                self._dozing(event)
            case MembersAsleep():
                for number, host_mb in zip(event.members, event.host_mb, strict=True):
                    self._must_sleep(MemberRef(event.job, event.attempt, number), host_mb)
                    self._sleeps[event.job].host_mb[number] = host_mb
            case JobAsleep():
                self._asleep(event)
            case JobTouched():
                served = bool(self._jobs[event.job].spec.service)
                asked = served or event.job in self._touched or self._leaves(event.job)
                if event.wants and not asked:
                    raise Untruth(f"nobody wanted to wake {event.job}: {event.why}")
                self._sleeps[event.job].wants = event.wants
            case SleepRefused():
                self._sleeps[event.job].waking = True
            case JobWaking():
                sleep = self._sleeps[event.job]
                if not sleep.asleep or not (sleep.wants or self._leaves(event.job)):
                    raise Untruth(f"{event.job} is woken, and nobody wants that: {event.why}")
                sleep.asleep, sleep.waking = False, True
                self._jobs[event.job].asleep, self._jobs[event.job].waking = False, True
            case WakeRefused():
                for ref in self._jobs[event.job].living:
                    self._must_sleep(ref)
                sleep = self._sleeps[event.job]
                sleep.asleep, sleep.waking, sleep.wants = True, False, True
                self._jobs[event.job].asleep, self._jobs[event.job].waking = True, False
            case JobAwake():
                self._jobs[event.job].waking = False
                called_back = self._jobs[event.job].spec.service  # requests came before it slept
                if not self._sleeps.pop(event.job).waking and not called_back:
                    raise Untruth(f"{event.job} is said to be awake, and nobody woke it")
                self._awake_ms[event.job] = event.at_ms
                self._woken.add(event.job)
            case JobPlaced() | JobStopping() | JobRequeued() | JobFinished():
                self._sleeps.pop(event.job, None)
                if event.job in self._jobs:
                    self._jobs[event.job].waking = False
                    self._jobs[event.job].asleep &= isinstance(event, JobStopping)

    def _dozing(self, event: JobDozing) -> None:
        job, policy = self._jobs[event.job], self._policy
        if event.job in self._sleeps:
            raise Untruth(f"{event.job} is put to sleep, and sleeps already")
        if job.spec.no_sleep:
            raise Untruth(f"{event.job} is put to sleep, and must not be")
        asked = event.cause is SleepCause.USER or job.spec.service
        if policy.sleep is Sleeping.NEVER and not asked:
            raise Untruth(f"{event.job} is put to sleep under a policy without sleep")
        if event.cause is SleepCause.TURN:
            awake_ms = event.at_ms - self._awake_ms.get(event.job, event.at_ms)
            if not policy.turn_cost_percent or awake_ms < policy.turn_ms_min:
                raise Untruth(f"the turn of {event.job} is over after {awake_ms} ms")
        if event.cause is SleepCause.IDLE and not job.spec.service:
            since_ms = max(self._lives.all[ref].started_ms for ref in job.living)
            if event.job in self._woken:
                since_ms = self._awake_ms[event.job]
            late = event.at_ms - since_ms < policy.idle_reclaim_ms
            idles = job.spec.command[0] == "idles" and policy.idle_sleeps
            if not idles or not policy.idle_reclaim_ms or late:
                raise Untruth(f"{event.job} is put to sleep as idle: {event.why}")
        self._sleeps[event.job] = Sleep(event)
        self._must_have_room(event)

    def _must_have_room(self, event: JobDozing) -> None:
        """By what the log promised to all who sleep there."""
        sleepers: Counter[str] = Counter()
        promised_mb: Counter[str] = Counter()
        for job_id, sleep in self._sleeps.items():
            for ref in self._jobs[job_id].living:
                node = self._jobs[job_id].node_of(ref)
                sleepers[node] += 1
                promised_mb[node] += sleep.host_mb[ref.member]
        for ref in self._jobs[event.job].living:
            node = self._jobs[event.job].node_of(ref)
            spec = self.known[node]
            if not spec.sleep:
                raise Untruth(f"{event.job} is put to sleep on {node}, which cannot do that")
            if sleepers[node] > self._policy.sleepers_max:
                raise Untruth(f"{sleepers[node]} members sleep on {node}")
            if promised_mb[node] > spec.memory_mb * self._policy.sleep_memory_percent // 100:
                most = f"{self._policy.sleep_memory_percent} % of {spec.memory_mb} MB"
                raise Untruth(f"{promised_mb[node]} MB of {node} are promised to sleepers: {most}")

    def _leaves(self, job_id: str) -> bool:
        job = self._jobs[job_id]
        return job.drained or any(slice_.node in self._ending for slice_ in job.held)

    def _asleep(self, event: JobAsleep) -> None:
        for ref in self._jobs[event.job].living:
            self._must_sleep(ref)
        self._sleeps[event.job].asleep = True
        self._jobs[event.job].asleep = True

    def _must_sleep(self, ref: MemberRef, host_mb: int | None = None) -> None:
        """Or be over: its node may have died since."""
        life = self._lives.all[ref]
        if life.how is None and not life.asleep:
            raise Untruth(f"{ref} is said to sleep, but it is awake")
        if host_mb is not None and host_mb != life.moved_mb:
            raise Untruth(f"{ref} moved {life.moved_mb} MB, and is said to have moved {host_mb}")

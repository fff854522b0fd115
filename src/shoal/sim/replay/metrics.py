"""The results of a replay: the figures people compare, and the ledger's accounts."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import msgspec

from shoal.core.scheduling.predict import Prediction
from shoal.ledger.accounts import GPU_US_PER_GPU_HOUR
from shoal.model.amounts import listed, money_text, share_text, time_words
from shoal.model.durations import UNITS
from shoal.model.job import JobSpec
from shoal.model.ledger import AccountSum, LedgerView
from shoal.model.node import NodeSpec
from shoal.model.resources import Slice
from shoal.model.supply import Supply
from shoal.sim.replay.attempts import SleepUse
from shoal.sim.replay.traces import Arrival, TraceError

# What ordered nodes were used for in a replay, and times as text.


class SupplyUse(msgspec.Struct, kw_only=True):
    """Of one supply. `cost`: at its price per node and hour."""

    name: str
    orders: int = 0
    refused: int = 0
    lost: int = 0
    node_hours: float = 0.0
    cost: float = 0.0


def time_option_ms(one: Supply, word: str, default_ms: int) -> int:
    """An option such as `sim_delay: 5m`."""
    text = one.options.get(word)
    if text is None:
        return default_ms
    match = re.fullmatch(r"([0-9]{1,9})(ms|[smhd])", text.strip())
    if match is None:
        raise TraceError(f"supply {one.name}: {word}: {text!r} is not a time; write 90s, 5m or 2h")
    return int(match[1]) * {**dict(UNITS), "ms": 1}[match[2]]


def check_options(one: Supply) -> None:
    """What the simulated supplier is told must make sense before anything runs."""
    time_option_ms(one, "sim_delay", 0)
    time_option_ms(one, "sim_loss", 0)
    text = one.options.get("sim_refuse", "0")
    if not re.fullmatch(r"0(\.[0-9]+)?|1(\.0+)?", text):
        raise TraceError(f"supply {one.name}: sim_refuse: {text!r} is not a share from 0 to 1")


def gpu_hours_text(hours: float) -> str:
    return f"{hours:,.1f} GPU-h"


def time_text(seconds: float) -> str:
    """The two leading units: '0.4s', '42s', '3m 20s', '2h 05m', '12d 4h'."""
    if seconds < 10:
        return f"{seconds:.1f}s" if seconds else "0s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600}h"


MILLI = 1000  # a whole GPU, or a whole CPU
MASK_BITS = 62  # as many GPUs of a node as a timeline can show


class Levels:
    """How much was held, asked for and working over time, in thousandths of a GPU. On a cluster
    without GPUs the unit is the CPU.

    `sums` holds these levels times milliseconds, in integers: all = down + held + wanted + idle,
    where `wanted` was free while waiting jobs asked for it.
    """

    def __init__(self, nodes: Sequence[NodeSpec]) -> None:
        self.in_gpus = any(node.gpus for node in nodes)
        self.total = self.up = sum(map(self.size, nodes))
        self.held = self.waiting = 0  # what jobs hold, and what the waiting ones ask for
        self.live = 0  # jobs
        self.now_ms = 0
        self.sums: Counter[str] = Counter()
        self.times = array("q")
        self.held_over_time = array("q")
        self.waiting_over_time = array("q")
        self.up_over_time = array("q")

    def size(self, node: NodeSpec) -> int:
        return MILLI * node.gpus if self.in_gpus else node.cpu_milli

    def asked(self, spec: JobSpec) -> int:
        each = spec.gpus * (spec.gpu_milli or MILLI) if self.in_gpus else spec.cpu_milli
        return spec.members * each

    def amount(self, slice_: Slice) -> int:
        return slice_.gpu_milli * len(slice_.gpus) if self.in_gpus else slice_.cpu_milli

    def resize(self, now_ms: int, change: int, *, new: bool = False) -> None:
        """Nodes broke, or came back; or, if `new`, they were ordered or given back."""
        self.advance(now_ms)
        self.up += change
        self.total += change if new else 0

    def advance(self, now_ms: int) -> None:
        """Book the time since the last call at the levels since then."""
        passed_ms = now_ms - self.now_ms
        if not passed_ms:
            return
        sums, free = self.sums, self.up - self.held
        wanted = min(free, self.waiting)
        sums["down"] += (self.total - self.up) * passed_ms
        sums["held"] += self.held * passed_ms
        sums["wanted"] += wanted * passed_ms
        sums["idle"] += (free - wanted) * passed_ms
        if self.live:
            sums["up_with_work"] += self.up * passed_ms
        if self.waiting:
            sums["up_with_queue"] += self.up * passed_ms
        self.now_ms = now_ms

    def sample(self) -> None:
        """Record the current levels, for plots."""
        if self.times and self.times[-1] == self.now_ms:
            self.held_over_time[-1] = self.held
            self.waiting_over_time[-1] = self.waiting
            self.up_over_time[-1] = self.up
            return
        self.times.append(self.now_ms)
        self.held_over_time.append(self.held)
        self.waiting_over_time.append(self.waiting)
        self.up_over_time.append(self.up)


class Records:
    """One entry per finished job, in compact columns."""

    def __init__(self) -> None:
        self.row = array("q")
        self.submit_ms = array("q")
        self.placed_ms = array("q")  # first; -1: never
        self.finished_ms = array("q")
        self.work_ms = array("q")
        self.amount = array("q")  # thousandths of GPUs (or CPUs) of the whole gang
        self.tenant = array("l")
        self.attempts = array("l")
        self.succeeded = array("b")
        # Of jobs whose start was predicted: how long before or after the range they started.
        self.prediction_error_ms = array("q")
        self.tenants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.row)

    def add(
        self,
        arrival: Arrival,
        *,
        placed_ms: int,
        finished_ms: int,
        amount: int,
        attempts: int,
        succeeded: bool,
        predicted: Prediction | None,
    ) -> None:
        self.row.append(arrival.row)
        self.submit_ms.append(arrival.submit_ms)
        self.placed_ms.append(placed_ms)
        self.finished_ms.append(finished_ms)
        self.work_ms.append(arrival.work_ms)
        self.amount.append(amount)
        self.tenant.append(self.tenants.setdefault(arrival.tenant, len(self.tenants)))
        self.attempts.append(attempts)
        self.succeeded.append(succeeded)
        if predicted is not None and placed_ms >= 0:
            late_ms = max(0, placed_ms - predicted.late_ms)
            self.prediction_error_ms.append(late_ms or min(0, placed_ms - predicted.early_ms))

    def extend(self, other: Records) -> None:
        """With the jobs of another cluster."""
        for name, column in vars(other).items():
            if name not in ("tenant", "tenants"):
                getattr(self, name).extend(column)
        numbers = [self.tenants.setdefault(name, len(self.tenants)) for name in other.tenants]
        self.tenant.extend(array("l", [numbers[tenant] for tenant in other.tenant]))


class Segments:
    """Which job held which GPUs of which node, from when to when: for the timeline."""

    def __init__(self) -> None:
        self.node = array("l")
        self.mask = array("q")  # bit i is GPU i
        self.begin_ms = array("q")
        self.end_ms = array("q")
        self.row = array("q")

    def add(self, node: int, slice_: Slice, begin_ms: int, end_ms: int, row: int) -> None:
        self.node.append(node)
        self.mask.append(sum([1 << gpu for gpu in slice_.gpus if gpu < MASK_BITS]))
        self.begin_ms.append(begin_ms)
        self.end_ms.append(end_ms)
        self.row.append(row)


_OF_A_LOG = ("mean", "median", "p99")
AS_IT_WAS = {"jobs", *(f"{what}, {how}" for what in ("wait", "completion") for how in _OF_A_LOG)}


class Spread(msgspec.Struct, frozen=True):
    """Of many times: seconds."""

    mean_s: float
    median_s: float
    p99_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one policy. Shares are between 0 and 1; see docs/simulate.md for each."""

    policy: str
    jobs: int
    failed: int
    wait: Spread
    completion: Spread
    makespan_s: float
    utilization: float
    utilization_with_work: float
    fragmentation: float
    goodput: float | None  # None: the cluster has no GPUs
    preemptions: int
    requeues_by_failure: int
    failures: int
    fairness: float
    predictions_right: float | None  # the share that started within the range
    prediction_error_s: float | None
    gpu_hours: float  # of the whole cluster, over the makespan
    accounts: list[AccountSum]  # where they went; they add up
    currency: str
    cost: float | None
    supply: list[SupplyUse] = []  # nodes that were ordered, and what they cost
    sleep: SleepUse = SleepUse()
    notes: list[str]  # what the price list leaves out
    events: int
    steps: int
    step_mean_ms: float
    step_p99_ms: float


class Outcome:
    """Everything that one replay leaves behind."""

    def __init__(self, policy: str, levels: Levels, failures: Counter[str]) -> None:
        self.policy = policy
        self.levels = levels
        self.ledger: LedgerView | None = None  # when it is over
        self.records = Records()
        self.segments = Segments()
        self.requeues: Counter[str] = Counter()  # by cause
        self.failures = failures  # by cause
        self.supply: list[SupplyUse] = []
        self.sleep = SleepUse()
        self.events = 0
        self.step_ns = array("q")


def summarize(outcome: Outcome) -> Summary:
    records, levels, ledger = outcome.records, outcome.levels, outcome.ledger
    assert ledger is not None, "a replay is summed up when it is over"
    sums = levels.sums
    waits = [p - s for p, s in zip(records.placed_ms, records.submit_ms, strict=True) if p >= 0]
    ends = [f - s for f, s in zip(records.finished_ms, records.submit_ms, strict=True)]
    up = sums["held"] + sums["wanted"] + sums["idle"]
    steps = sorted(outcome.step_ns)
    errors = records.prediction_error_ms
    preemptions = sum(n for cause, n in outcome.requeues.items() if "preempt" in cause)
    return Summary(
        policy=outcome.policy,
        jobs=len(records),
        failed=len(records) - sum(records.succeeded),
        wait=spread(waits),
        completion=spread(ends),
        makespan_s=levels.now_ms / 1000,
        utilization=_share(sums["held"], up),
        utilization_with_work=_share(sums["held"], sums["up_with_work"]),
        fragmentation=_share(sums["wanted"], sums["up_with_queue"]),
        goodput=_goodput(ledger.accounts),
        preemptions=preemptions,
        requeues_by_failure=outcome.requeues["node-loss"],
        failures=sum(outcome.failures.values()),
        fairness=fairness(records),
        predictions_right=errors.count(0) / len(errors) if errors else None,
        prediction_error_s=sum(map(abs, errors)) / len(errors) / 1000 if errors else None,
        gpu_hours=ledger.capacity_gpu_us / GPU_US_PER_GPU_HOUR,
        accounts=ledger.accounts,
        currency=ledger.currency,
        cost=ledger.cost,
        supply=outcome.supply,
        sleep=outcome.sleep,
        notes=ledger.notes,
        events=outcome.events,
        steps=len(steps),
        step_mean_ms=sum(steps) / max(len(steps), 1) / 1e6,
        step_p99_ms=quantile(steps, 0.99) / 1e6,
    )


class AsItWas(msgspec.Struct, frozen=True):
    """What a log shows of the jobs that ended in it, beside which a replay is compared."""

    jobs: int
    wait: Spread
    completion: Spread

    def shown(self, figure: Figure) -> str:
        """For a figure that needs only these; otherwise nothing."""
        return figure.shown(cast(Summary, self)) if figure.title in AS_IT_WAS else ""


def as_it_was(arrivals: Sequence[Arrival]) -> AsItWas | None:
    ended = [one for one in arrivals if one.lived and one.took_ms >= 0]
    if not ended:
        return None
    waits, ends = [one.waited_ms for one in ended], [one.took_ms for one in ended]
    return AsItWas(len(ended), spread(waits), spread(ends))


HELD = ("used", "overhead", "wasted")  # groups of the accounts of time that jobs held


class Figure(NamedTuple):
    """One line of a comparison. `better`: 1 when more is better, -1 when less is, 0 when neither.
    Figures that look alike count as equal: `value` is compared as it is shown."""

    title: str
    value: Callable[[Summary], float | None]
    text: Callable[[float], str]
    better: int = 0

    def shown(self, summary: Summary) -> str:
        value = self.value(summary)
        return "" if value is None else self.text(value)


def percent_text(share: float) -> str:
    return f"{100 * share:.1f}%"


def count_text(count: float) -> str:
    return f"{count:,.0f}"


def account_text(one: AccountSum | None, currency: str) -> str:
    """GPU-hours, and their cost if it is known: '12.5 h, €31.25'."""
    if one is None:
        return ""
    hours = f"{one.gpu_us / GPU_US_PER_GPU_HOUR:,.1f} h"
    return (
        f"{hours}, {money_text(one.cost, currency)}" if currency and one.cost is not None else hours
    )


def cost_text(summary: Summary) -> str:
    """'€1,200, €900.00 of it for work'; nothing if the price list leaves any out."""
    if not summary.currency or summary.cost is None:
        return ""
    used = sum(one.cost or 0.0 for one in summary.accounts if one.group == "used")
    currency = summary.currency
    return f"{money_text(summary.cost, currency)}, {money_text(used, currency)} of it for work"


FIGURES = (
    Figure("jobs", lambda s: s.jobs, count_text),
    Figure("failed", lambda s: s.failed, count_text, -1),
    Figure("wait, mean", lambda s: s.wait.mean_s, time_text, -1),
    Figure("wait, median", lambda s: s.wait.median_s, time_text, -1),
    Figure("wait, p99", lambda s: s.wait.p99_s, time_text, -1),
    Figure("completion, mean", lambda s: s.completion.mean_s, time_text, -1),
    Figure("completion, median", lambda s: s.completion.median_s, time_text, -1),
    Figure("completion, p99", lambda s: s.completion.p99_s, time_text, -1),
    Figure("makespan", lambda s: s.makespan_s, time_text, -1),
    Figure("utilization", lambda s: s.utilization, percent_text, 1),
    Figure("utilization with work", lambda s: s.utilization_with_work, percent_text, 1),
    Figure("fragmentation", lambda s: s.fragmentation, percent_text, -1),
    Figure("goodput", lambda s: s.goodput, percent_text, 1),
    Figure("preemptions", lambda s: s.preemptions, count_text),
    Figure("naps", lambda s: s.sleep.naps or None, count_text),
    Figure("asleep", lambda s: s.sleep.asleep_gpu_hours or None, gpu_hours_text),
    Figure("switching", lambda s: s.sleep.switching_gpu_hours or None, gpu_hours_text),
    Figure("work lost", lambda s: s.sleep.lost_gpu_hours, gpu_hours_text, -1),
    Figure("requeued by failures", lambda s: s.requeues_by_failure, count_text),
    Figure("fairness (Jain)", lambda s: s.fairness, lambda value: f"{value:.3f}", 1),
    Figure("predictions right", lambda s: s.predictions_right, percent_text, 1),
    Figure("prediction error", lambda s: s.prediction_error_s, time_text, -1),
    Figure("step, mean", lambda s: s.step_mean_ms, lambda value: f"{value:.2f}ms"),
    Figure("step, p99", lambda s: s.step_p99_ms, lambda value: f"{value:.2f}ms"),
)


def best(figure: Figure, summaries: Sequence[Summary]) -> set[int]:
    """Which policies are best at this figure, if they differ."""
    shown = [figure.shown(summary) for summary in summaries]
    if not figure.better or len(set(shown)) < 2 or "" in shown:
        return set()
    values = [(figure.value(summary) or 0.0) * figure.better for summary in summaries]
    top = shown[values.index(max(values))]
    return {index for index, text in enumerate(shown) if text == top}


ALIKE = 0.01  # figures that differ by less count as equal in the verdict


def verdict(summaries: Sequence[Summary]) -> str:
    """Which policy is the best for those who wait, and what it costs, in one sentence."""
    names = [_short(one.policy) for one in summaries]
    if not summaries or not summaries[0].jobs:
        return "No jobs to replay in this period."
    order = sorted(range(len(summaries)), key=lambda at: summaries[at].wait.mean_s)
    first = summaries[order[0]]
    if len(summaries) == 1:
        wait = time_words(1000 * first.wait.mean_s)
        return f"{names[0]}: {wait} mean wait, {share_text(first.utilization)} utilization."
    slow = summaries[order[-1]].wait.mean_s
    alike = [at for at in order if _alike(summaries[at].wait.mean_s, first.wait.mean_s)]
    cost = _cost_words([one.cost for one in summaries], order[0], first.currency)
    if len(alike) == len(order):
        jobs = f"{first.jobs:,} jobs"
        return f"No difference: {listed(names)} give {jobs} the same mean wait{cost}."
    less = share_text(1 - first.wait.mean_s / slow)
    if len(alike) > 1:
        tied = listed([names[at] for at in alike])
        return f"{tied} tie: {less} shorter waits than {names[order[-1]]}{cost}."
    return f"{names[order[0]]} wins: {less} shorter waits than {names[order[-1]]}{cost}."


def _cost_words(costs: Sequence[float | None], winner: int, currency: str) -> str:
    """Against the cheapest of the others."""
    others = [cost for at, cost in enumerate(costs) if at != winner and cost is not None]
    own = costs[winner]
    if own is None or not currency or len(others) < len(costs) - 1:
        return ""
    least = min(others)
    if _alike(own, least):
        return ", the same cost"
    how = "more" if own > least else "less"
    return f", {money_text(abs(own - least), currency)} {how}"


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= ALIKE * max(abs(one), abs(other))


def _short(policy: str) -> str:
    """A policy from a file has the file's name."""
    return policy.rpartition("/")[2].removesuffix(".json").removesuffix(".yaml")


def spread(times_ms: Sequence[int]) -> Spread:
    ordered = sorted(times_ms)
    mean_s = sum(ordered) / max(len(ordered), 1) / 1000
    return Spread(mean_s, quantile(ordered, 0.5) / 1000, quantile(ordered, 0.99) / 1000)


def quantile(ordered: Sequence[int], share: float) -> float:
    """The entry at index int(share x n) of a sorted list, as the published tables take it; the
    median of an even number is the mean of the two in the middle."""
    count = len(ordered)
    if not count:
        return 0.0
    if share == 0.5 and count % 2 == 0:
        return (ordered[count // 2 - 1] + ordered[count // 2]) / 2
    return float(ordered[min(int(share * count), count - 1)])


def fairness(records: Records) -> float:
    """Jain's index over tenants: 1 when all are slowed down alike, 1/n when one gets everything.

    The service of a tenant is the share of its jobs' time in the system that was their work,
    each weighted by its size.
    """
    work = [0] * len(records.tenants)
    time = [0] * len(records.tenants)
    columns = (records.tenant, records.amount, records.work_ms)
    for index, (tenant, amount, work_ms) in enumerate(zip(*columns, strict=True)):
        work[tenant] += amount * work_ms
        time[tenant] += amount * (records.finished_ms[index] - records.submit_ms[index])
    service = [w / t for w, t in zip(work, time, strict=True) if t]
    squares = math.fsum(x * x for x in service)
    return math.fsum(service) ** 2 / (len(service) * squares) if squares else 1.0


def _goodput(accounts: Sequence[AccountSum]) -> float | None:
    held = sum(one.gpu_us for one in accounts if one.group in HELD)
    used = sum(one.gpu_us for one in accounts if one.group == "used")
    return used / held if held else None


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

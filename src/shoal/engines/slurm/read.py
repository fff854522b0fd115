"""What Slurm says, as versions 22.05 to 25.x say it: jobs, nodes, refusals. Pure.

The JSON of 22.05 has plain values. From 23.02 on, numbers are {"set", "infinite", "number"}; from
23.11 on, a state is a list: the state itself, and flags such as COMPLETING.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from shoal.engines.slurm.render import order_of
from shoal.model.supply import REASON_CHARACTERS_MAX, OrderPhase, OrderStatus

OLDEST = (22, 5)
FILTERING = (
    23,
    2,
)  # from here on, `squeue --json` gives the jobs that were asked for, and no others
FIELDS = 7  # of `render.OUTPUT`
FEATURES_MAX = 48  # of a node, as labels
UNLIMITED_S = 300 * 86_400

EXITED = "NonZeroExitCode"  # a job's script said so itself
NOTHING = ("", "None", "(null)", "N/A", "NONE", "Unknown")

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
# How an order ends that was neither refused nor taken from us.
ENDED_WELL = frozenset({"COMPLETED", "TIMEOUT", "DEADLINE"})
ENDED_BADLY = frozenset(
    {"BOOT_FAIL", "CANCELLED", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "RECONFIG_FAIL", "REVOKED"}
)
FLAGS = ("COMPLETING", "REQUEUE_HOLD", "SPECIAL_EXIT", "REQUEUED", "REQUEUE_FED", "CONFIGURING")

# What helps against a reason for which Slurm would let an order wait forever: beginnings of its
# words, longest first, and the field of the supply to change.
ADVICE: tuple[tuple[str, str], ...] = (
    ("PartitionTimeLimit", "lasts: longer than the partition allows"),
    ("PartitionNodeLimit", "lot: more nodes than the partition gives one job"),
    ("PartitionConfig", "the partition has no such nodes: see gpus, cpus, memory, lot"),
    ("PartitionDown", "the partition is closed for now"),
    ("PartitionInactive", "the partition is closed for now"),
    ("BadConstraints", "no node has what is asked: see gpus, cpus, memory, constraint"),
    ("ReqNodeNotAvail", "nodelist, constraint or reservation: those nodes are not there now"),
    ("JobHeldAdmin", "an administrator holds the job: scontrol release"),
    ("JobHeldUser", "the job is held: scontrol release"),
    ("AccountNotAllowed", "account: may not use this partition"),
    ("InvalidAccount", "account: unknown to Slurm"),
    ("InvalidQOS", "qos: unknown to Slurm"),
    ("QOSNotAllowed", "qos: may not be used in this partition"),
    ("Reservation", "reservation: not now"),
    ("ReservationDeleted", "reservation: deleted"),
    ("QOS", "a quota of the QOS: lower most, or ask for more"),
    ("Assoc", "a quota of the account: lower most, or ask for more"),
    ("MaxMemPerLimit", "memory: more than the partition allows"),
    ("Licenses", "licenses: none are free"),
)

# What the machines print if their Python is not the one that we take it for.
SAID: tuple[tuple[str, str], ...] = (
    ("No module named", "python: has no Shoal on the machines; name one that has"),
    ("execve()", "python: is not on the machines; name one that is"),
)

_SIGNS = re.compile(r"^(?:sbatch|squeue|scontrol|scancel|slurm_\w+): (?:error: |fatal: )?")


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    user: str
    state: str
    flags: tuple[str, ...] = ()
    reason: str = ""
    ends_s: int | None = None  # when it ended, or will end at the latest
    nodes: str = ""
    code: int = 0  # of its script, if it says


def version(text: str) -> tuple[int, int] | None:
    """Of `sbatch --version`: "slurm 23.11.4" or, from Debian, "slurm-wlm 22.05.8"."""
    found = re.search(r"\b(\d+)\.(\d+)(?:\.\d+)?", text)
    return (int(found[1]), int(found[2])) if found else None


def jobs_of_lines(text: str) -> list[SlurmJob]:
    """Of `squeue --format` with `render.OUTPUT`, and SLURM_TIME_FORMAT=%s."""
    jobs = []
    for line in text.splitlines():
        parts = line.split("\t")
        if len(parts) != FIELDS:
            raise ValueError(f"squeue printed {len(parts)} fields instead of {FIELDS}: {line[:80]}")
        id_, name, user, state, reason, end, nodes = (part.strip() for part in parts)
        jobs.append(
            SlurmJob(
                id=id_,
                name=name,
                user=user,
                state=state,
                reason="" if reason in NOTHING else reason,
                ends_s=int(end) if end.isdigit() and int(end) else None,
                nodes="" if nodes in NOTHING else nodes,
            )
        )
    return jobs


class _Number(msgspec.Struct):
    set: bool = True
    infinite: bool = False
    number: int = 0


class _Exit(msgspec.Struct):
    return_code: int | _Number | None = None


class _Job(msgspec.Struct):
    job_id: int
    name: str | None = ""
    user_name: str | None = ""
    job_state: str | list[str] = ""
    state_reason: str | None = ""
    end_time: int | _Number | None = None
    time_limit: int | _Number | msgspec.UnsetType | None = msgspec.UNSET
    nodes: str | None = ""
    exit_code: int | _Exit | None = None


class _Answer(msgspec.Struct):
    jobs: list[_Job] = []


def jobs_of_json(data: bytes) -> list[SlurmJob]:
    """Of `squeue --json`, with whatever else it has to say."""
    try:
        answer = msgspec.json.decode(data, type=_Answer)
    except msgspec.DecodeError as error:
        raise ValueError(f"squeue --json printed what we cannot read: {error}") from None
    return [_of_json(job) for job in answer.jobs]


def _of_json(job: _Job) -> SlurmJob:
    words = [job.job_state] if isinstance(job.job_state, str) else job.job_state
    state, flags = (words[0], words[1:]) if words else ("", [])
    reason = job.state_reason or ""
    return SlurmJob(
        id=str(job.job_id),
        name=job.name or "",
        user=job.user_name or "",
        state=state,
        flags=tuple(flags),
        reason="" if reason in NOTHING else reason,
        ends_s=None if _unlimited(job) else _whole(job.end_time) or None,
        nodes=job.nodes or "",
        code=_exit_code(job.exit_code),
    )


def _unlimited(job: _Job) -> bool:
    """Then its end is made up: in a year."""
    limit = job.time_limit
    return limit is None or (isinstance(limit, _Number) and limit.infinite)


def _whole(value: int | _Number | None) -> int:
    if isinstance(value, _Number):
        return value.number if value.set and not value.infinite else 0
    return value or 0


def _exit_code(value: int | _Exit | None) -> int:
    if isinstance(value, _Exit):
        return _whole(value.return_code)
    return (value or 0) >> 8  # as wait() has it


def status(job: SlurmJob, order: str, last_words: str = "") -> OrderStatus:
    """`last_words`: the end of its output, if it has any."""
    phase, failed = phase_of(job)
    return OrderStatus(
        order=order,
        phase=phase,
        failed=failed,
        reason=_reason(job, phase, last_words)[:REASON_CHARACTERS_MAX],
        handle=job.id,
    )


def phase_of(job: SlurmJob) -> tuple[OrderPhase, bool]:
    """A flag says more than the state beside it: a job that is cancelled and COMPLETING still has
    its machines."""
    state = next((flag for flag in FLAGS if flag in job.flags), job.state)
    if state in WAITING:
        return OrderPhase.PENDING, False
    if state in ENDED_WELL or state in ENDED_BADLY:
        return OrderPhase.ENDED, state in ENDED_BADLY
    # A state that only a later Slurm knows: our job is there, so it is not over.
    return OrderPhase.RUNNING, False


def _reason(job: SlurmJob, phase: OrderPhase, last_words: str) -> str:
    if phase is OrderPhase.PENDING:
        words = job.reason
        held = HELD.intersection((job.state, *job.flags))
        hint = advice(words) or ("held: scontrol release" if held else "")
        return f"{words} ({hint})".strip() if hint else words
    if phase is OrderPhase.RUNNING:
        plain = job.state == "RUNNING" and not job.flags
        return "" if plain else " ".join((job.state, *job.flags))
    text = job.state if not job.reason else f"{job.state}: {job.reason}"
    if job.reason != EXITED or not last_words:
        return text
    for sign, hint in SAID:
        if sign in last_words:
            return f"{hint} ({last_words})"
    return f"{text}: {last_words}"


def advice(reason: str) -> str:
    fitting = [entry for entry in ADVICE if reason.startswith(entry[0])]
    return max(fitting, key=lambda entry: len(entry[0]))[1] if fitting else ""


def orders(jobs: list[SlurmJob], cluster: str) -> dict[str, list[SlurmJob]]:
    """This cluster's jobs, by order; of several for one order, the newest is last."""
    found: dict[str, list[SlurmJob]] = {}
    for job in sorted(jobs, key=lambda job: int(job.id) if job.id.isdigit() else 0):
        order = order_of(cluster, job.name)
        if order:
            found.setdefault(order, []).append(job)
    return found


def chosen(jobs: list[SlurmJob]) -> SlurmJob:
    """The job that says how an order does: one that has machines, or waits, or else the newest."""
    rank = {OrderPhase.RUNNING: 2, OrderPhase.PENDING: 1}
    return max(reversed(jobs), key=lambda job: rank.get(phase_of(job)[0], 0))


def pairs(line: str) -> dict[str, str]:
    """Of `scontrol --oneliner show`: Name=Value, where a value may have spaces."""
    found = re.split(r"(?:^|\s)([A-Za-z][A-Za-z0-9:/_]*)=", line)
    return {name: value.strip() for name, value in zip(found[1::2], found[2::2], strict=True)}


def node_named(text: str, name: str) -> dict[str, str]:
    """The line of this node in `scontrol --oneliner show node`; {} if it has none."""
    for line in text.splitlines():
        found = pairs(line)
        if found.get("NodeName") == name:
            return found
    return {}


def features(node: dict[str, str]) -> list[str]:
    text = node.get("ActiveFeatures", "")
    return [] if text in NOTHING else text.split(",")[:FEATURES_MAX]


def limited(ends_s: int, now_s: float) -> bool:
    """Slurm says of a job without a time limit that it ends in a year."""
    return ends_s - now_s < UNLIMITED_S


def partition_names(text: str) -> list[str]:
    names = (pairs(line).get("PartitionName", "") for line in text.splitlines())
    return [name for name in names if name]


# What a refusal of sbatch says, and the field of the supply that it is about.
REFUSALS: tuple[tuple[str, str], ...] = (
    (r"violates accounting", "most (a quota of Slurm's)"),
    (r"invalid partition|partition name", "partition"),
    (r"group not permitted to use this partition|partition.*not.*access", "partition"),
    (r"account", "account"),
    (r"qos specification|invalid qos", "qos"),
    (r"gres\) specification|generic resource|gpu", "gpus"),
    (r"feature specification|constraint", "constraint"),
    (r"reservation", "reservation"),
    (r"invalid node name|node name specified", "nodelist or exclude"),
    (r"time limit|--time", "lasts"),
    (r"memory specification|memory required", "memory"),
    (r"more processors|cpu count", "cpus"),
    (r"node count", "lot"),
    (r"node configuration is not available", "gpus, cpus, memory or constraint"),
    (r"limit|quota", "most (a quota of Slurm's)"),
    (r"permission denied|invalid user id", "account (no permission)"),
)


def refusal(stderr: str) -> str:
    """Slurm's own words in one line, and before them the field to fix."""
    said = list(dict.fromkeys(_lines(stderr)))
    text = "; ".join(said) or "it gave no reason"
    for pattern, field in REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            return f"{field}: {text}"
    return text


def _lines(stderr: str) -> Iterator[str]:
    for line in stderr.splitlines():
        text = _SIGNS.sub("", line.strip())
        text = text.removeprefix("Batch job submission failed: ")
        if text:
            yield text


def is_over(stderr: str) -> bool:
    """What scancel says of a job that ended meanwhile."""
    return bool(re.search(r"invalid job id|already complet", stderr, re.IGNORECASE))


def unreachable(stderr: str) -> bool:
    """slurmctld did not answer: nothing was refused, and nothing is known."""
    return bool(re.search(UNREACHABLE, stderr, re.IGNORECASE))


def absence(stderr: str) -> str:
    """Why nothing is known, in one line."""
    if re.search("configuration source", stderr, re.IGNORECASE):
        fix = "run the controller on a machine of the cluster, or set SLURM_CONF"
        return f"no Slurm is configured on this machine: {fix}"
    return f"slurmctld does not answer: {refusal(stderr)}"


UNREACHABLE = (
    r"unable to contact slurm controller|connect failure|socket timed out|connection refused"
    r"|unable to connect|timed out on send/recv|in standby mode|configuration source"
    r"|zero bytes were transmitted|munge encode failed|slurm backup controller"
)

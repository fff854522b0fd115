"""Other clusters that run jobs of ours: what is shared with them, and what they say.

*Home* is the cluster where a job was submitted, its *host* is the neighbor that runs it. Each
stays whole: on the host, home is a user with a token in a tenant of its own.
"""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

import msgspec

from shoal.model.away import Away
from shoal.model.durations import DAY_MS
from shoal.model.job import JOB_NAME_PATTERN, JobSpec, Outcome, Restart
from shoal.model.labels import LabelKey, LabelValue
from shoal.model.sites import SiteReport
from shoal.model.volume import parse

NEIGHBORS_MAX = 32
TENANTS_MAX = 1_000  # that one neighbor is named for
OFFERED_MAX = 32  # jobs that one neighbor is asked about at a time
ANY = "any"
HERE = "here"  # whatever the policy says: as for jobs that come from a neighbor
STAYS = "stays"  # a job with the label stays=eu goes to neighbors with the label region=eu only
REGION = "region"
HOME = "home"  # a label of a job that another cluster handed over: its hand-over
PRICE_UNIT = 1_000_000  # prices are in millionths of the price list's currency, per GPU-hour
CUT_MS_MIN = 60_000
CUT_MS_MAX = 14 * DAY_MS  # a host gives no longer lease than half of that
TEXT_MAX = 300

NeighborName = Annotated[str, msgspec.Meta(max_length=40, pattern=JOB_NAME_PATTERN)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]


class Neighbor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of ours may go to a neighbor. One that the policy does not name takes jobs that ask."""

    name: NeighborName
    # Whose jobs may go there; empty: everybody's.
    tenants: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=63)], ...],
        msgspec.Meta(max_length=TENANTS_MAX),
    ] = ()
    gpus_max: Count = 0  # of our jobs there at a time; 0: no bound of ours
    price_max: Count = 0  # in millionths, per GPU-hour; 0: any
    labels: Annotated[dict[LabelKey, LabelValue], msgspec.Meta(max_length=32)] = {}
    # A job that names no cluster may go there after it has waited for so long; 0: never.
    after_ms: Count = 0


class Wish(NamedTuple):
    """Where a job may run. `only`: not here. `price_max`: in millionths; None: any."""

    names: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    price_max: int | None = None
    asks: bool = True

    @property
    def only(self) -> bool:
        return bool(self.names)


def asks(text: str) -> bool:
    """Whether such a job is offered to neighbors even if the policy sends none."""
    return text not in ("", HERE)


_NAME = re.compile(JOB_NAME_PATTERN)
_PRICE = re.compile(r"price<([0-9]{1,9}(?:\.[0-9]{1,6})?)")
_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/-]{0,62})=([A-Za-z0-9._-]{1,63})")


def wish_of(text: str) -> Wish:
    """`any`, `here`, names of neighbors, or conditions such as `price<2,region=eu`. Raises
    ValueError."""
    if text in ("", ANY, HERE):
        return Wish(asks=asks(text))
    names, labels, price_max = [], [], None
    for word in text.split(","):
        if price := _PRICE.fullmatch(word):
            price_max = round(float(price[1]) * PRICE_UNIT)
        elif label := _LABEL.fullmatch(word):
            labels.append((label[1], label[2]))
        elif _NAME.fullmatch(word) and word not in (ANY, HERE):
            names.append(word)
        else:
            alone = word in (ANY, HERE)
            what = "stands alone" if alone else "is neither a neighbor nor a condition"
            raise ValueError(f"{word[:64]!r} {what}")
    if names and (labels or price_max is not None):
        raise ValueError("names neighbors or says what they must be like, not both")
    return Wish(tuple(names), tuple(labels), price_max)


def stays_home(spec: JobSpec) -> str:
    """Why such a job cannot run on another cluster; empty: it can."""
    if spec.cluster == HERE:
        return "it is to run here"
    if spec.service or spec.sweep is not None or spec.array:
        return "services and arrays run here"
    if spec.workdir and not spec.package:
        return "its folder is on this cluster; send it with --pack"
    folders = [volume for volume in spec.volumes if not parse(volume).url]
    if folders:
        return f"the volume {folders[0]} is a folder of this cluster; give its URL instead"
    if spec.encrypt:
        return "its files are encrypted with a key of this cluster"
    if HOME in spec.labels:
        return "another cluster has handed it over"
    return ""


def handed_here(spec: JobSpec) -> bool:
    """A neighbor's job, which may bring saved work and whose home fetches what it saves."""
    return HOME in spec.labels and not spec.service


def cut_problem(spec: JobSpec) -> str:
    """What is wrong with what it wishes for a cut; empty: nothing."""
    if spec.if_cut_ms and spec.restart is Restart.NEVER:
        return "starts a job again that must not run twice; leave out restart: never, or this"
    if 0 < spec.if_cut_ms < CUT_MS_MIN:
        return f"is at least {CUT_MS_MIN // 1000} s, so that a short cut does no harm"
    if spec.if_cut_ms > CUT_MS_MAX:
        return f"is at most {CUT_MS_MAX // DAY_MS} days"
    return ""


# -- what neighbors say ----------------------------------------------------------------------------


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """When a neighbor would start a job that waits here. None: it cannot say, or never."""

    job: str
    start_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None
    price: Annotated[int, msgspec.Meta(ge=0)] | None = None  # millionths, per GPU-hour
    why: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)] = ""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The host's stored record of a job that has ended there. `started`: it ran, if only once."""

    outcome: Outcome
    code: int = 0
    why: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)] = ""
    started: bool = False
    gpu_ms: Annotated[int, msgspec.Meta(ge=0)] = 0
    money: Annotated[int, msgspec.Meta(ge=0)] = 0  # millionths


class HandedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the host says of a job that was handed over, under its key. `id`: its name there;
    empty: the host has not said that it has it. `refused`: why it does not take it, or has lost
    it. `until_ms`: its lease, by the host's clock."""

    job: str
    attempt: int
    id: Annotated[str, msgspec.Meta(max_length=64)] = ""
    phase: Annotated[str, msgspec.Meta(max_length=32)] = ""
    why: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)] = ""
    until_ms: int = 0
    refused: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)] = ""
    ended: Ending | None = None


class NeighborReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest word of a neighbor. `clock_ms`: its clock when it spoke; 0: it did not.
    `problem`: why it cannot be reached, or understood."""

    name: str
    clock_ms: int = 0
    gpus: int = 0
    gpus_free: int = 0
    round_trip_ms: int = 0
    shoal: str = ""
    problem: str = ""
    offers: tuple[Offer, ...] = ()
    jobs: tuple[HandedJob, ...] = ()
    price: int | None = None  # the lowest for a GPU and an hour, in millionths
    services: tuple[SiteReport, ...] = ()


class Outgoing(NamedTuple):
    """A hand-over that its neighbor has, or is to have or to end. `stray`: it was given up, so
    nothing but its end and what it used is of interest, and its job may have ended long ago."""

    job: str
    attempt: int
    away: Away
    spec: JobSpec
    stray: bool = False


# What is withdrawn never runs, so nothing else about it matters.
NEVER_RUNS = JobSpec(command=("true",))


def key_of(cluster: str, job: str, attempt: int) -> str:
    """One hand-over, one job, however often it is sent."""
    return f"{cluster}/{job}/{attempt}"


def spec_there(spec: JobSpec, tenant: str) -> JobSpec:
    """As the host is asked for it: without what means something at home only. The host does not
    hand it on, so it is never further away than one neighbor."""
    return msgspec.structs.replace(
        spec,
        tenant=tenant,
        user="",
        cluster=HERE,
        if_cut_ms=0,
        after=(),
        begin_ms=0,
        notify=(),
        workflow="",
        schedule="",
        scheduled_ms=0,
        priority=min(spec.priority, 0),
    )


def shape_of(spec: JobSpec, tenant: str) -> JobSpec:
    """What a neighbor that has not got the job may know of it."""
    return msgspec.structs.replace(
        spec_there(spec, tenant),
        command=("true",),
        name=None,
        env={},
        labels={},
        secrets=(),
        package="",
        workdir="",
        requirements="",
        volumes=(),
        volume_shard=(),
        volume_lazy=(),
    )


_MARK = re.compile(r"([0-9a-f]{8})[.](j[0-9]{1,15}(?:[.][0-9]{1,15})?)[.]([0-9]{1,15})")


def mark_of(cluster: str, job: str, attempt: int) -> str:
    """The same as the value of a label."""
    return f"{cluster}.{job}.{attempt}"


def service_mark(cluster: str, version: int) -> str:
    """The same for replicas of a service that has its record in this cluster."""
    return f"{cluster}.v{version}"


def version_marked(mark: str, cluster: str) -> int:
    """0: it is no version of a service of this cluster."""
    found = re.fullmatch(rf"{re.escape(cluster)}[.]v([0-9]{{1,15}})", mark)
    return int(found[1]) if found else 0


def marked(mark: str) -> tuple[str, str, int] | None:
    """The cluster, the job and the attempt."""
    found = _MARK.fullmatch(mark)
    return (found[1], found[2], int(found[3])) if found else None

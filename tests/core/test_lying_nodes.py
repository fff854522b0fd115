"""A node's word counts for its own members: whatever it reports, no step fails, and no job that is
not placed there changes."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.state.own_members import NAMING
from shoal.core.state.state import State
from shoal.model.blocks import Held, volume_key
from shoal.model.commands import Acknowledge, Sleep, Stop, Wake
from shoal.model.health import CheckResult
from shoal.model.job import Fault, Job, MemberRef, Phase
from shoal.model.progress import Beat, Progress, Spent
from shoal.model.report import (
    Began,
    Getting,
    Hung,
    Idle,
    MemberExit,
    NodeReport,
    Refusal,
    SleepJob,
    Slept,
    Touched,
    Uses,
    WakeJob,
    Woke,
)
from tests.core.build import Cluster, examples
from tests.core.test_sleep import cluster, nap

LIAR = "a"
URL = "s3://bucket/data"
DATA = volume_key("default", URL)


def busy() -> Cluster:
    """Gangs on the liar and beside it, in every phase that a node reports about."""
    made = cluster("a", "b", "c", gpus=8, idle_warn_ms=1_000, idle_reclaim_ms=60_000)
    across = made.run(gpus=1, members=3, members_per_node=1, preemptible=True)
    assert {member.slice.node for member in made.job(across).members} == {"a", "b", "c"}
    for name in ("doze", "asleep", "wakes"):
        job = made.run(gpus=1, members=3, members_per_node=1, name=name)
        made.ask(SleepJob(job))
        if name == "doze":
            made.deliver()
            continue
        nap(made, job)
        if name == "wakes":
            made.ask(WakeJob(job))
    made.run(gpus=1, name="plain")
    made.run(gpus=1, members=9, name="wide")
    made.cancel(made.run(gpus=1, members=3, name="stops"))
    made.submit(gpus=1, name="starts")
    made.submit(gpus=8, members=3, name="waits")
    return made


NUMBERS = st.integers(-2, 10) | st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 10) | st.integers(0, 2**62)
REFS = st.builds(
    MemberRef,
    st.sampled_from([f"j{number}" for number in range(1, 11)] + ["", "j99", "../j1"]),
    st.integers(0, 3) | NUMBERS,
    st.integers(0, 4) | NUMBERS,
)
TEXTS = st.text(max_size=8)
SPENT = st.builds(Spent, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
BEATS = st.builds(
    Beat,
    ref=TEXTS,
    **dict.fromkeys(("step", "steps", "compute_us", "wait_us", "saved_step", "saves"), COUNTS),
    busy=st.booleans(),
    loss=st.none() | st.floats(),
)
EXITS = st.builds(
    MemberExit,
    REFS,
    NUMBERS,
    TEXTS,
    st.booleans(),
    st.none() | NUMBERS,
    st.sampled_from(Fault),
    st.none() | SPENT,
)


def some(one: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(one, max_size=5).map(tuple)


LIED_ABOUT = {
    **dict.fromkeys(("alive", "stopping", "ended", "dozing", "waking"), some(REFS)),
    "exits": some(EXITS),
    "progress": some(st.builds(Progress, REFS, BEATS, NUMBERS)),
    "checks": some(st.builds(CheckResult, id=TEXTS, figures=st.just({"memory_mbs": 1}))),
    "prepared": some(st.sampled_from(["j1", "j5", "j99", ""])),
    "idle": some(st.builds(Idle, REFS, NUMBERS)),
    "getting": some(st.builds(Getting, REFS, TEXTS)),
    "leaving": st.booleans(),
    "ends_in_ms": st.none() | NUMBERS,
    "asleep": some(st.builds(Slept, REFS, NUMBERS, NUMBERS)),
    "woke": some(st.builds(Woke, REFS, NUMBERS)),
    "refused": some(st.builds(Refusal, REFS, TEXTS)),
    "touched": some(st.builds(Touched, REFS, NUMBERS)),
    "began": some(st.builds(Began, REFS, NUMBERS, TEXTS)),
    "hangs": some(st.builds(Hung, TEXTS | st.just("/"), TEXTS, st.booleans())),
    "uses": some(st.builds(Uses, REFS, NUMBERS)),
    "holdings": some(st.builds(Held, st.sampled_from((DATA, "", "x")), NUMBERS, NUMBERS)),
}
LIES = st.fixed_dictionaries({}, optional=LIED_ABOUT)


def test_every_field_that_names_members_is_lied_about() -> None:
    assert set(NAMING) <= set(LIED_ABOUT)


def lie(made: Cluster, lies: dict[str, object], *, honest: bool) -> NodeReport | None:
    """As it comes from a link: whatever cannot be decoded has been refused there. `honest`: only
    what it adds is a lie."""
    report = made.books[LIAR].report()
    if honest:
        lies = {
            name: (*getattr(report, name), *said) if isinstance(said, tuple) else said
            for name, said in lies.items()
        }
    told = msgspec.structs.replace(report, **lies)
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=NodeReport)
    except msgspec.ValidationError:
        return None


def elsewhere(state: State) -> dict[tuple[str, int], bytes]:
    """The members on other nodes, with the job of those of which the liar has none."""

    def told(job: Job) -> Job | None:
        return None if any(one.slice.node == LIAR for one in job.members) else job

    return {
        (job.id, number): msgspec.json.encode([member, told(job)])
        for job in state.jobs.values()
        for number, member in enumerate(job.members)
        if member.slice.node != LIAR and job.phase is not Phase.WAITING
    }


@examples
@given(LIES, st.booleans())
def test_whatever_a_node_reports_no_step_fails_and_no_other_nodes_members_change(
    lies: dict[str, object], honest: bool
) -> None:
    made = busy()
    report = lie(made, lies, honest=honest)
    if report is None:
        return
    before = elsewhere(made.state)
    made.wait(1_000)
    made.step(nodes=(report,))
    now = elsewhere(made.state)
    assert {key: was for key, was in before.items() if now.get(key) != was} == {}
    made.wait(1_000)
    made.hear("b", "c")
    made.submit(
        volumes=(f"{URL}:data",)
    )  # it may be drawn to the liar, which is all there is to it


def test_strangers_are_stopped_and_their_exits_acknowledged_and_nothing_else() -> None:
    made = busy()
    alien, gone = MemberRef("j6", 1, 0), MemberRef("j6", 1, 77)
    lies: dict[str, object] = {
        "alive": (alien,),
        "exits": (MemberExit(gone, 1),),
        "asleep": (Slept(alien, 5, 5),),
    }
    report = lie(made, lies, honest=True)
    assert report is not None
    about = [one for one in made.step(nodes=(report,)).commands if one.node == LIAR]
    said = {(type(one).__name__, one.ref) for one in about if isinstance(one, Stop | Acknowledge)}
    assert {("Stop", alien), ("Acknowledge", gone)} <= said
    assert not any(isinstance(one, Sleep | Wake) and one.ref == alien for one in about)
    (seen,) = made.last.reports
    assert alien not in seen.alive and not seen.exits and not seen.asleep[3:]

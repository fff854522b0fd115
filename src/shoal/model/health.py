"""A node's health: the figures of a check, the verdict on them, and the thresholds."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated

import msgspec

from shoal.model.fabric import TOUR_NODES_MAX, Collective, Pair, Weak

FIGURES_MAX = 512
TEXT_MAX = 300
FAULTS_MAX = 16

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]
Milli = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class Standing(enum.StrEnum):
    """How well a node works, apart from whether it can be reached."""

    OK = "ok"
    SUSPECT = "suspect"  # to be checked; its jobs keep running
    QUARANTINED = "quarantined"  # gets no new jobs, gangs leave it; retested from time to time


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the probe measured. Figures are whole numbers, named with their unit last; those of GPUs
    begin with `gpuN_`. A fault fails the check by itself, without a baseline."""

    id: str
    busy: bool = False  # members ran during the check: compare with busy nodes only
    figures: Annotated[dict[str, int], msgspec.Meta(max_length=FIGURES_MAX)] = {}
    faults: Annotated[tuple[str, ...], msgspec.Meta(max_length=FAULTS_MAX)] = ()
    notes: tuple[str, ...] = ()  # what could not be measured, and why
    took_ms: int = 0
    error: str = ""  # the probe itself failed: says nothing about the node
    # Of a tour; they never enter the log.
    pairs: Annotated[tuple[Pair, ...], msgspec.Meta(max_length=TOUR_NODES_MAX)] = ()
    collectives: Annotated[tuple[Collective, ...], msgspec.Meta(max_length=256)] = ()
    weak: Annotated[tuple[Weak, ...], msgspec.Meta(max_length=256)] = ()  # found by collectives


class Stand(msgspec.Struct, frozen=True, kw_only=True):
    """One figure and its usual value; `usual` is None if there is nothing to compare with."""

    figure: str
    value: int
    usual: int | None = None
    limit: int | None = None
    of: int = 0  # how many nodes, or earlier checks of this node, `usual` is based on
    own: bool = False
    low: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a node's check: each figure beside its usual value, and the reason in short."""

    passed: bool
    why: str
    stands: tuple[Stand, ...] = ()


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """`proven`: the trouble is known to follow the node, so no second suspicion is needed. `owner`:
    whose jobs it comes from, if their word counts once, however many they are. `refutable`: a check
    that finds the node well ends it; otherwise it is remembered, for what checks cannot see."""

    at_ms: int
    why: str
    job: str = ""
    attempt: int = 0
    member: int = -1
    proven: bool = False
    network: bool = False  # its links are weak: only other nodes can check that
    owner: str = ""
    refutable: bool = False


class StandingChange(msgspec.Struct, frozen=True):
    at_ms: int
    standing: Standing
    why: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Everything remembered about a node's health."""

    standing: Standing = Standing.OK
    since_ms: int = 0
    why: str = ""
    suspicions: tuple[Suspicion, ...] = ()
    strikes: int = 0  # quarantines and failed retests since the count was last reset
    retest_ms: int = 0  # when to check a quarantined node again
    check_since_ms: int = -1  # a check is due since this time; -1: none is
    faulty: bool = False  # in quarantine because it cannot start or run members
    history: tuple[StandingChange, ...] = ()
    network: bool = False  # suspect or in quarantine because of its links: a tour checks it

    def rendered(self, text: Callable[[str], str]) -> Record:
        """With its reasons as a reader may read them."""
        replace = msgspec.structs.replace
        return replace(
            self,
            why=text(self.why),
            suspicions=tuple(replace(one, why=text(one.why)) for one in self.suspicions),
            history=tuple(replace(one, why=text(one.why)) for one in self.history),
        )


class HealthRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The thresholds for slow, hung and failing nodes; docs/health.md explains them."""

    # A member is slow while the gang's median own time per step, divided by its own, stays below
    # `slow_milli`; it has recovered when the ratio is above `well_milli` again.
    slow_milli: Milli = 850
    well_milli: Milli = 900
    # A window's minimum number of steps of every member, and its minimum length.
    window_steps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 4
    window_ms: Count = 3_000
    windows_in_a_row: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    # The first steps of a process compile, connect and fill caches.
    warm_steps: Count = 5
    # A slow member is also this many times further from the median than windows usually vary.
    noise_factor: Annotated[int, msgspec.Meta(ge=1, le=100)] = 4

    # A gang hangs if it makes no step for the largest of: the floor, `hang_steps` usual steps,
    # twice the longest pause. Before the first steps, or while a member is busy: `hang_patient_ms`.
    hang_floor_ms: Count = 60_000
    hang_steps: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] = 20
    hang_patient_ms: Count = 1_800_000

    # A second, independent suspicion within this time quarantines a node.
    suspicion_ms: Count = 24 * 3_600_000
    # A check without an answer by then is given up, and the suspicion stays on record.
    check_wait_ms: Count = 120_000
    retest_ms: Annotated[int, msgspec.Meta(ge=1)] = 600_000
    retest_ms_max: Count = 24 * 3_600_000
    # After this time without trouble, the wait before a retest is back at the shortest.
    forgive_ms: Count = 7 * 24 * 3_600_000
    # At most this share of the nodes, but always one: more at once is not the nodes' fault.
    quarantined_milli_max: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 250
    # A move must gain this many times its cost, since the remaining time is a guess.
    move_margin_milli: Annotated[int, msgspec.Meta(ge=1000, le=1_000_000)] = 2000

"""What is known of a node's health: figures of a check, their verdict, the numbers that judge."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

FIGURES_MAX = 512
TEXT_MAX = 300
FAULTS_MAX = 16

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]
Milli = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class Standing(enum.StrEnum):
    """What is thought of a node's work, apart from whether it can be reached."""

    OK = "ok"
    SUSPECT = "suspect"  # a check of it is wanted; its jobs go on
    QUARANTINED = "quarantined"  # nothing new, and gangs leave it; retested now and then


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the probe measured. Figures are whole numbers with their unit last in the name; those
    of GPUs begin with `gpuN_`. A fault needs no baseline: it fails the check by itself."""

    id: str
    busy: bool = False  # members ran on the node meanwhile: comparable with busy nodes only
    figures: Annotated[dict[str, int], msgspec.Meta(max_length=FIGURES_MAX)] = {}
    faults: Annotated[tuple[str, ...], msgspec.Meta(max_length=FAULTS_MAX)] = ()
    notes: tuple[str, ...] = ()  # what could not be measured, and why
    took_ms: int = 0
    error: str = ""  # the probe itself failed: says nothing of the node


class Stand(msgspec.Struct, frozen=True, kw_only=True):
    """One figure beside what is usual. `usual` is None where nothing is known to compare with."""

    figure: str
    value: int
    usual: int | None = None
    limit: int | None = None
    of: int = 0  # so many nodes, or earlier checks of this one, make up the usual
    own: bool = False
    low: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a check says of a node: every figure beside the usual one, and the reason in short."""

    passed: bool
    why: str
    stands: tuple[Stand, ...] = ()


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """`proven`: it is known to follow the node, so a passed check need not be asked twice."""

    at_ms: int
    why: str
    job: str = ""
    attempt: int = 0
    member: int = -1
    proven: bool = False


class StandingChange(msgspec.Struct, frozen=True):
    at_ms: int
    standing: Standing
    why: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All that is remembered of a node's health."""

    standing: Standing = Standing.OK
    since_ms: int = 0
    why: str = ""
    suspicions: tuple[Suspicion, ...] = ()
    strikes: int = 0  # quarantines and failed retests since it was forgiven
    retest_ms: int = 0  # when to check a quarantined node again
    check_since_ms: int = -1  # a check is wanted since then; -1: none
    faulty: bool = False  # in quarantine because it cannot start or keep anything
    history: tuple[StandingChange, ...] = ()


class HealthRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers by which slow, hung and failing nodes are told; docs/health.md says why."""

    # A member is slow while the gang's median own time per step, over its own, stays below this;
    # it has recovered when it is above the other again.
    slow_milli: Milli = 850
    well_milli: Milli = 900
    # A window has at least so many steps of every member, and lasts at least so long.
    window_steps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 4
    window_ms: Count = 3_000
    windows_in_a_row: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    # The first steps of a process compile, connect and fill caches.
    warm_steps: Count = 5
    # A slow member is also this many times further from the median than windows usually scatter.
    noise_factor: Annotated[int, msgspec.Meta(ge=1, le=100)] = 4

    # No step for the largest of these is a hang: the floor, so many usual steps, twice the longest
    # pause seen. Before the first steps, and while a member says that it is busy, the patient one.
    hang_floor_ms: Count = 60_000
    hang_steps: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] = 20
    hang_patient_ms: Count = 1_800_000

    # A second, independent suspicion within this time quarantines a node.
    suspicion_ms: Count = 24 * 3_600_000
    # A check not answered by then is given up, and the suspicion stays on the book.
    check_wait_ms: Count = 120_000
    retest_ms: Annotated[int, msgspec.Meta(ge=1)] = 600_000
    retest_ms_max: Count = 24 * 3_600_000
    # After so long without trouble, the wait before a retest begins at the shortest again.
    forgive_ms: Count = 7 * 24 * 3_600_000
    # No more than this share of the nodes, but always one: more at once is not the nodes' fault.
    quarantined_milli_max: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 250
    # A move must gain so many times what it costs, since the remaining time is a guess.
    move_margin_milli: Annotated[int, msgspec.Meta(ge=1000, le=1_000_000)] = 2000

"""What limits a job's steps is named, with the figures that show it."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.answers.bound import divided, judge, shares_of
from shoal.core.answers.explain import attempts_of, no_tail
from shoal.core.books.spending import window
from shoal.model.bound import BoundKind
from shoal.model.fabric import Fabric, Weak
from shoal.model.progress import Spent
from tests.core.training import Training

NODES = ["n1", "n2", "n3", "n4"]
STEPS = 50


def spent(compute: int, wait: int = 0, transfer: int = 0, **more: int) -> Spent:
    """In milliseconds of a step."""
    numbers = {"compute_us": compute, "wait_us": wait, "transfer_us": transfer, **more}
    return Spent(steps=STEPS, **{name: ms * 1000 * STEPS for name, ms in numbers.items()})


@pytest.mark.parametrize(
    ("members", "kind", "words"),
    [
        ([spent(490, 40, 40, data_us=10)] * 4, "compute", "90 % of each step is the job's own"),
        (
            [spent(320, 222, 220), spent(322, 220, 220), spent(300, 240, 220)],
            "network",
            "40 % of each step is spent in collectives (220 of 541 ms, last 50 steps); member 1 on "
            "n2 waits least, and it waits 220 ms: the network is the cause",
        ),
        ([spent(200, data_us=340)], "input", "62 % of each step is spent waiting for data (340 of"),
        ([spent(200, data_us=340, stall_us=300)], "storage", "waits for data while its processes"),
        ([spent(200, data_us=340, stall_us=100)], "input", "waiting for data"),
        ([spent(200, save_us=100)], "storage", "saves block it for 100 ms of each step"),
        (
            [spent(100, 105, 100), spent(100, 105, 100), spent(200, 5, 5), spent(100, 105, 100)],
            "imbalance",
            "member 2 on n3 costs the others 48 % of each step (100 of 205 ms, last 50 steps); a "
            "step has 200 ms of its own work there and 100 ms on most others",
        ),
        (
            [spent(20, 105, 100), spent(20, 5, 5, data_us=100)],
            "imbalance",
            "100 ms of waiting for data there and 0.0 ms on most others",
        ),
        # Another one is late each time: all wait, but now and then hardly.
        ([spent(100, 60, 4), spent(100, 62, 5)], "imbalance", "no single member is the cause"),
        # An agent or script that does not report the quickest: the least wait stands for it.
        ([spent(100, 60), spent(100, 62)], "network", "37 % of each step"),
    ],
)  # fmt: skip
def test_the_verdict_is_in_plain_words_with_its_figures(
    members: list[Spent], kind: str, words: str
) -> None:
    found = judge(dict(enumerate(members)), NODES)
    assert found is not None
    assert (found.kind.value, found.steps) == (kind, STEPS)
    assert words in found.text
    shares = msgspec.structs.astuple(found.shares)
    assert sum(shares) == 1000 and min(shares) >= 0


def test_too_few_steps_and_counts_without_times_are_no_verdict() -> None:
    assert judge({}, NODES) is None
    assert judge({0: Spent(steps=STEPS)}, NODES) is None
    assert judge({0: Spent(steps=3, compute_us=1_000_000)}, NODES) is None
    gang = divided({0: Spent(steps=1, compute_us=1)})
    assert gang is not None and shares_of(gang).compute_milli == 1000


def test_how_busy_gpus_are_is_evidence() -> None:
    idle = judge({0: spent(100)}, NODES, busy_milli=300)
    assert idle is not None and idle.kind is BoundKind.COMPUTE
    assert idle.evidence[-1].endswith("busy 30 % of the time, so a part of its own work is on CPUs")
    fed = judge({0: spent(100, data_us=200)}, NODES, busy_milli=300)
    assert fed is not None and fed.evidence[-1] == "its GPUs are busy 30 % of the time"


def test_what_a_tour_measured_is_evidence_about_the_network() -> None:
    weak = Weak(node="n2", peer="n1", mbs=90, usual_mbs=1200)
    gang = {number: spent(100, 90, 90) for number in range(2)}
    slow = judge(gang, ["n1", "n2"], fabric=Fabric(usual_mbs=1200, weak=(weak,)))
    words = "a tour measured only 90 MB/s on the link between n2 and n1, where 1200 MB/s are usual"
    assert slow is not None and slow.evidence[-1] == words
    fabric = Fabric(usual_mbs=1200, weak=(weak,), places={"n1": "g1", "n2": "g1", "n3": "g1"})
    elsewhere = judge(gang, ["n1", "n3"], fabric=fabric)
    assert elsewhere is not None and "none of its links as weak" in elsewhere.evidence[-1]
    never = judge(gang, ["n1", "n3"], fabric=Fabric())
    assert never is not None and not any("tour" in text for text in never.evidence)


def test_a_window_leaves_out_the_first_steps_and_those_of_long_ago() -> None:
    made = Training(nodes="ab", gpus=1)
    job = made.run(members=2, gpus=1)
    made.walk(job, 5, slow={0: 9})  # it compiles
    watch = made.state.heard.watches[job]
    assert window(watch.recent) == {}
    made.walk(job, 60)
    made.walk(job, 60, slow={1: 3})
    found = judge(window(watch.recent), made.nodes_of(job))
    assert found is not None and found.kind is BoundKind.IMBALANCE
    assert "member 1 on" in found.text and 25 <= found.steps <= 60


def test_a_job_that_has_ended_still_says_what_limited_it() -> None:
    made = Training(nodes="ab", gpus=1)
    job = made.run(members=2, gpus=1)
    made.walk(job, 20, data_us=90_000_000)
    for member in (0, 1):
        made.end(job, 0, member=member)
    (one,) = attempts_of(made.log, no_tail)
    assert one.bound is not None and one.bound.kind is BoundKind.INPUT
    assert "all 20 steps" in one.bound.text


def test_a_process_that_starts_again_begins_a_new_window() -> None:
    made = Training(nodes="a", gpus=1)
    job = made.run(gpus=1)
    made.walk(job, 20)
    ref = next(iter(made.beats))
    made.beats[ref] = msgspec.structs.replace(made.beats[ref], steps=0, compute_us=0)
    made.walk(job, 3)
    assert window(made.state.heard.watches[job].recent) == {}

"""The world itself: exact where nothing goes wrong, and honest about what does."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from storm.contacts import Contacts
from storm.controller import Moment
from storm.network import Network
from storm.node import Fate
from storm.timeline import Timeline
from storm.truth import Truth
from storm.world import World

from shoal.core.nodebook import NodeBook
from shoal.model.commands import Launch
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Answer, Cancel, Nothing, Submit

POLICY = Policy(silent_after_ms=3_000, grace_ms=10_000)


def lasting(launch: Launch) -> Fate:
    """The command line says how long it runs."""
    return Fate(int(launch.argv[1]))


def new_world(*, nodes: int = 1, network: Network | None = None, fates: Any = lasting) -> World:
    timeline = Timeline()
    world = World(
        POLICY, fates, timeline=timeline, network=network, witness=Truth(timeline, POLICY)
    )
    world.start_controller()
    for number in range(nodes):
        world.add_node(NodeSpec(id=f"n{number}", gpus=1, cpu_milli=4_000, memory_mb=100))
    world.timeline.run(10)
    return world


def submit(world: World, run_ms: int, **fields: Any) -> list[Answer]:
    answers: list[Answer] = []
    spec = msgspec.convert({"command": ["work", str(run_ms)], "gpus": 1, **fields}, JobSpec)
    world.ask(Submit(spec, f"key-{world.timeline.now_ms}"), answers.append)
    return answers


def story(world: World) -> list[tuple[int, str]]:
    """What the log says, and when, about jobs."""
    events = [json.loads(line) for line in world.disk.log]
    return [(event["at_ms"], event["event"]) for event in events if "job" in event]


def test_actions_of_one_instant_happen_in_the_order_in_which_they_were_planned() -> None:
    timeline, done = Timeline(), []
    for name in "abc":
        timeline.after(5, lambda name=name: done.append(name))  # type: ignore[misc]
    timeline.after(1, lambda: timeline.after(4, lambda: done.append("d")))
    timeline.run(5)
    assert done == ["a", "b", "c", "d"]
    assert timeline.now_ms == 5


def test_without_faults_a_history_is_known_to_the_millisecond() -> None:
    world = new_world()
    submit(world, run_ms=500)
    submit(world, run_ms=500)
    world.timeline.run(3_000)
    # A message takes 1 ms: Launch, the report that it lives, later the report that it ended.
    assert story(world) == [
        (10, "JobSubmitted"),
        (10, "JobPlaced"),
        (12, "JobRunning"),
        (512, "MemberExited"),
        (512, "JobFinished"),
    ]


def test_one_key_is_one_job_however_often_it_is_sent() -> None:
    world = new_world()
    first, second = submit(world, 100), submit(world, 100)
    world.timeline.run(1_000)
    third: list[Answer] = []
    world.ask(Submit(JobSpec(command=("work", "100")), "key-10"), third.append)
    world.timeline.run(1_100)
    answers = [*first, *second, *third]
    assert [answer.id for answer in answers if isinstance(answer, Accepted)] == ["j1"] * 3


@pytest.mark.parametrize("moment", list(Moment))
def test_a_controller_may_die_at_any_moment_and_no_job_notices(moment: Moment) -> None:
    world = new_world(nodes=2)
    submit(world, run_ms=2_000, members=2)
    world.timeline.run(1_000)
    world.crash_controller(moment, down_ms=300)
    world.ask(Nothing(), lambda _: None)  # at rest there is no step in which it could die
    world.timeline.run(10_000)
    assert story(world)[-3:] == [
        (2_012, "MemberExited"),
        (2_012, "MemberExited"),
        (2_012, "JobFinished"),
    ]


def test_what_was_not_stored_when_the_controller_died_is_asked_again_and_happens_once() -> None:
    world = new_world()
    world.crash_controller(Moment.DECIDED, down_ms=100)
    lost = submit(world, run_ms=100)
    world.timeline.run(200)
    assert (lost, story(world)) == ([], [])
    submit(world, run_ms=100)
    world.timeline.run(1_000)
    assert [name for _, name in story(world)].count("JobFinished") == 1


def test_a_job_outlives_a_link_that_is_cut_for_less_than_the_grace_time() -> None:
    network = CutNetwork()
    world = new_world(nodes=2, network=network)
    submit(world, run_ms=8_000)
    world.timeline.run(1_000)
    network.cut = "n0"
    world.timeline.run(9_500)
    network.cut = ""
    world.timeline.run(12_000)
    assert [name for _, name in story(world)] == [
        "JobSubmitted",
        "JobPlaced",
        "JobRunning",
        "JobBegan",
        "MemberExited",
        "JobFinished",
    ]


def test_a_job_that_moved_because_its_link_was_cut_too_long_is_ended_where_it_was() -> None:
    network = CutNetwork()
    world = new_world(nodes=2, network=network)
    submit(world, run_ms=60_000)
    world.timeline.run(1_000)
    network.cut = "n0"
    world.timeline.run(15_000)
    alive = {name: list(machine.processes) for name, machine in world.machines.items()}
    assert alive == {"n0": [("j1", 1, 0)], "n1": [("j1", 2, 0)]}
    network.cut = ""
    world.timeline.run(20_000)
    assert list(world.machines["n0"].processes) == []
    assert [name for _, name in story(world)].count("JobPlaced") == 2


def test_a_process_that_takes_its_time_to_stop_causes_no_storm_of_messages() -> None:
    def stubborn(_: Launch) -> Fate:
        return Fate(None, stopping_ms=None)

    world = new_world(fates=stubborn)
    submit(world, run_ms=0, stop_grace_ms=20_000)
    world.timeline.run(1_000)
    steps = world.controller.steps
    world.ask(Cancel("j1"), lambda _: None)
    world.timeline.run(20_900)
    heartbeats = 20
    assert world.controller.steps - steps <= heartbeats + 5
    world.timeline.run(22_000)
    assert story(world)[-1][1] == "JobFinished"


class CutNetwork(Network):
    """Nothing gets through to or from the node whose link is cut."""

    cut = ""

    def to_controller(self, node: str) -> tuple[int, ...]:
        return () if node == self.cut else (1,)

    def to_node(self, node: str) -> tuple[int, ...]:
        return () if node == self.cut else (1,)


def test_a_report_that_waited_while_the_controller_recovered_is_old_once_it_is_stored() -> None:
    """A copy of it that comes later is not a sign of life."""
    contacts, book = Contacts(), NodeBook(NodeSpec(id="n", cpu_milli=1, memory_mb=1), incarnation=1)
    report = book.report()
    contacts.heard(report, 100)
    contacts.began(600)
    contacts.stored(["n"])
    assert not contacts.heard(report, 1_000)
    assert contacts.silent_ms("n", 5_000) == 4_400

"""Storage checks: one node after the other, then all at the same time."""

from __future__ import annotations

from shoal.api.fabric import storage_view
from shoal.core.features.storage import ALONE_MAX
from shoal.model.commands import Check
from shoal.model.health import CheckResult
from shoal.model.policy import Policy
from shoal.model.report import Accepted, CheckNetwork, Refused
from shoal.model.storage import READ_MBS, SMALL_PER_S, WRITE_MBS, CheckStorage
from tests.core.build import Cluster


def cluster(*names: str) -> Cluster:
    made = Cluster(Policy(silent_after_ms=10**9, grace_ms=10**9))
    for name in names:
        made.join(name, gpus=1)
    return made


def asked(made: Cluster) -> dict[str, Check]:
    checks = [one for one in made.last.commands if isinstance(one, Check) and one.storage]
    return {one.node: one for one in checks}


def answer(made: Cluster, write: int) -> None:
    for name, check in asked(made).items():
        figures = {WRITE_MBS: write, READ_MBS: 2 * write, SMALL_PER_S: 50}
        made.books[name].measured(CheckResult(id=check.id, figures=figures))
    made.hear(*asked(made))


def test_each_node_measures_alone_and_then_all_begin_at_the_same_moment() -> None:
    made = cluster("a", "b", "c")
    begun = made.ask(CheckStorage("/data"))
    assert isinstance(begun, Accepted)
    for name in ("a", "b", "c"):
        [check] = asked(made).values()
        assert (check.node, check.storage.at_ms) == (name, 0)  # type: ignore[union-attr]
        answer(made, 300)
    together = asked(made)
    assert list(together) == ["a", "b", "c"]
    [moment] = {one.storage.at_ms for one in together.values() if one.storage}
    assert moment > made.now_ms
    answer(made, 100)
    known = made.state.heard.storing
    assert known is not None
    view = storage_view(known)
    assert view.ended_ms is not None
    assert [one.write_mbs for one in view.alone] == [300, 300, 300]
    assert [one.write_mbs for one in view.together] == [100, 100, 100]
    assert asked(made) == {}


def test_a_node_that_does_not_answer_costs_its_time_and_not_the_check() -> None:
    made = cluster("a", "b")
    made.ask(CheckStorage("/data"))
    known = made.state.heard.storing
    assert known is not None
    made.wait(known.turn_until_ms)
    made.step()
    assert list(asked(made)) == ["b"]
    answer(made, 300)
    made.books["b"].measured(CheckResult(id=asked(made)["b"].id, error="there is no folder /data"))
    made.hear("b")
    made.wait(known.turn_until_ms)
    made.step()
    view = storage_view(known)
    assert [one.problem for one in view.together] == [
        "it did not answer; see: shoal nodes",
        "there is no folder /data",
    ]


def test_of_many_nodes_some_measure_alone_and_one_node_measures_once() -> None:
    made = cluster(*(f"n{number}" for number in range(20)))
    made.ask(CheckStorage("/data"))
    known = made.state.heard.storing
    assert known is not None
    assert len(known.alone) <= ALONE_MAX
    assert set(known.alone) < set(known.nodes)
    single = cluster("a")
    single.ask(CheckStorage("s3://bucket/runs"))
    answer(single, 100)
    known = single.state.heard.storing
    assert known is not None
    assert known.ended_ms is not None


def test_what_cannot_be_measured_is_refused() -> None:
    made = cluster("a", "b")
    for target in (
        "data",
        "/a/../etc",
        "file:///etc",
        "http://host/x",
        "s3://",
        "s3://k:v@b/x",
        "simplecache::s3://b",
        "",
        "/a\nb",
    ):
        assert isinstance(made.ask(CheckStorage(target)), Refused), target
    assert isinstance(made.ask(CheckStorage("/data", ("z",))), Refused)
    made.ask(CheckNetwork())
    busy = made.ask(CheckStorage("/data"))
    assert isinstance(busy, Refused)
    assert "a tour of the network is under way" in busy.message


def test_the_same_storage_is_measured_once_and_another_has_to_wait() -> None:
    made = cluster("a", "b")
    first, second = made.ask(CheckStorage("/data")), made.ask(CheckStorage("/data"))
    assert isinstance(first, Accepted)
    assert isinstance(second, Accepted)
    assert first.id == second.id
    assert isinstance(made.ask(CheckStorage("/other")), Refused)
    some = made.ask(CheckStorage("/data", ("a",)))
    assert isinstance(some, Refused), "the rates of other nodes are not what was asked for"

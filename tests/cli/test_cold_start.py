"""Where the seconds of a replica's start went: what was heard has its time, the rest is "not
measured"."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shoal.agent import supplies
from shoal.agent.images.pull import Images
from shoal.agent.keeping.url_volumes import UrlVolumes
from shoal.agent.packages import Packages
from shoal.core.features.service.cold import _kind, complete
from shoal.core.state.load import restore
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.tokens import RoutedLoad, TokenLoad
from tests.cli.test_explain import story, text
from tests.core.serving import Serving

PULLING, FETCHING = "is pulling big:1: 2.0 of 9.0 GB", "is fetching volume data: 0.5 of 5.0 MB"


class Slow(Serving):
    """Replicas need something before they start."""

    def __init__(self) -> None:
        super().__init__(nodes=1)
        self.gets = PULLING
        self.books["a"].listens = {}

    def _act(self) -> bool:
        known, acted = len(self.orders), super()._act()
        for order in self.orders[known:]:
            if isinstance(order, Launch) and self.gets:
                self.books["a"].gets(order.ref, self.gets)
        return acted

    def told(self, job: str = "j1") -> str:
        found = story(self, job, {})
        cold = found.attempts[-1].cold
        assert cold is not None
        if self.job(job).active:
            complete(self.state, self.job(job), cold)
        return text(found)


def started() -> tuple[Slow, MemberRef]:
    """Its image took 3 s, its volumes 4 s and its environment 1 s; it listened 2 s later."""
    made, ref = Slow(), MemberRef("j1", 1, 0)
    book = made.books["a"]
    made.broken = {"v1"}
    made.serve()
    made.tick(6)
    for what, ticks in ((FETCHING, 8), ("is building its environment: see its log", 2)):
        book.gets(ref, what)
        made.step(nodes=(book.report(),))
        made.tick(ticks)
    book.begins(ref)
    made.step(nodes=(book.report(),))
    made.tick(4)
    book.heeds(ref, listens=True)
    made.step(nodes=(book.report(),))
    return made, ref


def test_each_second_of_a_start_is_told_once() -> None:
    made, _ = started()
    made.tick(3)
    assert "0ms  waiting for room" in made.told()
    assert "probe" not in made.told(), "it is not ready yet"
    made.broken = set()
    made.tick(3)
    load = made.state.heard.loads["chat"]
    tokens = TokenLoad(replicas={"j1": RoutedLoad(first_ms=730)})
    made.state.heard.loads["chat"] = msgspec.structs.replace(load, tokens=tokens)
    page = made.told()
    for row in (
        "3s  image",
        "4s  volumes",
        "1s  environment",
        "0ms  starting its process",
        "2s  until it listened on its port",
        "2s  until its probe was answered",
        "500ms  until the gateway served it",
        "730ms  until the first token of its first answer",
    ):
        assert f" {row}\n" in page, page
    placed, ready = made.job("j1").placed_ms, made.service().ready["j1"]
    assert placed is not None and ready - placed == 12_000


def test_what_a_controller_did_not_hear_is_not_measured() -> None:
    made, _ = started()
    made.state = restore(made.state.snapshot())  # as after a restart of the controller
    made.broken = set()
    made.tick(2)
    page = made.told()
    assert "not measured  image and volumes" in page
    assert "8s  preparing and starting its process" in page
    assert "not measured  until it listened on its port" in page
    assert "2.5s  until its probe was answered" in page
    assert "not measured  until the gateway served it" in page
    assert "not measured  until the first token" in page


def test_what_is_heard_of_a_start_goes_with_the_replica_and_a_plain_job_has_none() -> None:
    made, ref = started()
    assert list(made.state.heard.starts) == ["j1"]
    made.gets = ""
    made.books["a"].exited(ref, 1, "it crashed")
    made.tick(20)
    starts = made.state.heard.starts
    assert "j1" not in starts and len(starts) == 1  # another one in its place
    assert story(made, "j1", {}).attempts[-1].cold is not None
    made.stop()
    made.tick(10)
    assert starts == {}
    plain = made.run()
    assert starts == {} and story(made, plain, {}).attempts[-1].cold is None


def test_the_words_that_agents_use_have_their_kind() -> None:
    """The core reads what `Supplies.lacks` says."""
    ref, source = MemberRef("j1", 1, 0), "s3://bucket/data"
    launch = Launch(
        node="a",
        incarnation=1,
        ref=ref,
        argv=("serve",),
        env={},
        stop_grace_ms=1,
        image="big:1",
        volumes=(f"{source}:data",),
    )

    def said(part: Any, asked: Any, **fields: Any) -> str:
        return part.progress(SimpleNamespace(**fields), asked)  # type: ignore[no-any-return]

    transfers = [
        {"p": SimpleNamespace(unpacking=one, size=5, got=1, sharing=None)} for one in (0, 1)
    ]
    fetches = [{("j1", "1", source): SimpleNamespace(size=one, got=1)} for one in (None, 5)]
    nothing: list[dict[Any, Any]] = [{}]
    words = [said(Packages, "p", _transfers=one) for one in nothing + transfers]
    assert {_kind(one) for one in words} == {"working directory"} and len(set(words)) == 3
    words = [said(UrlVolumes, launch, _fetches=one) for one in nothing + fetches]
    assert {_kind(one) for one in words} == {"volumes"} and len(set(words)) == 3
    assert _kind(said(Images, launch, _progress={})) == "image"
    builds = SimpleNamespace(environments=SimpleNamespace(here=lambda _: None))
    asked = SimpleNamespace(package="", requirements="torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supplies, "MOUNTS", None)
        assert _kind(supplies.Supplies.lacks(cast(Any, builds), cast(Any, asked))) == "environment"
    assert _kind("is preparing its share of a GPU") == ""

"""A policy is tried out before it is accepted; what fails later is replaced, with an alarm."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.control import tryout
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.store.sqlite import SqliteStore
from shoal.core.policies import SHIPPED
from shoal.core.state.state import State
from shoal.model.policy import Policy, Tenant, problem_with
from shoal.model.report import Accepted, SetPolicy, Submit
from tests.control.test_loop import SPEC, BookEngine, HandClock, Rig

MODULE = """
import os, sys, time
from shoal.core.scheduling.order import Ordering
from shoal.core.scheduling.score import PLACEMENTS

good = PLACEMENTS["best-fit"]
numbers = Ordering(job=lambda job: job.number)
raises = Ordering(job=lambda job: 1 / 0)

def leaves(*args): os._exit(7)
def exits(*args): sys.exit(0)
def hangs(*args): time.sleep(3600)
def turns(*args):
    if os.path.exists(os.environ["SHOAL_TEST_TURNED"]):
        raise ValueError("it has turned bad")
    return good(*args)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's module, and the file whose being there makes `turns` fail."""
    (tmp_path / "mine_of_a_test.py").write_text(MODULE)
    turned = tmp_path / "turned"
    monkeypatch.setenv("SHOAL_TEST_TURNED", str(turned))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("shoal.control.loop.RECOVERY_PAUSE_S", 0)
    yield turned
    sys.modules.pop("mine_of_a_test", None)


def tried(policy: Policy) -> str | None:
    return asyncio.run(tryout.problem(policy, State(), 1_000))


@pytest.mark.parametrize("policy", SHIPPED.values(), ids=SHIPPED)
def test_every_shipped_policy_passes(policy: Policy) -> None:
    assert tried(policy) is None


def test_functions_of_users_that_work_pass(module: Path) -> None:
    assert tried(Policy(placement="mine_of_a_test:good", order="mine_of_a_test:numbers")) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"placement": "os:getcwd"}, "placement: os:getcwd fails"),
        ({"placement": "mine_of_a_test:absent"}, "placement: mine_of_a_test:absent cannot be"),
        ({"placement": "no.such.module:f"}, "placement: no.such.module:f cannot be loaded"),
        ({"order": "mine_of_a_test:raises"}, "order: mine_of_a_test:raises fails"),
        ({"placement": "mine_of_a_test:leaves"}, "policy: the process that tried it out ended"),
        ({"placement": "mine_of_a_test:exits"}, "policy: the process that tried it out"),
        ({"silent_after_ms": 0}, "silent_after_ms: every node would be silent"),
        ({"port_first": 65_000, "port_count": 1_000}, "port_count: ports end at 65535"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_its_field(
    module: Path, fields: dict[str, object], expected: str
) -> None:
    wrong = tried(Policy(**fields))  # type: ignore[arg-type]
    assert wrong is not None
    assert wrong.startswith(expected)


def test_a_function_that_hangs_is_given_up(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tryout, "TRYOUT_S_MAX", 0.5)
    wrong = tried(Policy(placement="mine_of_a_test:hangs"))
    assert wrong is not None
    assert "did not finish" in wrong


def test_a_function_that_fails_later_is_replaced_and_the_cluster_goes_on(
    module: Path, tmp_path: Path
) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        await rig.loop.request(SetPolicy(Policy(placement="mine_of_a_test:turns")))
        assert await rig.loop.request(Submit(SPEC, "before")) == Accepted("j1")
        assert not rig.loop.alarms.texts
        module.touch()  # noqa: ASYNC240
        for attempt in range(10):
            try:
                answer = await rig.loop.request(Submit(SPEC, "after"))
                break
            except ValueError:
                assert attempt < 5
        assert isinstance(answer, Accepted)
        alarm = " ".join(rig.loop.alarms.texts)
        assert "mine_of_a_test:turns is replaced by shoal" in alarm
        assert "it has turned bad" in alarm
        module.unlink()  # noqa: ASYNC240
        await rig.loop.request(SetPolicy(Policy(name="plain")))
        assert not rig.loop.alarms.texts

    rig.run(work())


def test_a_log_whose_policy_names_what_is_gone_still_loads(module: Path, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    policy = Policy(placement="mine_of_a_test:good", order="mine_of_a_test:numbers")

    async def work() -> None:
        await rig.loop.request(SetPolicy(policy))
        await rig.loop.request(Submit(SPEC, "k"))

    rig.run(work())
    del sys.modules["mine_of_a_test"]  # another process, which cannot import the module
    (tmp_path / "mine_of_a_test.py").unlink()
    again = Rig(tmp_path)
    again.loop = ControlLoop(
        SqliteStore(tmp_path / "db"), BookEngine(), HandClock(), None, LogStore(tmp_path / "logs")
    )
    assert again.loop.policy == policy
    assert "j1" in again.loop.state.jobs

    async def more() -> None:
        assert await again.loop.request(Submit(SPEC, "next")) == Accepted("j2")

    again.engine = again.loop._engine  # type: ignore[assignment]
    again.run(more())
    assert "order mine_of_a_test:numbers is replaced by fair" in again.loop.alarms.texts[0]


def test_numbers_have_bounds() -> None:
    with pytest.raises(msgspec.ValidationError, match="half_life_ms"):
        msgspec.json.decode(b'{"half_life_ms": 1%s}' % (b"0" * 400), type=Policy)


def test_trees_of_tenants_are_checked_quickly() -> None:
    chain = tuple(Tenant(name=f"t{n}", parent=f"t{n - 1}" if n else "") for n in range(5_000))
    assert problem_with(Policy(tenants=chain)) is None
    circle = (*chain[1:], Tenant(name="t0", parent="t4999"))
    assert "is its own ancestor" in (problem_with(Policy(tenants=circle)) or "")

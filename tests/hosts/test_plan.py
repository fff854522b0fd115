"""What has to be done on a host follows from what is found there."""

from __future__ import annotations

import msgspec
import pytest

from shoal.hosts.spec import Act, Facts, HostSpec, Receipt, Software, Unfit, plan

SOFTWARE = Software("0.1.0", "abc")
SPEC = HostSpec(host="10.0.0.2")
WANTED = Receipt(SOFTWARE, ("join", "https://10.0.0.1:7700", "--name", "10.0.0.2"))
BARE = Facts(home="/root/.shoal", python="/usr/bin/python3.11", version="3.11", free_mb=50_000)
DONE = msgspec.structs.replace(BARE, shoal="0.1.0", receipt=WANTED)


def test_a_bare_host_gets_everything_and_one_that_is_done_nothing() -> None:
    assert plan(SPEC, WANTED, BARE, in_cluster=False) == (Act.INSTALL, Act.JOIN)
    assert plan(SPEC, WANTED, DONE, in_cluster=True) == ()


def test_a_node_that_the_cluster_has_lost_joins_again_with_what_it_has() -> None:
    assert plan(SPEC, WANTED, DONE, in_cluster=False) == (Act.LEAVE, Act.JOIN)


def test_another_shape_or_another_name_is_a_new_join() -> None:
    moved = Receipt(SOFTWARE, (*WANTED.join, "--place", "b1/r2"))
    assert plan(SPEC, moved, DONE, in_cluster=True) == (Act.LEAVE, Act.JOIN)


def test_other_software_is_installed_when_the_node_has_left() -> None:
    newer = Receipt(msgspec.structs.replace(SOFTWARE, digest="def"), WANTED.join)
    assert plan(SPEC, newer, DONE, in_cluster=True) == (Act.LEAVE, Act.INSTALL, Act.JOIN)
    broken = msgspec.structs.replace(DONE, shoal="")
    assert plan(SPEC, WANTED, broken, in_cluster=False) == (Act.LEAVE, Act.INSTALL, Act.JOIN)


def test_an_interpreter_of_its_own_is_used_as_it_is() -> None:
    spec = HostSpec(host="10.0.0.2", python="/opt/bin/python")
    wanted = Receipt(msgspec.structs.replace(SOFTWARE, digest=""), WANTED.join)
    facts = msgspec.structs.replace(BARE, shoal="0.1.0")
    assert plan(spec, wanted, facts, in_cluster=False) == (Act.JOIN,)
    other = msgspec.structs.replace(facts, shoal="0.2.0", version="3.13")  # joining decides
    assert plan(spec, wanted, other, in_cluster=False) == (Act.JOIN,)
    for field, value, words in (
        ("shoal", "", "has no Shoal there"),
        ("version", "3.9", "is Python 3.9 there; use 3.11 or newer"),
        ("python", "", "is not a working interpreter there"),
    ):
        wrong = msgspec.structs.replace(facts, **{field: value})
        with pytest.raises(Unfit, match=words):
            plan(spec, wanted, wrong, in_cluster=False)


def test_a_host_without_python_or_room_is_told_what_it_needs() -> None:
    other = msgspec.structs.replace(BARE, python="", found="3.9 (python3)")
    with pytest.raises(Unfit, match=r"no Python 3.11 or newer; it has 3.9 \(python3\)"):
        plan(SPEC, WANTED, other, in_cluster=False)
    full = msgspec.structs.replace(BARE, free_mb=10)
    with pytest.raises(Unfit, match="10 MB are free"):
        plan(SPEC, WANTED, full, in_cluster=False)

"""Who may join: every refusal names what differs and what to do about it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.engines.ray.admission import lack_of_disk, refusal, resolve
from shoal.engines.ray.messages import Facts, KnownNode
from shoal.ports import EngineError
from tests.cli.conftest import Shoal, assert_one_clear_line, shoal
from tests.needs import need

__all__ = ["shoal"]  # a fixture

MINE = ("1.0", "2.60.0", "3.11.7")
FACTS = Facts(
    shoal="1.0",
    ray="2.60.0",
    python="3.11.9",
    nodes={"n1": KnownNode("10.0.0.1", 17)},
)


def test_one_that_suits_is_let_in() -> None:
    assert refusal(FACTS, MINE, "n2", 0) == ""


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("ray", "2.59.0", "Ray is 2.60.0 here and 2.59.0 on the head: pip install ray==2.59.0"),
        ("python", "3.12.1", "Python is 3.11.7 here and 3.12.1 on the head"),
        ("shoal", "2.0", "Shoal is 1.0 here and 2.0 on the head"),
    ],
)
def test_other_versions_are_named(field: str, value: str, words: str) -> None:
    assert words in refusal(msgspec.structs.replace(FACTS, **{field: value}), MINE, "n2", 0)


def test_a_name_is_taken_unless_it_is_our_own_of_last_time() -> None:
    assert "the name n1 is taken by the machine at 10.0.0.1" in refusal(FACTS, MINE, "n1", 0)
    assert refusal(FACTS, MINE, "n1", 17) == ""


def test_an_unknown_host_is_told() -> None:
    with pytest.raises(EngineError, match="there is no host 'no-such-host"):
        resolve("no-such-host.invalid", 7701)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    assert lack_of_disk(Path("/proc")) != ""  # holds nothing
    assert lack_of_disk(tmp_path) == "" or "are free at" in lack_of_disk(tmp_path)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("join", "here"), "HOST:PORT: write HOST:PORT"),
        (("join", "h:99999"), "write HOST:PORT"),
        (("join", "h:1", "--token-file", "/no/such"), "--token-file: cannot read /no/such"),
        (("up", "--engine", "slurp"), "--engine: must be local or ray"),
        (("up", "--address", "h:1"), "--address: has no effect without --engine ray"),
        (("up", "--engine", "ray", "--nodes", "3"), "--nodes: must be 1 or 0"),
        (("up", "--engine", "ray", "--topology", "2x2"), "--topology: is for virtual nodes"),
        (("up", "--engine", "ray", "--node-ip", "me"), "--node-ip: 'me' is not an address"),
    ],
)
def test_bad_input_is_one_clear_line(shoal: Shoal, args: tuple[str, ...], words: str) -> None:
    need("ray")
    result = shoal(*args)
    assert_one_clear_line(result)
    assert words in result.err


def test_who_is_in_no_cluster_has_nothing_to_leave(shoal: Shoal) -> None:
    result = shoal("leave")
    assert result.code == 0
    assert result.out.endswith("nothing to do\n")

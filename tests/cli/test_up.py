"""`shoal up` and `shoal down`, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Shoal, assert_one_clear_line


def test_a_cluster_comes_up_comes_back_and_goes_down(shoal: Shoal, tmp_path: Path) -> None:
    try:
        first = shoal("up", "--nodes", "2", "--gpus", "4", "--topology", "2x1", "--port", "0")
        assert first.code == 0, first.err
        assert "2 nodes, 8 GPUs" in first.out
        assert "is already up" in shoal("up").out
        same = shoal("up", "--nodes", "2", "--gpus", "4", "--topology", "2x1", "--json")
        assert json.loads(same.out)["already"] is True
        assert_one_clear_line(shoal("up", "--nodes", "3"))
        places = [node["place"] for node in json.loads(shoal("nodes", "--json").out)]
        assert places == ["b1/r1", "b2/r1"]
        assert "3 processes stopped" in shoal("down").out
        again = json.loads(shoal("up", "--json").out)
        assert [node["id"] for node in again["nodes"]] == ["n1", "n2"]
        assert again["already"] is False
    finally:
        shoal("down")
    assert shoal("status").code == 3


def test_this_machine_is_one_node(shoal: Shoal) -> None:
    try:
        result = shoal("up", "--this-machine", "--port", "0", "--json")
        assert result.code == 0, result.err
        assert len(json.loads(result.out)["nodes"]) == 1
        assert shoal("run", "--wait", "--", "echo", "hello").out == "hello\n"
    finally:
        shoal("down")


def test_an_open_address_is_encrypted_and_says_how_to_log_in(shoal: Shoal) -> None:
    try:
        result = shoal("up", "--nodes", "1", "--host", "0.0.0.0", "--port", "0")
        assert result.code == 0, result.err
        assert "shoal login https://" in result.out
        assert shoal("status").code == 0
    finally:
        shoal("down")


@pytest.mark.parametrize("host", ["256.1.1.1", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_told(host: str, shoal: Shoal) -> None:
    try:
        result = shoal("up", "--nodes", "1", "--host", host, "--port", "0", "--json")
        assert result.code == 1
        assert result.out == ""
        assert "cannot listen" in result.err
    finally:
        shoal("down")

"""`shoal neighbor add` and `shoal clusters`; with two clusters: tests/live/test_neighbors.py."""

from __future__ import annotations

import json

from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.live.cluster import Live


def test_a_cluster_is_no_neighbor_of_itself(live_shoal: Shoal, cluster: Live) -> None:
    invited = json.loads(live_shoal("neighbor", "invite", "self", "--json").out)
    added = live_shoal("neighbor", "add", invited["url"], "--token", invited["token"])
    assert_one_clear_line(added)
    assert "is this cluster itself" in added.err
    assert not (cluster.home.path / "neighbors.json").exists()
    live_shoal("neighbor", "revoke", "self")
    cluster.client.remove_user("self")
    cluster.client.remove_tenant("self")


def test_what_is_wrong_is_said_in_one_line(live_shoal: Shoal) -> None:
    for words, said in (
        (("add", "https://west:7700"), "shoal neighbor invite"),
        (("add", "west", "--token", "shoal_00000000_x"), "is not an address like"),
        (("add", "http://127.0.0.1:1", "--token", "secret"), "is not a token of a neighbor"),
        (("add", "http://127.0.0.1:1", "--token", "shoal_00000000_x"), "does not answer"),
        (("remove", "west"), "there is no neighbor 'west'"),
        (("list", "--gone"), "only with remove"),
        (("invite", "west", "--token", "x"), "only with add"),
    ):
        done = live_shoal("neighbor", *words)
        assert_one_clear_line(done)
        assert said in done.err, done.err


def test_clusters_begin_with_this_one(live_shoal: Shoal) -> None:
    shown = live_shoal("clusters").out.splitlines()
    assert shown[0].split()[:3] == ["CLUSTER", "GPUS", "FREE"]
    assert shown[1].split()[0] == "here"
    (here,) = json.loads(live_shoal("clusters", "--json").out)
    assert here["name"] == "here" and here["gpus"] > 0

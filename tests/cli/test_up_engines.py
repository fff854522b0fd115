"""`shoal up --engine`: which engine brings which nodes, from the flags alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.cli.up.flags import Wanted, use
from shoal.control.home import ClusterConfig
from shoal.forms.failure import Failure
from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.live.cluster import Live

CONFIG = ClusterConfig(nodes=())


def wanted(**flags: str) -> Wanted:
    return Wanted(**{**dict.fromkeys(Wanted._fields), **flags})


def test_the_engine_is_the_flag_or_that_of_the_last_time() -> None:
    slurm = msgspec.structs.replace(CONFIG, engine="slurm")
    assert wanted().name(None) == wanted().name(CONFIG) == "local"
    assert wanted().name(slurm) == "slurm"
    assert wanted(engine="local").name(slurm) == "local"


def test_a_supply_is_written_on_the_command_line_or_in_a_file(tmp_path: Path) -> None:
    (one,) = wanted(engine="slurm", supply="partition=gpu,gpus=8,most=16").supplies("slurm")
    assert (one.name, one.engine, one.gpus, one.most) == ("slurm", "slurm", 8, 16)
    assert one.options == {"partition": "gpu"}
    file = tmp_path / "pool.yaml"
    file.write_text("supply:\n- {name: big, gpus: 8, most: 4}\n- {name: small, most: 2}\n")
    found = wanted(engine="kubernetes", supply=str(file), namespace="ml").supplies("kubernetes")
    assert [(one.name, one.options["namespace"]) for one in found] == [
        ("big", "ml"),
        ("small", "ml"),
    ]
    (ray,) = wanted(engine="ray", address="10.0.0.1:6379").supplies("ray")
    assert ray.options == {"address": "10.0.0.1:6379"}
    assert wanted(engine="slurm").supplies("slurm") == ()


REFUSALS = [
    ({"engine": "ray"}, "ray", "then shoal join on each"),
    ({"address": "a:1"}, "slurm", "--address: has no effect without --engine ray"),
    ({"namespace": "n"}, "local", "--namespace: has no effect without --engine kubernetes"),
    ({"supply": "most=1"}, "local", "--supply: has no effect without --engine"),
    ({"supply": "engine=ray,most=1"}, "slurm", "is for ray, and --engine says slurm"),
    ({"supply": "color=red"}, "slurm", "there is no field 'color'"),
    ({"supply": "most=many"}, "slurm", "--supply: "),
    ({"supply": "least=3,most=2"}, "slurm", "--supply: 'slurm': least (3) is more than"),
    ({"supply": "nothing.yaml"}, "slurm", "there is no such file"),
]


@pytest.mark.parametrize(("flags", "engine", "text"), REFUSALS, ids=[one[2] for one in REFUSALS])
def test_flags_that_make_no_sense_are_refused(
    flags: dict[str, str], engine: str, text: str
) -> None:
    with pytest.raises(Failure) as caught:
        wanted(**flags).supplies(engine)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_a_cluster_that_ray_carried_says_how_it_comes_back(shoal: Shoal, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    old = {"nodes": [], "engine": "ray", "reach": "10.0.0.1:7701"}
    (home / "cluster.json").write_bytes(msgspec.json.encode(old))
    result = shoal("up")
    assert_one_clear_line(result)
    assert "shoal up --engine local --host 0.0.0.0" in result.err


def test_a_supply_goes_into_the_policy_beside_the_others(cluster: Live, tmp_path: Path) -> None:
    before = cluster.client.policy()
    try:
        for words in ("name=a,most=0", "name=b,most=0", "name=a,most=0,gpus=2"):
            use(cluster.home, wanted(supply=words).supplies("slurm"))
        supplies = cluster.client.policy().supply
        assert [(one.name, one.gpus) for one in supplies] == [("a", 2), ("b", 0)]
        file = tmp_path / "supply.yaml"
        for names in (("c", "d"), ("d",), ()):
            rows = [{"name": name, "most": 0} for name in names]
            file.write_bytes(msgspec.json.encode({"supply": rows}))
            given = wanted(supply=str(file))
            use(cluster.home, given.supplies("slurm"), whole=given.whole)
            # What a file no longer names goes; what never was in it stays.
            assert [one.name for one in cluster.client.policy().supply] == ["a", "b", *names]
    finally:
        cluster.client.set_policy(before)

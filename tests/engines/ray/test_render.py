"""How Ray is started: what is asked for is what is said on its command line."""

from __future__ import annotations

from pathlib import Path

from shoal.engines.ray.machine import free_ports
from shoal.engines.ray.relay import newest
from shoal.engines.ray.render import (
    FIRST_PORTS,
    HEAD_OFFSETS,
    OFFSETS,
    PORTS_EACH,
    TEMP_DIR_BYTES_MAX,
    WORKER_OFFSETS,
    RayNode,
    arguments,
    environment,
    temp_dir,
    without_ray,
)

HEAD = RayNode(head="10.0.0.1:7701", ip="10.0.0.1", first_port=7701, leads=True, node="n1")
MEMBER = RayNode(head="10.0.0.1:7701", ip="10.0.0.2", first_port=7801, node="n2")


def options(node: RayNode) -> dict[str, str]:
    words = arguments(node, Path("/t"), "17")
    return {
        word: words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else ""
        for i, word in enumerate(words)
        if word.startswith("--")
    }


def test_a_head_answers_on_the_first_of_its_ports() -> None:
    said = options(HEAD)
    assert said["--head"] == ""
    assert said["--port"] == "7701"
    assert said["--node-ip-address"] == "10.0.0.1"
    assert "--address" not in said
    assert said["--labels"] == "shoal-stamp=17,shoal-node=n1"


def test_a_member_is_told_where_the_head_is_and_uses_ports_of_its_own() -> None:
    said = options(MEMBER)
    assert said["--address"] == "10.0.0.1:7701"
    assert "--head" not in said
    assert "--port" not in said
    assert said["--node-manager-port"] == "7802"


def test_ray_has_nothing_to_give_away_for_shoal_places() -> None:
    for node in (HEAD, MEMBER):
        assert options(node)["--num-cpus"] == options(node)["--num-gpus"] == "0"


def test_a_head_that_is_no_node_carries_for_none() -> None:
    import msgspec

    assert options(msgspec.structs.replace(HEAD, node=""))["--labels"] == "shoal-stamp=17"


def test_two_machines_never_share_a_port() -> None:
    used = [
        *OFFSETS.values(),
        *HEAD_OFFSETS.values(),
        *range(WORKER_OFFSETS[0], WORKER_OFFSETS[1] + 1),
    ]
    assert len(used) == len(set(used))
    assert max(used) < PORTS_EACH <= FIRST_PORTS.step


def test_the_token_is_named_in_the_environment_never_on_the_command_line() -> None:
    env = environment(Path("/home/u/.shoal"), "n1")
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN_PATH"] == "/home/u/.shoal/ray/token"
    assert not any("token" in word for word in arguments(HEAD, Path("/t"), "17"))


def test_jobs_see_nothing_of_rays_settings() -> None:
    mixed = {"PATH": "/bin", "RAY_ADDRESS": "x", **environment(Path("/h"), "n1")}
    assert without_ray(mixed) == {"PATH": "/bin"}


def test_rays_sockets_have_names_that_the_kernel_takes_however_deep_the_home_lies() -> None:
    assert temp_dir(Path("/home/u/.shoal"), Path("/tmp")) == Path("/home/u/.shoal/ray/tmp")
    deep = [temp_dir(Path("/x" * 60) / name, Path("/tmp")) for name in ("a", "b")]
    assert deep[0] != deep[1]
    assert all(len(str(path)) <= TEMP_DIR_BYTES_MAX for path in deep)


def test_two_homes_that_choose_at_once_choose_differently(tmp_path: Path) -> None:
    """Neither listens yet, and each stays with what it chose."""
    homes = [tmp_path / "a", tmp_path / "b"]
    for home in homes:
        home.mkdir()
    first, second = (free_ports(home) for home in homes)
    assert first != second
    assert free_ports(homes[0]) == first


def ray_node(place: str, name: str, stamp: str, alive: bool = True) -> dict[str, object]:
    labels = {"shoal-node": name, "shoal-stamp": stamp} if name else {}
    return {"NodeID": place, "Alive": alive, "Labels": labels}


def test_of_two_ray_nodes_with_one_name_the_one_started_last_counts() -> None:
    """A raylet that was killed is known to Ray for a few seconds beside the one that follows."""
    nodes = [
        ray_node("old", "n1", "999"),
        ray_node("new", "n1", "1000"),
        ray_node("dead", "n1", "2000", alive=False),
        ray_node("other", "n2", "1"),
        ray_node("stranger", "", ""),
    ]
    assert {name: node["NodeID"] for name, node in newest(nodes).items()} == {
        "n1": "new",
        "n2": "other",
    }

"""What Ray says becomes orders; while an agent lives, its order runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import pytest

from shoal.engines.ray.driver import are_anothers, no_node_here, versions_differ
from shoal.engines.ray.read import (
    LOST_MS,
    Facts,
    Held,
    Living,
    RayActor,
    RayNode,
    Reading,
    Seen,
    choose_whole,
    reading,
)
from shoal.engines.ray.render import Ask, ask
from shoal.model.supply import OrderPhase, OrderStatus, Provision, Supply
from shoal.ports import SupplyContext

CONTEXT = SupplyContext(cluster="c" * 8, home=Path("/h"), join_url="u", join_token="t", python="p")


def asked(gpus: int = 4) -> Ask:
    supply = Supply(name="s", engine="ray", gpus=gpus, cpu_milli=1000, options={"address": "h:1"})
    return ask(CONTEXT, Provision(order="o1", supply=supply, nodes=("n1",)))


def node(id_: str = "x", *, alive: bool = True, gpus: float = 4, free: float = 4) -> RayNode:
    total = {"CPU": 8.0, "GPU": gpus}
    return RayNode(
        id=id_, address=f"10.0.0.{id_}", alive=alive, total=total, free={**total, "GPU": free}
    )


ALIVE = RayActor(state="ALIVE", node="x")
WAITS = RayActor(state="PENDING_CREATION", node="")
DEAD = RayActor(state="DEAD", node="x", cause="its worker was killed")
RAN = Seen(OrderStatus(order="o1", phase=OrderPhase.RUNNING), "session", 0)


def facts(*nodes: RayNode, actor: RayActor | None = None, **more: object) -> Facts:
    made = Facts(
        session="session",
        nodes=nodes,
        searched=tuple(one.id for one in nodes if one.alive),
        actors={} if actor is None else {"o1": actor},
    )
    return msgspec.structs.replace(made, **more)


def read(found: Facts, seen: Seen | None = None, now_ms: int = 1) -> Reading:
    return reading(found, {} if seen is None else {"o1": seen}, now_ms)


def only(found: Reading) -> tuple[str, str, bool]:
    (status,) = found.orders
    return status.phase.value, status.reason, status.failed


def test_an_actor_that_lives_is_an_order_that_runs() -> None:
    found = read(facts(node(), actor=ALIVE))
    assert only(found) == ("running", "", False)
    assert found.orders[0].handle == "10.0.0.x"
    assert "o1" in found.seen


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ((node(gpus=2, free=2),), "none of Ray's 1 node has 4 GPUs and 1 CPU"),
        ((node(free=1), node("y", free=0)), "none of Ray's 2 nodes has 4 GPUs and 1 CPU free"),
        ((node(),), "Ray is starting it"),
        ((), "none of Ray's 0 nodes has 4 GPUs and 1 CPU"),
    ],
)
def test_an_actor_that_waits_says_what_for(nodes: tuple[RayNode, ...], reason: str) -> None:
    found = read(facts(*nodes, actor=WAITS, asked={"o1": asked()}))
    assert only(found) == ("pending", reason, False)


def test_an_agent_that_ended_is_an_order_that_ended_with_its_words() -> None:
    held = Held(ended=True, reason="error: the join token is unknown", failed=True)
    found = read(facts(node(), actor=ALIVE, held={"o1": held}), RAN)
    assert only(found) == ("ended", "error: the join token is unknown", True)
    assert not found.seen


def test_an_agent_that_lives_without_an_actor_gets_one_beside_it() -> None:
    living = {"o1": Living(ask=asked(), nodes=("x", "y"))}
    found = read(facts(node(free=0), node("y"), actor=DEAD, living=living), RAN)
    assert only(found)[0] == "running"
    ((again, place),) = found.again
    assert (again.again, place) == (True, "y")  # where there is room for it


def test_an_agent_that_was_released_gets_no_actor_again() -> None:
    living = {"o1": Living(ask=asked(), nodes=("x",))}
    found = read(facts(node(), actor=DEAD, living=living, released=("o1",)))
    assert only(found) == ("running", "released", False)
    assert not found.again
    assert only(read(facts(node(), released=("o1",)))) == ("ended", "released", False)


def test_others_may_have_taken_the_gpus_of_a_lost_actor() -> None:
    living = {"o1": Living(ask=asked(), nodes=("x",))}
    found = read(facts(node(free=0), actor=WAITS, living=living))
    assert only(found) == ("running", "Ray gave its GPUs to others while its actor was lost", False)


def test_an_actor_that_died_with_its_agent_is_an_order_that_failed() -> None:
    assert only(read(facts(node(), actor=DEAD), RAN)) == ("ended", "its worker was killed", True)


def test_a_machine_that_nobody_could_search_may_still_have_its_agent() -> None:
    unsearched = facts(node(), actor=DEAD, searched=())
    assert only(read(unsearched, RAN))[0] == "running"


def test_a_lost_ray_node_is_not_a_dead_agent_for_ten_minutes() -> None:
    gone = facts(node(alive=False), actor=DEAD)
    found = read(gone, RAN, LOST_MS - 1)
    assert only(found) == ("running", "Ray lost its node (10.0.0.x); the agent may live", False)
    assert found.seen == {"o1": RAN}
    over = read(gone, found.seen["o1"], LOST_MS)
    assert only(over) == ("ended", "Ray lost its node (10.0.0.x)", True)


def test_a_ray_that_was_restarted_has_time_to_get_its_machines_back() -> None:
    other = facts(session="another")
    found = read(other, RAN, LOST_MS - 1)
    assert only(found)[:1] == ("running",)
    assert read(other, found.seen["o1"], LOST_MS).orders == ()


def test_an_order_that_ray_does_not_know_is_not_reported() -> None:
    assert read(facts(node()), RAN).orders == ()


def test_whole_nodes_are_those_that_nobody_uses() -> None:
    head = RayNode(id="h", address="h", alive=True, total={"memory": 1.0}, free={})
    chosen = choose_whole((head, node(free=3), node("y")), asked())
    assert not isinstance(chosen, str)
    assert chosen[1] == "y"
    assert choose_whole((head, node(free=3)), asked()) == "all of Ray's 1 node are in use"
    assert choose_whole((head,), asked()) == "Ray has no nodes"


def test_another_ray_or_python_is_named_with_what_to_install() -> None:
    theirs = b'{"ray_version": "2.50.0", "python_version": "3.12.1"}'
    assert versions_differ(theirs, "2.60.0", (3, 11)).endswith("pip install ray==2.50.0")
    assert "run Shoal with 3.12.1" in versions_differ(theirs, "2.50.0", (3, 11))
    assert versions_differ(theirs, "2.50.0", (3, 12)) == ""
    assert "ray start --address h:1 --num-cpus 0" in no_node_here("h:1", "no raylet")


@pytest.mark.parametrize("hidden", [False, True])
def test_a_raylet_of_another_user_is_seen_before_rays_library_aborts(hidden: bool) -> None:
    """A file stands for its socket. Others may see it and not write to it, or not even see it."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "raylet")
        socket.touch()
        assert not are_anothers([str(socket), f"{folder}/none"])
        socket.chmod(0o555)
        Path(folder).chmod(0o600 if hidden else 0o755)
        try:
            if user == 0:
                os.seteuid(65534)
            assert are_anothers([f"{folder}/none/raylet", str(socket)])
            assert not are_anothers(["/none/raylet"])
        finally:
            os.seteuid(user)
            Path(folder).chmod(0o700)

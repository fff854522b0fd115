"""What should run minus what runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.agent.warm.rules import TRACKERS, VARYING
from shoal.core.phases import reconcile
from shoal.core.phases.reconcile import STRANGER_GRACE_MS
from shoal.core.phases.reserved import RENDEZVOUS
from shoal.model.commands import Acknowledge, Check, Dismiss, Fence, Launch, Prepare, Stop
from shoal.model.job import Job, MemberRef, Phase, Restart
from shoal.model.node import NodeHealth
from tests.core.build import Cluster, node_spec


def orders(cluster: Cluster) -> list[str]:
    return [
        f"{type(command).__name__} {command.ref}"
        for command in cluster.last.commands
        if not isinstance(command, (Check, Prepare, Dismiss, Fence))
    ]


def test_an_order_that_was_lost_is_given_again_with_the_next_report() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.submit()
    assert orders(cluster) == ["Launch j1.1.0"]
    cluster.hear("a")
    assert orders(cluster) == ["Launch j1.1.0"]
    cluster.deliver()
    cluster.hear("a")
    assert orders(cluster) == []
    cluster.cancel(job_id)
    assert orders(cluster) == ["Stop j1.1.0"]
    cluster.hear("a")
    assert orders(cluster) == ["Stop j1.1.0"]


def test_an_order_that_the_node_follows_already_is_not_repeated() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.cancel(cluster.run())
    cluster.deliver()
    cluster.hear("a")
    assert orders(cluster) == []


def test_an_exit_is_acknowledged_for_as_long_as_the_node_reports_it() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.end(cluster.run())
    assert orders(cluster) == ["Acknowledge j1.1.0"]
    cluster.hear("a")
    assert orders(cluster) == ["Acknowledge j1.1.0"]
    cluster.deliver()
    cluster.hear("a")
    assert orders(cluster) == []


def test_orders_name_the_life_of_the_node_that_they_are_meant_for() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.reboot("a")
    cluster.hear("a")
    cluster.submit()
    assert [command.incarnation for command in cluster.last.commands] == [2]


def test_a_stranger_gets_a_moment_to_end_well() -> None:
    cluster = Cluster()
    other = Cluster()
    other.join("a")
    other.submit()
    other.deliver()
    cluster.books = other.books
    cluster.hear("a")
    (stop,) = cluster.last.commands
    assert isinstance(stop, Stop)
    assert (stop.ref, stop.grace_ms) == (MemberRef("j1", 1, 0), STRANGER_GRACE_MS)


def test_a_start_is_not_ordered_again_while_a_stranger_may_sit_on_the_gpus() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.submit(gpus=1)
    stranger = MemberRef("j77", 1, 0)
    book = cluster.books["a"]
    (launch,) = cluster.last.commands
    assert isinstance(launch, Launch)
    book.alive[stranger] = launch
    cluster.hear("a")
    assert orders(cluster) == [f"Stop {stranger}"]
    cluster.deliver()
    cluster.hear("a")
    assert orders(cluster) == []
    book.exited(stranger, 143)
    cluster.hear("a")
    assert orders(cluster) == ["Launch j1.1.0", f"Acknowledge {stranger}"]


def test_orders_to_a_node_come_before_acknowledgements() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.run(gpus=1)
    cluster.submit(gpus=1)
    cluster.end("j1")
    assert [type(command) for command in cluster.last.commands] == [Launch, Acknowledge]


def test_a_member_finds_its_place_in_the_gang_in_its_environment() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    cluster.join("b", gpus=2)
    cluster.submit(gpus=2, members=3, env={"MODEL": "tiny"}, name="train")
    launches = [command for command in cluster.last.commands if isinstance(command, Launch)]
    assert [launch.node for launch in launches] == ["a", "a", "b"]
    env = launches[2].env
    assert env["MASTER_ADDR"] == "a.test"
    assert int(env["MASTER_PORT"]) >= cluster.policy.port_first
    assert {
        name: env[name]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    } == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "2",
    }
    assert (env["GROUP_WORLD_SIZE"], env["CUDA_VISIBLE_DEVICES"]) == ("3", "0,1")
    assert (env["SHOAL_JOB_ID"], env["SHOAL_JOB_NAME"]) == ("j1", "train")
    assert (env["SHOAL_ATTEMPT"], env["SHOAL_MEMBER"], env["MODEL"]) == ("1", "2", "tiny")
    assert (env["TORCHELASTIC_RUN_ID"], env["TORCHELASTIC_USE_AGENT_STORE"]) == ("j1", "False")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["ROLE_RANK"]) == ("0", "2")
    assert (env["PET_NNODES"], env["PET_NODE_RANK"], env["PET_NPROC_PER_NODE"]) == ("3", "2", "2")
    assert (env["PET_MASTER_ADDR"], env["PET_MASTER_PORT"]) == ("a.test", env["MASTER_PORT"])
    assert set(env) - {"MODEL"} <= {n for n in env if n.startswith("SHOAL_")} | VARYING, (
        "what differs between attempts must not ask for another warm interpreter"
    )


def test_a_gang_finds_its_hosts_with_a_slot_for_each_gpu() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    cluster.join("b", gpus=2)
    cluster.submit(gpus=2, members=3)
    launches = [command for command in cluster.last.commands if isinstance(command, Launch)]
    assert {launch.env["SHOAL_HOSTS"] for launch in launches} == {"a.test:4,b.test:2"}


def test_nodes_that_share_an_address_are_hosts_by_their_ids_and_slots_may_be_cpus() -> None:
    cluster = Cluster()
    for node in ("a", "b"):
        cluster.join(node, address="10.0.0.1")
    cluster.submit(cpu_milli=3500, members=2, members_per_node=1)
    launches = [command for command in cluster.last.commands if isinstance(command, Launch)]
    assert launches[1].env["SHOAL_HOSTS"] == "a:3,b:3"


def test_a_launchers_processes_do_not_take_the_members_ranks_for_theirs() -> None:
    cluster = Cluster()
    for node in ("a", "b"):
        cluster.join(node, gpus=2)
    cluster.submit(gpus=2, members=2, members_per_node=1, launcher=True)
    launches = [command for command in cluster.last.commands if isinstance(command, Launch)]
    env = launches[1].env
    assert RENDEZVOUS & set(env) == {"MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "PET_NODE_RANK"}
    assert (env["SHOAL_MEMBER"], env["SHOAL_HOSTS"]) == ("1", "a.test:2,b.test:2")
    assert all(launch.launcher for launch in launches)


def test_trackers_find_one_label_for_all_attempts_unless_the_job_has_its_own() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=2)
    cluster.submit(gpus=2, name="train", restart=Restart.ON_FAILURE, retries=1)
    first = next(one.env for one in cluster.last.commands if isinstance(one, Launch))
    assert first["WANDB_RUN_GROUP"] == first["WANDB_NAME"] == "train-j1"
    tags = msgspec.json.decode(first["MLFLOW_RUN_CONTEXT"])
    assert tags["shoal.run_id"] == first["SHOAL_RUN_ID"]
    assert first["SHOAL_RUN_ID"] == f"j1-{cluster.state.jobs['j1'].submitted_ms:x}"
    assert "WANDB_RUN_ID" not in first, "a script may track several runs"
    cluster.deliver()
    cluster.hear("a")
    cluster.end("j1", code=1)
    cluster.wait(2_000)
    cluster.hear("a")
    again = next(one.env for one in cluster.last.commands if isinstance(one, Launch))
    assert again["SHOAL_ATTEMPT"] == "2"
    assert {name: again[name] for name in TRACKERS} == {name: first[name] for name in TRACKERS}
    assert again["SHOAL_RUN_ID"] == first["SHOAL_RUN_ID"]
    cluster = Cluster()
    cluster.join("a", gpus=2)
    cluster.submit(gpus=2, env={"WANDB_NAME": "mine"})
    own = next(one.env for one in cluster.last.commands if isinstance(one, Launch))
    assert (own["WANDB_NAME"], own["WANDB_RUN_GROUP"]) == ("mine", "j1")


def test_a_process_that_is_alone_is_not_told_of_a_gang_but_an_elastic_gang_of_one_is() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.submit(gpus=1, env={"PET_NPROC_PER_NODE": "3"})
    (alone,) = [command for command in cluster.last.commands if isinstance(command, Launch)]
    assert RENDEZVOUS.isdisjoint(alone.env)
    assert (alone.env["SHOAL_MEMBERS"], alone.env["PET_NPROC_PER_NODE"]) == ("1", "3")
    cluster.end("j1")
    cluster.submit(gpus=1, members=1, members_max=4)
    (elastic,) = [command for command in cluster.last.commands if isinstance(command, Launch)]
    assert set(elastic.env) >= RENDEZVOUS
    assert (elastic.env["RANK"], elastic.env["WORLD_SIZE"]) == ("0", "1")


def test_members_that_share_a_node_by_number_see_its_gpus_as_under_torchrun() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    cluster.join("b", gpus=4)
    cluster.run(gpus=1)  # GPU 0 of a is taken
    cluster.submit(gpus=1, members=4, members_per_node=2)
    launches = [command for command in cluster.last.commands if isinstance(command, Launch)]
    seen = [(launch.node, launch.env["CUDA_VISIBLE_DEVICES"]) for launch in launches]
    by_node = dict(seen)
    assert (
        len(seen) == 4 and set(by_node) == {"a", "b"} and seen == [(n, by_node[n]) for n, _ in seen]
    )
    for launch in launches:
        visible = launch.env["CUDA_VISIBLE_DEVICES"].split(",")
        assert visible[int(launch.env["LOCAL_RANK"])] == launch.env["SHOAL_GPUS"]
        assert launch.gpus == (int(launch.env["SHOAL_GPUS"]),)
    cluster.submit(gpus=1, members=2)
    alone = [command for command in cluster.last.commands if isinstance(command, Launch)]
    assert [launch.env["CUDA_VISIBLE_DEVICES"] for launch in alone] == [
        launch.env["SHOAL_GPUS"] for launch in alone
    ]


@pytest.mark.parametrize("gpus", [1, 2])
def test_members_of_a_gang_find_their_gpu_at_0_and_at_their_local_rank(gpus: int) -> None:
    """Scripts call cuda:0, cuda:LOCAL_RANK, or the rank modulo the GPUs that they see."""
    cluster = Cluster()
    cluster.join("a", gpus=8)
    cluster.submit(gpus=gpus, members=3)
    launches = [command for command in cluster.last.commands if isinstance(command, Launch)]
    first = []
    for launch in launches:
        visible = launch.env["CUDA_VISIBLE_DEVICES"].split(",")
        assert visible == [str(gpu) for gpu in launch.gpus]
        assert (launch.env["LOCAL_RANK"], launch.env["LOCAL_WORLD_SIZE"]) == ("0", "1")
        assert (launch.env["GROUP_RANK"], launch.env["GROUP_WORLD_SIZE"]) == (
            launch.env["RANK"],
            "3",
        )
        first.append(visible[0])
    assert len(set(first)) == 3
    held = sorted(gpu for launch in launches for gpu in launch.gpus)
    assert {launch.env["SHOAL_JOB_GPUS"] for launch in launches} == {",".join(map(str, held))}


def test_a_member_that_is_alone_on_its_node_is_told_of_no_other_gpus() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    cluster.join("b", gpus=4)
    cluster.submit(gpus=4, members=2)
    cluster.submit(gpus=0, members=2)
    launches = [command for command in cluster.last.commands if isinstance(command, Launch)]
    assert launches and not any("SHOAL_JOB_GPUS" in launch.env for launch in launches)


def test_members_are_told_how_often_machines_cut_gangs_short() -> None:
    cluster = Cluster()
    for name in "abc":
        cluster.join(name)

    def told(**fields: Any) -> int:
        cluster.submit(**fields)
        (launch, *_) = [c for c in cluster.last.commands if isinstance(c, Launch)]
        return int(launch.env["SHOAL_MTBF_S"])

    month_s = 30 * 24 * 3600
    assert told() == month_s
    assert told(members=2, members_per_node=1) == month_s // 2
    assert told(env={"SHOAL_MTBF_S": "7"}) == 7
    cluster.run()
    cluster.wait(1_000)
    for node in [member.slice.node for member in cluster.job("j4").members]:
        cluster.learn_gone(node)
        del cluster.books[node]
    losses = cluster.state.wear.losses
    assert losses >= 1
    assert month_s // (losses + 1) <= told() < month_s // (losses + 1) + 60


def test_a_member_without_gpus_sees_none() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    cluster.submit()
    (launch,) = cluster.last.commands
    assert isinstance(launch, Launch)
    assert launch.env["CUDA_VISIBLE_DEVICES"] == ""


def test_two_live_jobs_never_meet_at_the_same_point() -> None:
    cluster = Cluster()
    cluster.books = {}
    cluster.join("a")
    cluster.reboot("a", node_spec("a", cpus=50))
    cluster.hear("a")
    cluster.policy = msgspec.structs.replace(cluster.policy, port_count=45)
    masters = {cluster.job(cluster.submit(members=2, cpu_milli=100)).master for _ in range(40)}
    assert len(masters) == 40


def test_who_is_getting_ready_is_neither_ordered_again_nor_alive() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.submit(package="0" * 64)
    (launch,) = (one for one in cluster.last.commands if isinstance(one, Launch))
    assert launch.package == "0" * 64
    cluster.deliver()
    ref = MemberRef(job_id, 1, 0)
    cluster.books["a"].gets(ref, "fetches its working directory")
    cluster.hear("a")
    assert (orders(cluster), cluster.job(job_id).phase) == ([], Phase.STARTING)
    cluster.books["a"].begins(ref)
    cluster.hear("a")
    assert (orders(cluster), cluster.job(job_id).phase) == ([], Phase.RUNNING)


def test_a_stranger_that_is_getting_ready_is_stopped_before_the_node_is_used() -> None:
    cluster = Cluster()
    other = Cluster()
    other.join("a")
    other.submit()
    other.deliver()
    other.books["a"].gets(MemberRef("j1", 1, 0), "fetches its working directory")
    cluster.books = other.books
    cluster.hear("a")
    assert orders(cluster) == ["Stop j1.1.0"]
    assert cluster.node("a").health is not NodeHealth.READY
    cluster.books["a"].exited(MemberRef("j1", 1, 0), 143, "stopped before it started")
    cluster.hear("a")
    assert cluster.node("a").health is NodeHealth.READY


def test_a_large_gang_is_looked_at_once_however_many_steps_its_start_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16,384 members may be pending at once: looking at all of them for each is too much."""
    looks = 0
    real = reconcile.seating

    def counted(job: Job) -> list[reconcile.Seat]:
        nonlocal looks
        looks += 1
        return real(job)

    monkeypatch.setattr(reconcile, "seating", counted)
    cluster = Cluster()
    names = [f"n{number}" for number in range(10)]
    for name in names:
        cluster.join(name, gpus=4, cpus=8)
    cluster.submit(members=40, gpus=1)
    orders: dict[MemberRef, Launch] = {}
    for name in names:
        orders |= {one.ref: one for one in cluster.hear(name).commands if isinstance(one, Launch)}
    assert len(orders) == 40
    assert looks == 1
    assert {order.env["RANK"] for order in orders.values()} == {str(n) for n in range(40)}


def test_another_attempt_of_a_large_gang_is_looked_at_again() -> None:
    cluster = Cluster()
    for name in ("n1", "n2"):
        cluster.join(name, gpus=20, cpus=20)
    job_id = cluster.run(members=20, gpus=1, restart="on-failure", retries=1)
    cluster.end(job_id, code=1)
    cluster.deliver("n1", "n2")
    for book in cluster.books.values():
        for ref in list(book.stopping):
            book.exited(ref, 143)
    cluster.hear("n1", "n2")
    cluster.wait(600_000)
    again = [one for one in cluster.hear("n1", "n2").commands if isinstance(one, Launch)]
    assert {order.env["SHOAL_ATTEMPT"] for order in again} == {"2"}

"""Of the nodes with room now, a job goes to those that already hold its volumes."""

from __future__ import annotations

from shoal.core.scheduling.data import WORTH_BYTES
from shoal.model.blocks import Held, volume_key
from tests.core.build import Cluster

URL = "s3://bucket/imagenet"
SET_BYTES = 1 << 30
DATA = volume_key("default", URL)


def holds(made: Cluster, node: str, held: int, total: int = SET_BYTES, volume: str = DATA) -> None:
    made.books[node].holdings = (Held(volume, held, total),)
    made.hear(node)


def nodes_of(made: Cluster, job: str) -> list[str]:
    return [member.slice.node for member in made.job(job).members]


def three() -> Cluster:
    made = Cluster()
    for name in ("n1", "n2", "n3"):
        made.join(name, gpus=8)
    return made


def test_of_equal_nodes_the_one_that_holds_most_is_chosen_and_the_reason_says_how_much() -> None:
    made = three()
    holds(made, "n2", 10)
    holds(made, "n3", SET_BYTES * 81 // 100 + 1)
    job = made.submit(gpus=1, volumes=(f"{URL}:imagenet",))
    assert nodes_of(made, job) == ["n3"]
    assert "room beside its data on n3; n3 holds 81 % of imagenet" in made.job(job).why


def test_a_job_without_such_a_volume_and_one_of_another_tenant_go_where_they_went_before() -> None:
    made = three()
    holds(made, "n3", SET_BYTES)
    jobs = [
        made.submit(gpus=1),
        made.submit(gpus=1, volumes=("/data/imagenet:imagenet",)),
        made.submit(gpus=1, volumes=("s3://bucket/other:imagenet",)),
        made.submit(gpus=1, volumes=(f"{URL}:imagenet",), tenant="other"),
    ]
    assert [nodes_of(made, job) for job in jobs] == [["n1"]] * 4
    assert not any("holds" in made.job(job).why for job in jobs)


def test_a_node_that_fits_worse_is_taken_only_for_bytes_that_are_worth_it() -> None:
    made = three()
    made.submit(gpus=1)
    holds(made, "n3", WORTH_BYTES - 1)
    small = made.submit(gpus=1, volumes=(f"{URL}:data",))
    assert nodes_of(made, small) == ["n1"]  # best fit: whole nodes stay whole
    holds(made, "n3", WORTH_BYTES)
    large = made.submit(gpus=1, volumes=(f"{URL}:data",))
    assert nodes_of(made, large) == ["n3"]


def test_while_a_gang_waits_for_room_data_do_not_break_it_up() -> None:
    made = three()
    made.submit(gpus=1)
    made.submit(gpus=8, members=3)  # waits
    holds(made, "n3", SET_BYTES)
    assert nodes_of(made, made.submit(gpus=1, volumes=(f"{URL}:data",))) == ["n1"]


def test_nobody_waits_for_a_node_that_holds_the_data() -> None:
    made = three()
    made.submit(gpus=8)
    assert nodes_of(made, "j1") == ["n1"]
    holds(made, "n1", SET_BYTES)
    job = made.submit(gpus=1, volumes=(f"{URL}:data",))
    assert nodes_of(made, job) != ["n1"]
    assert made.job(job).members


def test_a_rare_gpu_is_not_taken_for_the_sake_of_data() -> None:
    made = Cluster()
    made.join("t4", gpus=8, gpu_model="T4")
    made.join("h100", gpus=8, gpu_model="H100")
    alone = made.submit(gpus=1)
    (chosen,) = nodes_of(made, alone)
    other = "h100" if chosen == "t4" else "t4"
    holds(made, other, SET_BYTES)
    assert nodes_of(made, made.submit(gpus=1, volumes=(f"{URL}:data",))) == [chosen]
    models = (other.upper(),)
    wanted = made.submit(gpus=1, volumes=(f"{URL}:data",), gpu_models=models)
    assert nodes_of(made, wanted) == [other]


def test_a_gang_exchanges_its_nodes_for_like_ones_of_the_same_rack() -> None:
    made = Cluster()
    for name, place in (("a1", "b/r1"), ("a2", "b/r1"), ("a3", "b/r1"), ("c1", "b/r2")):
        made.join(name, gpus=8, place=place)
    made.join("c2", gpus=8, place="b/r2")
    plain = made.submit(gpus=8, members=2)
    assert nodes_of(made, plain) == ["c1", "c2"]  # the tightest rack
    made.cancel(plain)
    made.deliver()
    made.hear("c1", "c2")
    made.join("c3", gpus=8, place="b/r2")
    made.join("c4", gpus=4, place="b/r2")  # fits, but is not like the others
    before = made.submit(gpus=4, members=4)
    racks = {node[0] for node in nodes_of(made, before)}
    assert len(racks) == 1
    made.cancel(before)
    made.deliver()
    made.hear(*made.books)
    (rack,) = racks
    holds(made, f"{rack}3", SET_BYTES)
    holds(made, "a1" if rack == "c" else "c1", SET_BYTES)  # in the other rack
    job = made.submit(gpus=4, members=4, volumes=(f"{URL}:data",))
    assert {node[0] for node in nodes_of(made, job)} == racks
    assert f"{rack}3" in nodes_of(made, job)
    assert f"{rack}3 holds 100 % of data" in made.job(job).why


def test_what_a_node_no_longer_holds_is_forgotten_and_so_is_nonsense() -> None:
    made = three()
    heard = made.state.heard
    holds(made, "n3", SET_BYTES)
    assert list(heard.holders[DATA]) == ["n3"]
    made.books["n3"].holdings = ()
    made.hear("n3")
    assert not heard.holders and not heard.holdings
    for held, total in ((2, 1), (-1, 1), (0, 0), (0, 1), (1 << 62, 1 << 62)):
        holds(made, "n3", held, total)
        assert not heard.holders
    made.books["n3"].holdings = tuple(Held(str(number), 1, 1) for number in range(1_000))
    made.hear("n3")
    assert len(heard.holders) == 64

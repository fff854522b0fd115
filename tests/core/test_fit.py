"""Where gangs fit: never too much on a node, always whole, and found whenever it exists."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.invariants import verify
from shoal.core.scheduling.fit import GangFit, fit, room_for, shortage, slices
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.apply import apply
from shoal.core.state.apply_room import change
from shoal.core.state.events.nodes import NodeJoined, NodeReady
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.queue import Gang, gang_of_spec
from shoal.core.state.state import State
from shoal.model.job import JobSpec, Within
from shoal.model.node import NodeSpec
from shoal.model.resources import Demand, Slice
from tests.core.build import POLICY, Cluster, examples, job_spec, node_spec


def node(
    gpus: int = 0, cpus: int = 8, memory_mb: int = 8, place: str = "", **rest: Any
) -> NodeSpec:
    """Its name comes later, from its place in line."""
    return node_spec("n", gpus=gpus, cpus=cpus, memory_mb=memory_mb, place=place, **rest)


def state_of(nodes: Sequence[NodeSpec], held: Sequence[tuple[int, JobSpec]] = ()) -> State:
    """These nodes, on which as much of `held` is taken as there is room for."""
    state = State(FUNCTIONS)
    for number, bare in enumerate(nodes):
        fields = {name: getattr(bare, name) for name in bare.__struct_fields__}
        spec = NodeSpec(**{**fields, "id": f"n{number}"})
        apply(state, NodeJoined(at_ms=1, node=spec.id, spec=spec, incarnation=1))
        apply(state, NodeReady(at_ms=1, node=spec.id))
    for number, (where, job) in enumerate(held, start=1):
        take(state, number, where % len(nodes), job)
    return state


def take(state: State, number: int, index: int, job: JobSpec) -> None:
    room, demand = state.rooms[index], job.demand
    beside = bool(state.placed[state.order[index].id])
    if room.holds(demand) < 1 or (job.whole_nodes and beside):
        return
    share = demand.share_milli(room.kind)
    open_ = [gpu for gpu, left in enumerate(room.gpu_milli) if left >= share]
    gpus = tuple(reversed(open_))[: demand.gpus]  # holes where they are least expected
    slice_ = Slice(state.order[index].id, gpus, demand.cpu_milli, demand.memory_mb, share)
    job_id = f"h{number}"
    apply(state, JobSubmitted(at_ms=1, job=job_id, spec=job))
    apply(
        state,
        JobPlaced(at_ms=1, job=job_id, attempt=1, slices=(slice_,), master="m:1", why=""),
    )


def gang_of(**wishes: Any) -> Gang:
    return gang_of_spec(job_spec(**{"cpu_milli": 0, **wishes}))


def nodes_of(plan: GangFit | None) -> list[tuple[int, int]] | None:
    return None if plan is None else plan.nodes


# -- whatever is asked for -----------------------------------------------------------------

PLACES = ("", "b0", "b0/r0", "b0/r1", "b1/r0")
NODES = st.lists(
    st.builds(
        node,
        gpus=st.integers(0, 4),
        cpus=st.integers(0, 4),
        memory_mb=st.integers(0, 4),
        place=st.sampled_from(PLACES),
        gpu_model=st.sampled_from(("", "A")),
        gpu_memory_mb=st.sampled_from((10, 40)),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def wishes(draw: st.DrawFn, members_max: int = 4) -> JobSpec:
    """A job with anything in it that a gang can ask for."""
    fields: dict[str, Any] = {
        "gpus": draw(st.integers(0, 3)),
        "cpu_milli": draw(st.sampled_from((0, 500, 1000, 2000))),
        "memory_mb": draw(st.integers(0, 3)),
        "members": draw(st.integers(1, members_max)),
        "whole_nodes": draw(st.integers(0, 4)) == 0,
        "within": draw(st.sampled_from(list(Within))),
        "within_required": draw(st.booleans()),
        "gpu_models": draw(st.sampled_from(((), (), ("A",), ("A", "B")))),
        "gpu_memory_mb": draw(st.sampled_from((0, 0, 10, 11))),
    }
    if fields["gpus"] == 1:
        shares = (1000, 700, 500, 300) + ((0,) if fields["gpu_memory_mb"] else ())
        fields["gpu_milli"] = draw(st.sampled_from(shares))
    if draw(st.integers(0, 3)) == 0:
        fields["members_per_node"] = draw(
            st.sampled_from([n for n in range(1, 5) if fields["members"] % n == 0])
        )
    return job_spec(**fields)


HELD = st.lists(st.tuples(st.integers(0, 3), wishes(members_max=1)), max_size=4)
AVOID = st.sets(st.integers(0, 3), max_size=2)


@examples
@given(nodes=NODES, held=HELD, job=wishes(), avoid=AVOID)
def test_a_gang_gets_what_it_asked_for_whole_and_within_every_node(
    nodes: list[NodeSpec], held: list[tuple[int, JobSpec]], job: JobSpec, avoid: set[int]
) -> None:
    state = state_of(nodes, held)
    plan = fit(state, gang_of_spec(job), avoid)
    if plan is None:
        return
    given_ = slices(state, plan, job.demand)
    assert len(given_) == job.members
    apply(state, JobSubmitted(at_ms=1, job="j", spec=job))
    apply(state, JobPlaced(at_ms=1, job="j", attempt=1, slices=given_, master="m:2", why=""))
    verify(state)  # no GPU beyond 1000, nothing below zero
    seats = [state.nodes[slice_.node].index for slice_ in given_]
    assert allowed(state, gang_of_spec(job), seats, avoid)


@examples
@given(nodes=NODES, held=HELD, job=wishes(), avoid=AVOID)
def test_if_nothing_is_found_then_nothing_exists(
    nodes: list[NodeSpec], held: list[tuple[int, JobSpec]], job: JobSpec, avoid: set[int]
) -> None:
    state, gang = state_of(nodes, held), gang_of_spec(job)
    assert (fit(state, gang, avoid) is not None) == exists(state, gang, avoid)


@examples
@given(nodes=NODES, held=HELD, job=wishes())
def test_what_does_not_fit_is_short_of_something_and_what_fits_is_not(
    nodes: list[NodeSpec], held: list[tuple[int, JobSpec]], job: JobSpec
) -> None:
    state, gang = state_of(nodes, held), gang_of_spec(job)
    assert (shortage(state, gang) == "") == (fit(state, gang) is not None)


def exists(state: State, gang: Gang, avoid: Collection[int]) -> bool:
    """By trying every way to seat the members on the nodes."""
    return any(
        allowed(state, gang, seats, avoid)
        and all(holds(state, gang, index, seats.count(index)) for index in set(seats))
        for seats in product(range(len(state.order)), repeat=gang.members)
    )


def allowed(state: State, gang: Gang, seats: Sequence[int], avoid: Collection[int]) -> bool:
    """Whether the gang may sit there at all, room or no room."""
    used = sorted(set(seats))
    if set(used) & set(avoid):
        return False
    if any(gang.per_node not in (0, seats.count(index)) for index in used):
        return False
    if gang.demand.gpus:
        for index in used:
            spec = state.order[index].spec
            if gang.demand.gpu_models and spec.gpu_model not in gang.demand.gpu_models:
                return False
            if spec.gpu_memory_mb < gang.demand.gpu_memory_mb:
                return False
    if not gang.required or gang.within is Within.ANYWHERE or len(used) == 1:
        return True
    depth = {Within.NODE: None, Within.RACK: 2, Within.BLOCK: 1}[gang.within]
    places = {tuple(state.order[index].spec.place.split("/")[:depth]) for index in used}
    return len(places) == 1 and len(places.pop()) == depth and bool(state.order[used[0]].spec.place)


def holds(state: State, gang: Gang, index: int, count: int) -> bool:
    spec, demand = state.order[index].spec, gang.demand
    beside = [(job, job.members[ref.member].slice) for ref, job in held_on(state, index)]
    takes = [
        (slice_.gpus, slice_.cpu_milli, slice_.memory_mb) != ((), 0, 0) for _, slice_ in beside
    ]
    if any(takes) and (gang.whole_nodes or any(job.spec.whole_nodes for job, _ in beside)):
        return False
    left = [1000] * spec.gpus
    for _, slice_ in beside:
        for gpu in slice_.gpus:
            left[gpu] -= slice_.gpu_milli
    if demand.gpus > 1 or demand.gpu_milli == 1000:
        fits = left.count(1000) >= count * demand.gpus
    elif demand.gpus:
        share = demand.gpu_milli or -(-1000 * demand.gpu_memory_mb // spec.gpu_memory_mb)
        fits = sum(milli // share for milli in left) >= count
    else:
        fits = True
    cpu_milli = spec.cpu_milli - sum(slice_.cpu_milli for _, slice_ in beside)
    memory_mb = spec.memory_mb - sum(slice_.memory_mb for _, slice_ in beside)
    return fits and count * demand.cpu_milli <= cpu_milli and count * demand.memory_mb <= memory_mb


def held_on(state: State, index: int) -> Any:
    return list(state.placed[state.order[index].id].items())


# -- which of the places that exist --------------------------------------------------------


def test_the_tightest_node_that_holds_the_whole_gang_is_taken() -> None:
    state = state_of([node(8), node(4), node(2)])
    assert nodes_of(fit(state, gang_of(gpus=2, members=2))) == [(1, 2)]


def test_a_gang_too_large_for_one_node_goes_to_the_emptiest_first() -> None:
    state = state_of([node(2), node(4), node(4)])
    assert nodes_of(fit(state, gang_of(gpus=1, members=9))) == [(1, 4), (2, 4), (0, 1)]


def test_a_gang_without_gpus_goes_to_the_fullest_first_and_strands_none() -> None:
    state = state_of([node(8, cpus=2), node(0, cpus=2), node(4, cpus=2)])
    assert nodes_of(fit(state, gang_of(cpu_milli=1000, members=3))) == [(1, 2), (2, 1)]


def test_nodes_that_are_equal_are_taken_in_join_order() -> None:
    state = state_of([node(4)] * 3)
    assert nodes_of(fit(state, gang_of(gpus=1, cpu_milli=1000, memory_mb=1))) == [(0, 1)]


def test_a_demand_of_nothing_fits_anywhere_and_any_number_of_times() -> None:
    state = state_of([node(0, cpus=0, memory_mb=0)])
    assert nodes_of(fit(state, gang_of(members=1000))) == [(0, 1000)]


def test_nothing_fits_where_there_is_no_node() -> None:
    assert fit(State(FUNCTIONS), gang_of()) is None


def test_a_member_gets_the_lowest_free_gpus() -> None:
    state = state_of([node(4)])
    change(state, Slice("n0", (1,)), -1)
    given_ = slices(state, GangFit([(0, 3)], ""), Demand(1, 0, 0))
    assert [slice_.gpus for slice_ in given_] == [(0,), (2,), (3,)]


# -- parts of GPUs -------------------------------------------------------------------------


def test_a_share_goes_to_the_fullest_gpu_that_has_room_for_it() -> None:
    state = state_of([node(4)])
    change(state, Slice("n0", (1,), gpu_milli=300), -1)
    change(state, Slice("n0", (2,), gpu_milli=600), -1)
    change(state, Slice("n0", (3,), gpu_milli=900), -1)
    given_ = slices(state, GangFit([(0, 4)], ""), Demand(1, 0, 0, 400))
    assert [slice_.gpus for slice_ in given_] == [(2,), (1,), (0,), (0,)]


def test_a_gpu_is_never_shared_by_more_than_a_thousand_thousandths() -> None:
    state = state_of([node(1)])
    assert room_for(state.cluster, gang_of(gpus=1, gpu_milli=300), 99) == 3
    assert room_for(state.cluster, gang_of(gpus=1, gpu_milli=501), 99) == 1
    assert fit(state, gang_of(gpus=1, gpu_milli=501, members=2)) is None


def test_what_is_left_of_shared_gpus_does_not_add_up_to_a_whole_one() -> None:
    state = state_of([node(2)])
    for gpu in (0, 1):
        change(state, Slice("n0", (gpu,), gpu_milli=100), -1)
    assert fit(state, gang_of(gpus=1)) is None
    assert fit(state, gang_of(gpus=1, gpu_milli=900, members=2)) is not None


def test_a_part_of_a_gpu_rather_goes_where_one_is_already_broken() -> None:
    state = state_of([node(2), node(2)])
    change(state, Slice("n1", (0,), gpu_milli=200), -1)
    assert nodes_of(fit(state, gang_of(gpus=1, gpu_milli=500))) == [(1, 1)]


def test_the_same_megabytes_are_another_share_of_another_kind_of_gpu() -> None:
    state = state_of([node(1, gpu_memory_mb=80), node(1, gpu_memory_mb=24)])
    gang = gang_of(gpus=1, gpu_milli=0, gpu_memory_mb=20, members=5)
    assert room_for(state.cluster, gang, 99) == 5
    plan = fit(state, gang)
    assert plan is not None
    given_ = slices(state, plan, gang.demand)
    assert {(slice_.node, slice_.gpu_milli) for slice_ in given_} == {("n0", 250), ("n1", 834)}


# -- which GPUs ----------------------------------------------------------------------------


def test_only_gpus_of_the_models_and_the_memory_asked_for_are_given() -> None:
    state = state_of(
        [
            node(1, gpu_model="A", gpu_memory_mb=40),
            node(2, gpu_model="B", gpu_memory_mb=80),
            node(4, gpu_model="C", gpu_memory_mb=80),
        ]
    )
    assert nodes_of(fit(state, gang_of(gpus=1))) == [(0, 1)]
    assert nodes_of(fit(state, gang_of(gpus=1, gpu_memory_mb=41))) == [(1, 1)]
    assert nodes_of(fit(state, gang_of(gpus=1, gpu_models=["C", "D"]))) == [(2, 1)]
    assert fit(state, gang_of(gpus=1, gpu_models=["A"], gpu_memory_mb=41)) is None
    assert fit(state, gang_of(gpus=1, gpu_models=["A", "B"], members=4)) is None


def test_who_wants_no_gpu_does_not_care_about_models() -> None:
    state = state_of([node(0)])
    assert fit(state, gang_of(gpu_models=["H200"], gpu_memory_mb=80)) is not None


# -- nodes of one's own, and so many on each -----------------------------------------------


def test_whole_nodes_are_empty_before_and_closed_after() -> None:
    state = state_of([node(8), node(8)])
    change(state, Slice("n0", (), 1000, 0), -1)
    alone = gang_of(gpus=1, whole_nodes=True)
    assert nodes_of(fit(state, alone)) == [(1, 1)]
    assert fit(state, alone._replace(members=9)) is None
    change(state, Slice("n1", (0,)), -1, exclusive=True)
    assert nodes_of(fit(state, gang_of(gpus=4))) == [(0, 1)]
    assert fit(state, gang_of(gpus=4, members=3)) is None


def test_a_gang_with_whole_nodes_may_have_several_members_on_one() -> None:
    state = state_of([node(2), node(2), node(2)])
    plan = fit(state, gang_of(gpus=1, members=5, whole_nodes=True))
    assert nodes_of(plan) == [(0, 2), (1, 2), (2, 1)]


def test_so_many_members_per_node_are_exactly_so_many() -> None:
    state = state_of([node(8), node(3), node(2)])
    plan = fit(state, gang_of(gpus=1, members=6, members_per_node=2))
    assert plan is not None
    assert sorted(plan.nodes) == [(0, 2), (1, 2), (2, 2)]
    assert fit(state, gang_of(gpus=1, members=8, members_per_node=2)) is None
    assert nodes_of(fit(state, gang_of(gpus=1, members=8, members_per_node=8))) == [(0, 8)]


# -- near each other -----------------------------------------------------------------------


def racks(*gpus: int) -> State:
    """Racks, two in a block, of two nodes each, with so many GPUs a node."""
    return state_of(
        [node(each, place=f"b{n // 2}/r{n % 2}") for n, each in enumerate(gpus) for _ in (1, 2)]
    )


def test_a_gang_takes_the_tightest_rack_that_holds_it_then_a_block_then_anything() -> None:
    state = racks(4, 2, 3, 1)
    assert nodes_of(fit(state, gang_of(gpus=1, members=4))) == [(0, 4)]  # one node, as ever
    assert nodes_of(fit(state, gang_of(gpus=1, members=5))) == [(4, 3), (5, 2)]
    assert nodes_of(fit(state, gang_of(gpus=1, members=7))) == [(0, 4), (1, 3)]
    block = fit(state, gang_of(gpus=1, members=9))
    assert nodes_of(block) == [(0, 4), (1, 4), (2, 1)]
    assert block is not None
    assert block.rule == "the tightest block that holds it, b0"
    assert nodes_of(fit(state, gang_of(gpus=1, members=13))) == [(0, 4), (1, 4), (4, 3), (5, 2)]


def test_what_is_required_is_never_spread_and_what_is_preferred_may_be() -> None:
    state = racks(2, 2, 2, 2)
    for within, most in ((Within.NODE, 2), (Within.RACK, 4), (Within.BLOCK, 8)):
        required = gang_of(gpus=1, within=within, within_required=True)
        assert fit(state, required._replace(members=most)) is not None
        assert fit(state, required._replace(members=most + 1)) is None
        assert fit(state, required._replace(members=most + 1, required=False)) is not None


def test_a_node_without_a_place_is_in_no_rack_but_near_to_itself() -> None:
    state = state_of([node(2), node(2)])
    near = gang_of(gpus=1, within="rack", within_required=True)
    assert nodes_of(fit(state, near._replace(members=2))) == [(0, 2)]
    assert fit(state, near._replace(members=3)) is None


def test_the_one_rack_that_holds_a_gang_is_found_among_many_that_nearly_do() -> None:
    """Forty tighter racks have as many GPUs free, but in pieces too small for a member."""
    pieces = [node(1, place=f"b/r{rack}") for rack in range(40) for _ in range(4)]
    state = state_of([*pieces, *(node(2, place="b/whole") for _ in range(3))])
    plan = fit(state, gang_of(gpus=2, members=2, within="rack", within_required=True))
    assert nodes_of(plan) == [(160, 1), (161, 1)]


def test_clustering_puts_like_beside_like() -> None:
    """Parts of GPUs go where GPUs are shared, whole ones where none is, what wants none where
    there are none."""
    cluster = Cluster(msgspec.structs.replace(POLICY, placement="clustering"))
    for name, gpus in (("a", 4), ("b", 4), ("c", 0)):
        cluster.join(name, gpus=gpus)

    def where(**wish: Any) -> str:
        return cluster.job(cluster.run(**wish)).members[0].slice.node

    assert where(gpus=1, gpu_milli=400) == "a"
    assert where(gpus=2) == "b"
    assert where(gpus=1, gpu_milli=300) == "a"
    assert where(gpus=1, gpu_milli=900) == "a", "not on the free GPUs beside whole ones"
    assert where(gpus=1) == "b"
    assert where() == "c"

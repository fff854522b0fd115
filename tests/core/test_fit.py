"""Where gangs fit: never too much on a node, always whole, and found whenever it exists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.apply import apply
from shoal.core.scheduling.fit import fit, free_gpus, slices
from shoal.core.state import State
from shoal.model.events import JobPlaced, JobSubmitted, NodeJoined, NodeReady
from shoal.model.job import JobSpec
from shoal.model.resources import Demand, Slice
from tests.core.build import examples, node_spec


class Size(NamedTuple):
    gpus: int
    cpus: int
    memory_mb: int


def state_of(nodes: Sequence[Size], held: Sequence[tuple[int, Demand]] = ()) -> State:
    """Nodes of these sizes, on which as much of `held` is taken as there is room for."""
    state = State()
    for number, (gpus, cpus, memory_mb) in enumerate(nodes):
        spec = node_spec(f"n{number}", gpus=gpus, cpus=cpus, memory_mb=memory_mb)
        apply(state, NodeJoined(at_ms=1, node=spec.id, spec=spec, incarnation=1))
        apply(state, NodeReady(at_ms=1, node=spec.id))
    for number, (where, demand) in enumerate(held, start=1):
        take(state, number, where % len(nodes), demand)
    return state


def take(state: State, number: int, index: int, demand: Demand) -> None:
    room = state.rooms[index]
    if room.holds(demand) < 1:
        return
    gpus = tuple(reversed(free_gpus(room)))[: demand.gpus]  # holes where they are least expected
    slice_ = Slice(state.order[index].id, gpus, demand.cpu_milli, demand.memory_mb)
    job_id = f"h{number}"
    spec = JobSpec(command=("x",), gpus=demand.gpus, cpu_milli=demand.cpu_milli)
    apply(state, JobSubmitted(at_ms=1, job=job_id, spec=spec))
    apply(
        state,
        JobPlaced(at_ms=1, job=job_id, attempt=1, slices=(slice_,), master="m:1", why=""),
    )


NODES = st.lists(
    st.builds(Size, st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)),
    min_size=1,
    max_size=4,
)
DEMANDS = st.builds(
    Demand, st.integers(0, 3), st.sampled_from((0, 500, 1000, 2000)), st.integers(0, 3)
)
HELD = st.lists(st.tuples(st.integers(0, 3), DEMANDS), max_size=4)


@examples
@given(nodes=NODES, held=HELD, members=st.integers(1, 6), demand=DEMANDS)
def test_a_gang_is_placed_whole_without_overlap_and_within_every_node(
    nodes: list[Size], held: list[tuple[int, Demand]], members: int, demand: Demand
) -> None:
    state = state_of(nodes, held)
    plan = fit(state, members, demand)
    if plan is None:
        return
    given_ = slices(state, plan, demand)
    assert len(given_) == members
    for node in state.order:
        mine = [slice_ for slice_ in given_ if slice_.node == node.id]
        room = state.rooms[node.index]
        gpus = [gpu for slice_ in mine for gpu in slice_.gpus]
        assert len(gpus) == len(set(gpus)) == len(mine) * demand.gpus
        assert set(gpus) <= set(free_gpus(room))
        assert len(mine) * demand.cpu_milli <= room.cpu_milli
        assert len(mine) * demand.memory_mb <= room.memory_mb


@examples
@given(nodes=NODES, held=HELD, members=st.integers(1, 4), demand=DEMANDS)
def test_if_nothing_is_found_then_nothing_exists(
    nodes: list[Size], held: list[tuple[int, Demand]], members: int, demand: Demand
) -> None:
    state = state_of(nodes, held)
    assert (fit(state, members, demand) is not None) == exists(state, members, demand)


def exists(state: State, members: int, demand: Demand) -> bool:
    """By trying every way to seat the members on the nodes."""
    for seats in product(range(len(state.order)), repeat=members):
        counts = [seats.count(index) for index in range(len(state.order))]
        if all(
            count * demand.gpus <= len(free_gpus(room))
            and count * demand.cpu_milli <= room.cpu_milli
            and count * demand.memory_mb <= room.memory_mb
            for count, room in zip(counts, state.rooms, strict=True)
        ):
            return True
    return False


def test_the_tightest_node_that_holds_the_whole_gang_is_taken() -> None:
    state = state_of([Size(8, 8, 8), Size(4, 8, 8), Size(2, 8, 8)])
    assert fit(state, 2, Demand(2, 0, 0)) == [(1, 2)]


def test_a_gang_too_large_for_one_node_goes_to_the_emptiest_first() -> None:
    state = state_of([Size(2, 8, 8), Size(4, 8, 8), Size(4, 8, 8)])
    assert fit(state, 9, Demand(1, 0, 0)) == [(1, 4), (2, 4), (0, 1)]


def test_nodes_that_are_equal_are_taken_in_join_order() -> None:
    state = state_of([Size(4, 8, 8)] * 3)
    assert fit(state, 1, Demand(1, 1000, 1)) == [(0, 1)]


def test_a_demand_of_nothing_fits_anywhere_and_any_number_of_times() -> None:
    state = state_of([Size(0, 0, 0)])
    assert fit(state, 1000, Demand(0, 0, 0)) == [(0, 1000)]


def test_nothing_fits_where_there_is_no_node() -> None:
    assert fit(State(), 1, Demand(0, 0, 0)) is None


def test_a_member_gets_the_lowest_free_gpus() -> None:
    state = state_of([Size(4, 8, 8)])
    room = state.rooms[0]
    room.gpu_bits = 0b1101
    room.gpus = 3
    assert [slice_.gpus for slice_ in slices(state, [(0, 3)], Demand(1, 0, 0))] == [
        (0,),
        (2,),
        (3,),
    ]

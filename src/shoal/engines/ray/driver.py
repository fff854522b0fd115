"""The driver: the one process of a controller that talks to a Ray.

`python -m shoal.engines.ray.driver CLUSTER ADDRESS` takes requests as lines on its standard input
and answers each with a line. It speaks to Ray's head and to no dashboard, so it works wherever Ray
does, with a token or without. It keeps nothing that matters: what it remembers only spares it work
at the next look. When Ray ends it, the supplier starts the next one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from socket import gethostname
from typing import Any

import msgspec

from shoal.engines.ray import holder
from shoal.engines.ray.read import Facts, Held, Living, RayActor, RayNode, choose_whole
from shoal.engines.ray.render import NAMESPACE, Ask, actor_name
from shoal.machine.kernel import die_with_parent
from shoal.ports import SupplyError

CONNECT_S = 5.0
STATUS_S = 5.0
SEARCH_S = 15.0
CAUSE_CHARACTERS_MAX = 200
SEARCHED_AT_ONCE = 32  # machines, in one look
ENDED_MAX = 200  # ended orders that are remembered


class Look(msgspec.Struct, frozen=True, tag=True):
    """Everything of ours."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Make an actor; on this Ray node, if one is named."""

    ask: Ask
    node: str = ""


class End(msgspec.Struct, frozen=True, tag=True):
    """End an order's agent, and let its actor go."""

    order: str


Request = Look | Hold | End


class Answer(msgspec.Struct, frozen=True):
    facts: Facts | None = None
    error: str = ""


class Driver:
    def __init__(self, ray: Any, cluster: str) -> None:
        self._ray = ray
        self._state: Any = import_module("ray._private.state")
        self._cluster = cluster
        self._begin = actor_name(cluster, "")
        self._ids: dict[str, str] = {}  # Ray's id of each actor, by order
        self._handles: dict[str, Any] = {}
        self._asked: dict[str, Ask] = {}
        self._ended: dict[str, Held] = {}
        self._released: dict[str, None] = {}
        self._dead: dict[str, RayActor] = {}
        self._searched: set[str] = set()  # Ray nodes whose machines we know
        self._living: dict[str, Living] = {}

    def answer(self, request: Request) -> Answer:
        match request:
            case Look():
                return Answer(self._look())
            case Hold(ask, node):
                self._hold(ask, node)
            case End(order):
                self._end(order)
        return Answer()

    # -- look --------------------------------------------------------------------------------

    def _look(self) -> Facts:
        nodes = self._nodes()
        self._find_handles()
        actors = {order: self._actor(id_) for order, id_ in self._ids.items()}
        held = self._statuses(actors)
        for order, actor in actors.items():
            if actor.state == "DEAD":
                self._bury(order, actor)
            elif actor.state == "ALIVE":
                self._dead.pop(order, None)
                self._living.pop(order, None)
        self._search(nodes)
        for order in self._living.keys() & self._released.keys():
            self._end(order)
        worker = import_module("ray._private.worker").global_worker
        return Facts(
            session=str(worker.node.session_name),
            nodes=nodes,
            searched=tuple(sorted(self._searched)),
            actors={**self._dead, **actors},
            held={**held, **self._ended},
            living=self._living,
            asked={order: ask for order, ask in self._asked.items() if order in actors},
            released=tuple(self._released),
        )

    def _bury(self, order: str, actor: RayActor) -> None:
        """Its agent may live on: so the machine is searched."""
        self._handles.pop(order, None)
        self._ids.pop(order, None)
        self._asked.pop(order, None)
        self._searched.discard(actor.node)
        self._dead[order] = actor
        _bound(self._dead)

    def _nodes(self) -> tuple[RayNode, ...]:
        free = self._state.available_resources_per_node()
        return tuple(
            RayNode(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                alive=node["Alive"],
                total=node["Resources"],
                free=free.get(node["NodeID"], {}),
            )
            for node in self._ray.nodes()
        )

    def _find_handles(self) -> None:
        """The actors of ours that live or wait. Those that we knew before and that are not among
        them have died; they are still asked about, by their id."""
        for found in self._ray.util.list_named_actors(all_namespaces=True):
            name = str(found["name"])
            if found["namespace"] != NAMESPACE or not name.startswith(self._begin):
                continue
            order = name[len(self._begin) :]
            try:
                handle = self._ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                continue  # it has just ended
            self._handles[order] = handle
            self._ids[order] = handle._actor_id.hex()

    def _actor(self, id_: str) -> RayActor:
        row = self._state.actors(actor_id=id_)
        if not row:
            return RayActor(state="DEAD", node="", cause="Ray has forgotten its actor")
        return RayActor(
            state=str(row["State"]), node=_node_id(row), cause=_cause(row.get("DeathCause"))
        )

    def _statuses(self, actors: dict[str, RayActor]) -> dict[str, Held]:
        asked = {
            self._handles[order].status.remote(): order
            for order, actor in actors.items()
            if actor.state == "ALIVE" and order in self._handles
        }
        found = {
            asked[reference]: msgspec.convert(told, Held)
            for reference, told in self._answers(asked, STATUS_S)
        }
        for order, held in found.items():
            if held.ended:
                self._remember(order, held)
        return found

    def _remember(self, order: str, held: Held) -> None:
        self._ended[order] = held
        self._living.pop(order, None)
        _bound(self._ended)

    def _search(self, nodes: tuple[RayNode, ...]) -> None:
        """Look for living agents on machines that are new to us or have just lost an actor, and
        again where an agent has no actor."""
        alive = {node.id for node in nodes if node.alive}
        self._searched &= alive
        alone = {id_ for living in self._living.values() for id_ in living.nodes}
        wanted = sorted(id_ for id_ in alive if id_ in alone or id_ not in self._searched)
        wanted = wanted[:SEARCHED_AT_ONCE]
        found = self._ask_machines(wanted)
        self._searched |= set(found)
        self._living = {
            order: living
            for order, living in self._living.items()
            if not found.keys() & living.nodes and alive & set(living.nodes)
        }
        for id_, orders in found.items():
            for order, ask in orders.items():
                before = self._living.get(order)
                ids = (*before.nodes, id_) if before is not None else (id_,)
                self._living[order] = Living(ask=msgspec.convert(ask, Ask), nodes=ids)

    def _ask_machines(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        """The orders whose agents live there, by Ray's id of the node."""
        task = self._ray.remote(holder.orders_here)
        asked = {
            task.options(num_cpus=0, max_retries=0, **_on(id_)).remote(self._cluster): id_
            for id_ in ids
        }
        return {asked[reference]: told for reference, told in self._answers(asked, SEARCH_S)}

    def _answers(self, references: Iterable[Any], timeout_s: float) -> list[tuple[Any, Any]]:
        """Those that come in time. What fails has just ended, and the next look sees that."""
        waiting = list(references)
        if not waiting:
            return []
        ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
        found = []
        for reference in ready:
            with contextlib.suppress(self._ray.exceptions.RayError):
                found.append((reference, self._ray.get(reference)))
        return found

    # -- hold and end ------------------------------------------------------------------------

    def _hold(self, ask: Ask, node: str) -> None:
        if ask.order in self._handles:
            return
        if ask.whole:
            chosen = choose_whole(self._nodes(), ask)
            if isinstance(chosen, str):
                raise SupplyError(chosen)
            ask, node = chosen
        self._asked[ask.order] = ask
        handle = (
            self._ray.remote(holder.Holder)
            .options(
                name=ask.name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,  # on another machine, it would be another node
                max_concurrency=4,
                num_cpus=ask.cpus,
                num_gpus=ask.gpus,
                memory=ask.memory_bytes or None,
                **(_on(node) if node else {}),
            )
            .remote(msgspec.to_builtins(ask))
        )
        self._handles[ask.order] = handle
        self._ids[ask.order] = handle._actor_id.hex()

    def _end(self, order: str) -> None:
        """An actor that waits is let go at once. One that runs ends its agent, and then itself. An
        agent that has lost its actor is told directly, and again at each look until it ends."""
        self._find_handles()
        id_ = self._ids.get(order)
        actor = self._actor(id_) if id_ is not None else self._dead.get(order)
        self._released[order] = None
        _bound(self._released)
        places = set(self._living[order].nodes) if order in self._living else set()
        if actor is not None and actor.state == "ALIVE":
            holds = self._handles[order]
            if hasattr(holds, "end"):
                self._answers([holds.end.remote()], STATUS_S)
                return
            places.add(actor.node)  # a holder of a Shoal before 0.7
        if actor is not None and actor.state == "DEAD":
            places.add(actor.node)
        alive = {node.id for node in self._nodes() if node.alive}
        task = self._ray.remote(holder.end_order)
        asked = [
            task.options(num_cpus=0, max_retries=0, **_on(place)).remote(self._cluster, order)
            for place in sorted(places & alive)
        ]
        self._answers(asked, SEARCH_S)
        if actor is not None and actor.state not in ("ALIVE", "DEAD"):
            self._ray.kill(self._handles[order], no_restart=True)


def _bound(remembered: dict[str, Any]) -> None:
    while len(remembered) > ENDED_MAX:
        del remembered[next(iter(remembered))]


def _on(node: str) -> dict[str, Any]:
    scheduling = import_module("ray.util.scheduling_strategies")
    return {"scheduling_strategy": scheduling.NodeAffinitySchedulingStrategy(node, soft=False)}


def _node_id(row: dict[str, Any]) -> str:
    found = str(row["Address"]["NodeID"])
    return "" if set(found) <= {"f"} else found


def _cause(cause: Any) -> str:
    """Ray's own words for the death of an actor; one sentence of them."""
    context = getattr(cause, "actor_died_error_context", None)
    text = " ".join(str(getattr(context, "error_message", "")).split())
    return text.partition(". ")[0][:CAUSE_CHARACTERS_MAX]


# -- the process -----------------------------------------------------------------------------


def connect(address: str) -> Any:
    """Ray's own call waits for most of a minute if nobody answers, and says little."""
    try:
        client = import_module("ray._raylet").GcsClient(address=address)
        data = client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=CONNECT_S)
        raylets = client.get_all_node_info(timeout=CONNECT_S).values()
    except import_module("ray.exceptions").AuthenticationError:
        message = f"the Ray at {address} refuses our token"
        raise SupplyError(f"{message}; name a file that holds it by token_file") from None
    except Exception as error:
        told = f"{type(error).__name__}: {one_line(str(error))}"
        raise SupplyError(f"what answers at {address} is not the head of a Ray: {told}") from None
    ray = import_module("ray")
    difference = versions_differ(data or b"{}", ray.__version__, sys.version_info[:2])
    if difference:
        raise SupplyError(difference)
    here = [raylet for raylet in raylets if raylet.node_manager_hostname == gethostname()]
    alive = [raylet for raylet in here if raylet.state == raylet.ALIVE]
    if are_anothers([raylet.raylet_socket_name for raylet in alive]):
        message = f"the Ray at {address} was started by another user on this machine"
        raise SupplyError(f"{message}; run the controller as that user")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except Exception as error:
        raise SupplyError(no_node_here(address, one_line(str(error)))) from None
    by_value = import_module("ray.cloudpickle")
    by_value.register_pickle_by_value(holder)
    return ray


def versions_differ(metadata: bytes, ray: str, python: tuple[int, int]) -> str:
    """A driver must be of the same Ray and the same minor version of Python; empty if it is."""
    found = msgspec.json.decode(metadata, type=dict[str, object])
    theirs = str(found.get("ray_version", ray))
    if theirs != ray:
        return f"Ray is {ray} on this machine and {theirs} there: pip install ray=={theirs}"
    version = str(found.get("python_version", f"{python[0]}.{python[1]}"))
    if version.split(".")[:2] != [str(part) for part in python]:
        ours = f"{python[0]}.{python[1]}"
        return f"Python is {ours} on this machine and {version} there: run Shoal with {version}"
    return ""


def are_anothers(sockets: Iterable[str]) -> bool:
    """Whether there are raylets on this machine, and we may speak to none of them: Ray's library
    would abort this process."""
    refused = False
    for path in sockets:
        try:
            os.stat(path)
        except PermissionError:
            refused = True
        except OSError:
            continue  # of another machine, or another container, after all
        else:
            if os.access(path, os.W_OK, effective_ids=True):
                return False
            refused = True
    return refused


def no_node_here(address: str, said: str) -> str:
    advice = f"run here: ray start --address {address} --num-cpus 0 --num-gpus 0"
    return f"this machine cannot use the Ray at {address}; {advice} (Ray: {said[:100]})"


def one_line(text: str) -> str:
    return " ".join(text.split())[:CAUSE_CHARACTERS_MAX]


def main() -> None:
    """Ray writes to standard output as it likes, so answers have a handle of their own. The end is
    not negotiated: Ray has threads that may hang in calls to a head that is gone."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    cluster, address = sys.argv[1:]
    driver: Driver | None = None
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        try:
            if driver is None:
                driver = Driver(connect(address), cluster)
            answer = driver.answer(request)
        except SupplyError as error:
            answer = Answer(error=str(error))
        except Exception as error:
            answer = Answer(error=f"Ray: {type(error).__name__}: {one_line(str(error))}")
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
        if driver is None:
            break  # Ray reads its settings once, so the next attempt is another process's
    os._exit(0)


if __name__ == "__main__":
    main()

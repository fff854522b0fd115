"""The relay: the one process of a controller that is a Ray driver.

Sees which machines Ray has, keeps a mailbox on each, and takes messages to and fro. It holds no
state that matters: when it ends, for whatever reason, the engine starts the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from typing import Any

import msgspec

from shoal.engines.ray.messages import FACTS_KEY, Facts, FromNode, FromPost, KnownNode, ToNode
from shoal.engines.ray.messages import versions as our_versions
from shoal.engines.ray.render import LABEL_NODE, LABEL_STAMP, NAMESPACE
from shoal.kernel import die_with_parent
from shoal.wire import Heard, Link

log = logging.getLogger("shoal.relay")

LOOK_S = 0.5
# Ray's own calls wait for a lost head for a minute and then end the process. We are quicker.
CALL_TIMEOUT_S = 8.0
PULL_TIMEOUT_S = 30.0
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 10.0
TO_ENGINE_BYTES_MAX = 16 * 1024 * 1024
TO_NODE_MAX = 10_000
CALLS_AT_ONCE = 8

_decode = msgspec.msgpack.Decoder(FromPost).decode


class Relay:
    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._link: Link | None = None
        self.over = asyncio.Event()
        self._couriers: dict[str, Courier] = {}  # by Shoal's name of the node
        self._told: Facts | None = None

    def connect(self) -> Link:
        return Link(ToNode, self._opened, self._received, self._closed)

    def _opened(self, link: Link) -> None:
        self._link = link

    def _closed(self, link: Link) -> None:  # noqa: ARG002
        self.over.set()

    def _received(self, message: ToNode) -> None:
        courier = self._couriers.get(message.node)
        if courier is not None:
            courier.send(message.data)

    async def deliver(self, message: FromNode) -> None:
        """To the engine; waits while the engine does not read."""
        while self._link is not None and self._link.backlog_bytes > TO_ENGINE_BYTES_MAX:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if self._link is not None:
            self._link.send(message)

    async def look_around(self) -> None:
        """For ever: a courier for each machine that Ray has."""
        while True:
            alive = newest(await asyncio.wait_for(self._nodes(), CALL_TIMEOUT_S))
            for name, courier in list(self._couriers.items()):
                if name not in alive or alive[name]["NodeID"] != courier.place:
                    courier.dismiss()
                    del self._couriers[name]
            for name, found in alive.items():
                if name not in self._couriers:
                    self._couriers[name] = Courier(self, self._ray, name, found)
            await asyncio.wait_for(self._publish(), CALL_TIMEOUT_S)
            await asyncio.sleep(LOOK_S)

    async def _nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await asyncio.to_thread(self._ray.nodes)
        return found

    async def _publish(self) -> None:
        shoal, ray, python = our_versions()
        nodes = {
            name: KnownNode(courier.address, courier.incarnation)
            for name, courier in self._couriers.items()
        }
        facts = Facts(shoal=shoal, ray=ray, python=python, nodes=nodes)
        if facts != self._told:
            from ray.experimental.internal_kv import _internal_kv_put

            data = msgspec.json.encode(facts)
            await asyncio.to_thread(_internal_kv_put, FACTS_KEY, data, namespace=NAMESPACE.encode())
            self._told = facts


def newest(nodes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The living Ray nodes that carry for one of ours, by our name; of two the one started last."""
    found: dict[str, dict[str, Any]] = {}
    for node in nodes:
        name = node["Labels"].get(LABEL_NODE)
        if not node["Alive"] or not name:
            continue
        if name not in found or _stamp(node) > _stamp(found[name]):
            found[name] = node
    return found


def _stamp(node: dict[str, Any]) -> int:
    try:
        return int(node["Labels"].get(LABEL_STAMP, "0"))
    except ValueError:
        return 0


class Courier:
    """Goes between the engine and one node's mailbox, in sessions: whatever goes wrong ends the
    session, and the next one begins with a complete report of the agent."""

    def __init__(self, relay: Relay, ray: Any, node: str, found: dict[str, Any]) -> None:
        self.place: str = found["NodeID"]
        self.address: str = found["NodeManagerAddress"]
        self.incarnation = 0
        self._node = node
        self._relay = relay
        self._ray = ray
        self._outgoing: list[bytes] = []
        self._lossy = False  # some of it was dropped: only a new session makes that good
        self._some = asyncio.Event()
        self._task = asyncio.create_task(self._work())

    def send(self, data: bytes) -> None:
        if len(self._outgoing) < TO_NODE_MAX:
            self._outgoing.append(data)
        else:
            self._lossy = True
        self._some.set()

    def dismiss(self) -> None:
        self._task.cancel()

    async def _work(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            try:
                since = time.monotonic()
                mailbox = await asyncio.wait_for(
                    asyncio.to_thread(self._find_mailbox), PULL_TIMEOUT_S
                )
                await self._session(mailbox)
            except Exception as error:
                log.warning("%s: %s", self._node, _first_line(error))
                if time.monotonic() - since > PULL_TIMEOUT_S:
                    pause_s = RETRY_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_MAX_S, pause_s * 2)

    def _find_mailbox(self) -> Any:
        """The actor of this Ray node; it outlives relays. A restarted raylet has another id, so it
        gets another mailbox, and the old one went with the old raylet."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from shoal.engines.ray.mailbox import Mailbox

        actor = self._ray.remote(Mailbox).options(
            name=f"shoal-agent-{self._node}-{self.place[:16]}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            max_concurrency=CALLS_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.place, soft=False),
        )
        return actor.remote(self._node)

    async def _session(self, mailbox: Any) -> None:
        number = await asyncio.wait_for(_answer(mailbox.open.remote()), PULL_TIMEOUT_S)
        self._outgoing, self._lossy = [], False
        both = [
            asyncio.create_task(self._pull(mailbox, number)),
            asyncio.create_task(self._push(mailbox, number)),
        ]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _pull(self, mailbox: Any, number: int) -> None:
        session = time.time_ns()
        while True:
            batch = await asyncio.wait_for(_answer(mailbox.pull.remote(number)), PULL_TIMEOUT_S)
            for data in batch:
                message: FromPost = _decode(data)
                if isinstance(message, Heard):
                    self.incarnation = message.report.incarnation
                await self._relay.deliver(FromNode(self._node, data, session))

    async def _push(self, mailbox: Any, number: int) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            if self._lossy:
                raise ConnectionError("it takes no messages")
            if self._outgoing:
                batch, self._outgoing = self._outgoing, []
                await asyncio.wait_for(_answer(mailbox.push.remote(number, batch)), PULL_TIMEOUT_S)


async def _answer(reference: Any) -> Any:
    return await reference


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


async def _serve(address: str, handle: int) -> int:
    import ray

    await asyncio.to_thread(
        lambda: ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
        )
    )
    log.info("connected to Ray at %s", address)
    relay = Relay(ray)
    await asyncio.get_running_loop().create_connection(
        relay.connect, sock=socket.socket(fileno=handle)
    )
    looking = asyncio.create_task(relay.look_around())
    over = asyncio.create_task(relay.over.wait())
    await asyncio.wait([looking, over], return_when=asyncio.FIRST_COMPLETED)
    if looking.done():
        log.warning("Ray does not answer: %s", _first_line(looking.exception()))
        return 1
    return 0


def main() -> None:
    """Ray has threads that may hang in calls to a head that is gone: the end is not negotiated."""
    die_with_parent()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    code = 1
    try:
        loop = asyncio.new_event_loop()
        code = loop.run_until_complete(_serve(sys.argv[1], int(sys.argv[2])))
    except Exception as error:
        log.warning("no connection to Ray at %s: %s", sys.argv[1], _first_line(error))
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

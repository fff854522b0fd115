"""What clients see when routers, replicas and the process that drives the gateway are killed.

    python -m bench.tokens_faults --streams 20                     through the router, two replicas
    python -m bench.tokens_faults --streams 20 --llama PYTHON      real llama.cpp servers
    python -m bench.tokens_faults --requests 10000                 through HAProxy and the router

With `--streams`, one replica is killed (-9) in the middle of its streams, and the other is drained,
and stopped a second later with what it still has; a third replica is there by then. Each text is
compared with an undisturbed one. With `--requests`, one of the three parts is killed every second;
every text is checked, and failures are counted by cause. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from harness.engine import llama
from harness.engine.running import Process
from harness.engine.text import answer, render
from harness.waiting import until_async

from bench.figures import machine
from bench.gateway_peers import folder, free_port
from bench.token_load import Answer, Client, Target, body
from bench.token_peers import SERVICE, RouterProcess, ready
from shoal.machine.files import write_private
from shoal.model.service import GatewayEntry, Replica, ReplicaState, Route, Routing, Served, Wanted
from shoal.model.tokens import RoutedReplica, RoutedService, RouterSeen, RouterWanted

WORDS = ("alpha", "beta", "gamma", "delta", "omega")
TOKENS = 250  # of each stream, which takes three seconds; llama.cpp has room for fewer
LLAMA_TOKENS = 100
BEGUN_S, DRAIN_S = 0.3, 1.0
EVERY_S = 1.0
TOGETHER = 16  # requests at a time
# The process that drives the gateway, as a controller does: it can be killed and started again.
DRIVER = """
import sys, time, msgspec
from pathlib import Path
from shoal.gateway.gateway import Gateway
from shoal.model.service import Wanted
gateway = Gateway(Path(sys.argv[1]))
gateway.apply(msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Wanted))
while True:
    gateway.tick()
    time.sleep(0.5)
"""
STOP = """
import sys
from pathlib import Path
from shoal.gateway.gateway import Gateway
Gateway(Path(sys.argv[1])).stop(grace_s=0)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.tokens_faults", description=__doc__)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--llama", default="", help="a Python that has xllamacpp and gguf")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    print(machine())
    found: dict[str, Any] = {}
    with folder() as directory:
        if asked.streams:
            found["streams"] = asyncio.run(streams(directory, asked.streams, asked.llama))
        if asked.requests:
            found["requests"] = asyncio.run(requests(directory, asked.requests, asked.seed))
    print(json.dumps(found))
    return 0


# -- streams


async def streams(directory: Path, count: int, interpreter: str) -> dict[str, Any]:
    start = _llamas(directory, interpreter) if interpreter else _simulated
    started = a, b, c = [await start() for _ in range(3)]
    try:
        with RouterProcess(directory, ()) as router:
            target = Target(
                socket=str(directory / "router.sock"), headers=(f"X-Shoal-Service: {SERVICE}",)
            )
            bodies = [
                _chat(number, LLAMA_TOKENS if interpreter else TOKENS) for number in range(count)
            ]
            tell(router, _replica("a", a), _replica("b", b))
            client = Client(target)
            whole = [each.text for each in await asyncio.gather(*map(client.ask, bodies))]
            again = [each.text for each in await asyncio.gather(*map(client.ask, bodies))]
            tasks = [asyncio.create_task(client.ask(each)) for each in bodies]
            await until_async(lambda: _in_flight(router) == {"a", "b"})
            await asyncio.sleep(BEGUN_S)
            a.kill()
            tell(router, _replica("b", b), _replica("c", c))
            draining = _replica("b", b, ReplicaState.DRAINING)
            tell(router, draining, _replica("c", c))
            await asyncio.sleep(DRAIN_S)
            left = sum(not each.done() for each in tasks)
            b.kill()
            answers = await asyncio.gather(*tasks)
            seen = tell(router, _replica("c", c)).services[SERVICE]
            client.close()
    finally:
        for each in started:
            each.close()
    broken = Counter(each.problem for each in answers if each.problem)
    equal = sum(each.text == text for each, text in zip(answers, whole, strict=True))
    shown = {
        "streams": count,
        "broken": dict(broken),
        "equal": equal,
        "equal_undisturbed": sum(map(str.__eq__, whole, again)),
        "resumed": seen.resumed,
        "still_there_when_the_drained_one_ended": left,
    }
    print(f"streams through {'llama.cpp' if interpreter else 'simulated engines'}: {shown}")
    return shown


async def _simulated() -> Process:
    return await asyncio.to_thread(Process, "--table", '{"step_ms": 12}')


def _llamas(directory: Path, interpreter: str) -> Callable[[], Any]:
    async def start() -> llama.Llama:
        server = llama.Llama(interpreter, free_port(), directory)
        await asyncio.to_thread(ready, server.port, "/health")
        return server

    return start


def _chat(number: int, tokens: int) -> bytes:
    content = f"{WORDS[number % len(WORDS)]} number {number}"
    return body(messages=[{"role": "user", "content": content}], max_tokens=tokens, ignore_eos=True)


def _replica(name: str, engine: Any, state: ReplicaState = ReplicaState.READY) -> RoutedReplica:
    port = engine.port if isinstance(engine, llama.Llama) else engine.ports[0]
    return RoutedReplica(id=name, address="127.0.0.1", port=port, state=state)


def tell(router: RouterProcess, *replicas: RoutedReplica) -> RouterSeen:
    wanted = RouterWanted(services=(RoutedService(name=SERVICE, replicas=replicas),))
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(str(router.directory / "router-control.sock"))
        control.sendall(msgspec.json.encode(wanted) + b"\n")
        with control.makefile("rb") as lines:
            return msgspec.json.decode(lines.readline(), type=RouterSeen)


def _in_flight(router: RouterProcess) -> set[str]:
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(str(router.directory / "router-control.sock"))
        text = (router.directory / "router.json").read_bytes()
        control.sendall(text.rstrip(b"\n") + b"\n")
        with control.makefile("rb") as lines:
            seen = msgspec.json.decode(lines.readline(), type=RouterSeen)
    return {name for name, one in seen.services[SERVICE].replicas.items() if one.in_flight}


# -- requests


class Parts:
    """Everything that may be killed, and how it comes back."""

    def __init__(self, directory: Path, replicas: int) -> None:
        self.directory = directory / "gateway"
        self.port = free_port()
        self.engines = [Process("--table", '{"step_ms": 4}') for _ in range(replicas)]
        ports = [each.ports[0] for each in self.engines]
        route = Route(service=SERVICE, routing=Routing.CACHE)
        named = tuple(
            Replica(id=f"r{number}", address="127.0.0.1", port=port)
            for number, port in enumerate(ports)
        )
        entry = GatewayEntry(port=self.port)
        wanted = Wanted(entry=entry, services=(Served(route=route, replicas=named),))
        self.wanted = directory / "wanted.json"
        write_private(self.wanted, msgspec.json.encode(wanted))
        self.drive()
        self.killed: Counter[str] = Counter()

    def drive(self) -> None:
        words = [sys.executable, "-c", DRIVER, str(self.directory), str(self.wanted)]
        self.driver = subprocess.Popen(words, stdin=subprocess.DEVNULL)

    def kill(self, rng: random.Random) -> None:
        part = rng.choice(("router", "driver", "replica"))
        self.killed[part] += 1
        if part == "router":
            self._kill_router()
        elif part == "driver":
            self.driver.kill()
            self.driver.wait()
            self.drive()
        else:
            at = rng.randrange(len(self.engines))
            ports = self.engines[at].ports
            self.engines[at].close()
            self.engines[at] = Process("--table", '{"step_ms": 4}', ports=ports)

    def _kill_router(self) -> None:
        """The driver starts it again."""
        try:
            pid = int((self.directory / "router.pid").read_text().split()[0])
            subprocess.run(["kill", f"-{int(signal.SIGKILL)}", str(pid)], check=False)
        except (FileNotFoundError, ValueError, IndexError):
            self.killed["router, which was not there"] += 1

    def close(self) -> None:
        self.driver.kill()
        self.driver.wait()
        subprocess.run([sys.executable, "-c", STOP, str(self.directory)], check=False)
        for each in self.engines:
            each.close()


async def requests(directory: Path, count: int, seed: int) -> dict[str, Any]:
    rng, parts = random.Random(seed), await asyncio.to_thread(Parts, directory, 4)
    failures: Counter[str] = Counter()
    sent = 0
    try:
        await asyncio.to_thread(ready, parts.port, f"/{SERVICE}/v1/models")
        begun, ended = time.monotonic(), asyncio.Event()
        hurt = asyncio.create_task(_hurt(parts, rng, ended))
        numbers = iter(range(count))

        async def send() -> None:
            nonlocal sent
            path = f"/{SERVICE}/v1/chat/completions"
            client = Client(Target(port=parts.port, path=path))
            for number in numbers:
                if problem := await _one(client, number):
                    failures[problem] += 1
                sent += 1
            client.close()

        await asyncio.gather(*(send() for _ in range(TOGETHER)))
        ended.set()
        await hurt
    finally:
        parts.close()
    shown = {
        "requests": sent,
        "failures": dict(failures),
        "killed": dict(parts.killed),
        "seconds": round(time.monotonic() - begun),
    }
    print(shown)
    return shown


async def _hurt(parts: Parts, rng: random.Random, ended: asyncio.Event) -> None:
    while not ended.is_set():
        await asyncio.to_thread(parts.kill, rng)
        try:
            async with asyncio.timeout(EVERY_S):
                await ended.wait()
        except TimeoutError:
            pass


async def _one(client: Client, number: int) -> str:
    """Every third is no stream, and every tenth asks for the models. Why it is not good."""
    if number % 10 == 9:
        path = f"/{SERVICE}/v1/models"
        got = await client.ask(b"", method="GET", path=path)
        return f"GET: {got.problem}" if got.problem else ""
    stream = number % 3 > 0
    content = f"{WORDS[number % len(WORDS)]} {number}"
    messages: list[dict[str, object]] = [{"role": "user", "content": content}]
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 20, "ignore_eos": True}
    sent = body(**asked) if stream else json.dumps({"model": "sim", **asked}).encode()
    got = await client.ask(sent)
    kind = "stream" if stream else "answer"
    if got.problem:
        return f"{kind}: {got.problem}"
    expected = "".join(answer(render(messages, continued=False), 20, ends=False)[0])
    return "" if _text(got, stream) == expected else f"{kind}: another text"


def _text(got: Answer, stream: bool) -> str:
    if stream:
        return got.text
    choice = json.loads(got.body)["choices"][0]
    return str(choice["message"]["content"])


if __name__ == "__main__":
    raise SystemExit(main())

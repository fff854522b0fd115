"""What the router itself asks of an engine: its models, and to load or drop an adapter."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from shoal.router.openai import MODELS, UNREADABLE, encode
from shoal.router.wire import Lost, request_head
from shoal.router.world import MODELS_S, Replica, Service

ASK_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 120.0
ANSWER_BYTES_MAX = 4 << 20
HEADERS = [(b"host", b"router"), (b"content-type", b"application/json")]
LLAMA = "llamacpp"


class Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    parent: str | None = None


class Models(msgspec.Struct):
    data: list[Model] = []


class Lora(msgspec.Struct):
    id: int
    path: str = ""


async def ask(
    service: Service, replica: Replica, target: bytes, body: Any = None, within_s: float = 0.0
) -> tuple[int, bytes]:
    """Its status and its whole answer. Raises Lost."""
    text = encode(body) if body is not None else b""
    method = b"POST" if body is not None else b"GET"
    try:
        async with asyncio.timeout(within_s or ASK_TIMEOUT_S):
            line = await replica.pool.take(service.wanted.connect_timeout_ms / 1e3)
            try:
                line.begin(request_head(method, target, HEADERS, len(text)) + text)
                status, parts, size = await line.head(), list[bytes](), 0
                while data := await line.read():
                    parts.append(data)
                    size += len(data)
                    if size > ANSWER_BYTES_MAX:
                        raise Lost("the replica's answer is too long")
                return status, b"".join(parts)
            finally:
                replica.pool.put(line)
    except TimeoutError:
        raise Lost("the replica did not answer in time") from None


async def learn(service: Service, replica: Replica) -> None:
    """What models it lists, once a minute at most."""
    now = time.monotonic()
    if now < replica.models_until:
        return
    replica.models_until = now + MODELS_S
    try:
        status, answer = await ask(service, replica, MODELS)
        listed = msgspec.json.decode(answer, type=Models).data if status == 200 else []
    except (Lost, *UNREADABLE):
        replica.models_until = now + 1
        return
    # vLLM lists adapters with their base as the parent.
    replica.models = tuple(one.id for one in listed if not one.parent)
    replica.maker = listed[0].owned_by if listed else ""
    own = frozenset(one.id for one in listed) - replica.adapters.loaded.keys()
    replica.adapters.always = own & service.wanted.adapters.keys()


async def naming(service: Service, replica: Replica, model: str, adapter: str) -> dict[str, Any]:
    """What to change in a request so that this replica takes it. Raises Lost if it cannot."""
    if adapter or model in ("", service.wanted.name):
        await learn(service, replica)
    if adapter:
        return await _with_adapter(service, replica, adapter)
    if model in replica.models or not replica.models:
        return {}
    return {"model": replica.models[0]} if model in ("", service.wanted.name) else {}


async def _with_adapter(service: Service, replica: Replica, name: str) -> dict[str, Any]:
    base = replica.models[0] if replica.models else name
    if replica.maker == LLAMA:
        return {"model": base, "lora": [{"id": await _lora(service, replica, name), "scale": 1.0}]}
    if name not in replica.adapters.always:
        async with replica.loading:
            if name not in replica.ready:
                await _load(service, replica, name)
    return {"model": f"{base}:{name}" if replica.maker == "sglang" else name}


async def _lora(service: Service, replica: Replica, name: str) -> int:
    """llama.cpp has all adapters from its start, and takes their numbers."""
    status, answer = await ask(service, replica, b"/lora-adapters")
    path = service.wanted.adapters.get(name, "")
    if status == 200:
        with contextlib.suppress(*UNREADABLE):
            for one in msgspec.json.decode(answer, type=list[Lora]):
                if one.path and one.path.rpartition("/")[2] == path.rpartition("/")[2]:
                    return one.id
    raise Lost(f"the replica was not started with the adapter {name}")


async def _load(service: Service, replica: Replica, name: str) -> None:
    prefix = b"" if replica.maker == "sglang" else b"/v1"
    while replica.drops:
        gone = replica.drops[0]
        if gone not in replica.adapters.loaded:  # or somebody has asked for it again
            drop = {"lora_name": gone}
            await ask(service, replica, prefix + b"/unload_lora_adapter", drop, LOAD_TIMEOUT_S)
            replica.ready.discard(gone)
        replica.drops.pop(0)
    load = {"lora_name": name, "lora_path": service.wanted.adapters.get(name, name)}
    try:
        status, answer = await ask(
            service, replica, prefix + b"/load_lora_adapter", load, LOAD_TIMEOUT_S
        )
    except Lost:
        replica.adapters.drop(name)
        raise
    if status != 200 and b"already" not in answer:
        replica.adapters.drop(name)
        raise Lost(f"the replica did not load the adapter {name}: status {status}")
    replica.ready.add(name)

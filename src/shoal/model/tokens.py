"""What the gateway tells the token router, and what the router counts for it."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

MILLI = 1_000


class ReplicaState(enum.StrEnum):
    READY = "ready"
    DRAINING = "draining"  # finishes its requests and gets no new ones


class Goals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What users of a service shall see. 0: no goal. `share_milli` of all requests shall meet the
    times."""

    ttft_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 0  # until the first token
    itl_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0  # between two tokens, in the mean
    share_milli: Annotated[int, msgspec.Meta(ge=0, le=MILLI)] = 990

    def __bool__(self) -> bool:
        return bool(self.ttft_ms or self.itl_ms)


class RoutedReplica(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    address: str
    port: int
    state: ReplicaState = ReplicaState.READY


class RoutedService(msgspec.Struct, frozen=True, kw_only=True):
    """A service whose requests the router spreads. `callers`: ids of keys, None for everybody; the
    proxy has asked for the key already, and this decides what the shared address may choose."""

    name: str
    replicas: tuple[RoutedReplica, ...] = ()
    owner: str = ""
    goals: Goals = Goals()
    concurrency: int = 0  # requests at a replica; 0: as many as come
    queue_max: int = 1_000
    queue_timeout_ms: int = 60_000
    connect_timeout_ms: int = 1_000
    response_timeout_ms: int = 600_000
    body_bytes_max: int = 64 << 20
    callers: tuple[str, ...] | None = None
    adapters: dict[str, str] = {}  # name in a request -> the path that an engine loads
    adapters_max: int = 0  # loaded in a replica at a time


class RouterWanted(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the router has to know. The last one lies in its folder, so that a router that
    starts without a controller serves by it."""

    services: tuple[RoutedService, ...] = ()
    refused: dict[str, int] = {}  # keys that have used up their tokens -> until when; 0: not known
    limited: tuple[str, ...] = ()  # keys with a limit of tokens


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """Of one service and caller, since the router's folder was made: it only grows. Each head has
    a folder of its own."""

    service: str
    caller: str = ""  # the id of a key; "" is everybody without one
    requests: int = 0
    prompt: int = 0  # tokens, with those that were cached
    cached: int = 0
    generated: int = 0
    folder: str = ""  # the gateway writes it in, from `RouterSeen`


class RoutedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the router sees of a replica."""

    in_flight: int = 0
    cached_blocks: int = 0  # that it is believed to hold
    prefill_tokens_per_s: int = 0
    answers: int = 0  # these two only grow
    failures: int = 0
    first_ms: int = 0  # until the first token of its first answer; 0: not measured


class TokenLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the router sees of a service. Times are of the last 15 seconds."""

    queued: int = 0
    replicas: dict[str, RoutedLoad] = {}
    ttft_p50_ms: int = 0
    ttft_p99_ms: int = 0
    itl_p50_ms: int = 0
    itl_p99_ms: int = 0
    judged: int = 0  # requests with a goal in that time, and those that met it
    good: int = 0
    hit_milli: int = 0  # prompt tokens that were cached
    prompt_per_s: int = 0
    generated_per_s: int = 0
    refused: int = 0  # 429, since the router began
    resumed: int = 0  # streams that went on at another replica
    broken: int = 0  # streams that could not


class RouterSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The router's answer to each `RouterWanted`."""

    services: dict[str, TokenLoad] = {}
    counts: tuple[TokenCount, ...] = ()
    folder: str = ""  # names the folder whose counts these are

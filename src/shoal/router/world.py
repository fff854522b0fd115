"""The services and replicas that the router knows, and how each is doing."""

from __future__ import annotations

import asyncio
import time

from shoal.model.service import ReplicaState
from shoal.model.tokens import (
    RoutedLoad,
    RoutedReplica,
    RoutedService,
    RouterSeen,
    RouterWanted,
    TokenLoad,
)
from shoal.router.adapters import Adapters
from shoal.router.admission import Pace, Queue, Waiter, has_room
from shoal.router.books import WINDOW_S, Books, Sums, Window
from shoal.router.choice import Candidate, choose, usual
from shoal.router.index import Index, Sent
from shoal.router.wire import Pool

CHARS_PER_TOKEN = 4.0  # until an engine has counted
SMOOTH = 0.1
MEASURED_MIN = 512  # prompt tokens; with fewer, the time to the first one is mostly something else
DRIFT = 0.005  # of the way to the usual speed with each look, because nothing shows a recovery
BACKOFF_S = (0.25, 0.5, 1, 2, 4, 8)
MODELS_S = 60.0  # what a replica lists is asked again after this


class Replica:
    """`pending`: prompt tokens of requests here that have no token yet. `fresh`: it has answered
    nothing yet."""

    def __init__(self, wanted: RoutedReplica, fresh: bool) -> None:
        self.wanted = wanted
        self.pool = Pool(wanted.address, wanted.port)
        self.in_flight = 0
        self.pending = 0
        self.speed = 0.0  # prompt tokens per second
        self.pace = Pace()
        self.answers = 0
        self.failures = 0
        self.failed = 0  # in a row
        self.fresh = fresh
        self.first_ms = 0  # until the first token of its first answer
        self.down_until = 0.0
        self.turn = 0
        self.adapters = Adapters()
        self.drops: list[str] = []  # adapters that must go before the next is loaded
        self.ready: set[str] = set()  # adapters that the engine has answered for
        self.loading = asyncio.Lock()
        self.models: tuple[str, ...] = ()
        self.maker = ""  # of the engine, as it says
        self.models_until = 0.0
        self.asking: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.wanted.id

    def takes(self, now: float) -> bool:
        return self.wanted.state is ReplicaState.READY and now >= self.down_until

    def fail(self, now: float) -> None:
        self.failures += 1
        self.down_until = now + BACKOFF_S[min(self.failed, len(BACKOFF_S) - 1)]
        self.failed += 1

    def well(self) -> None:
        self.answers += 1
        self.failed = 0
        self.fresh = False

    def measure(self, tokens: int, took_s: float) -> None:
        """`tokens`: of this prompt and those before it, which were read in that time."""
        if tokens >= MEASURED_MIN and took_s > 0:
            speed = tokens / took_s
            self.speed = speed if not self.speed else self.speed + SMOOTH * (speed - self.speed)


class Turn:
    """A request's way through a service: waits, is at a replica, perhaps at another."""

    def __init__(self, blocks: tuple[int, ...], tokens: int, adapter: str = "") -> None:
        self.blocks = blocks
        self.tokens = tokens  # of the prompt, as it looks
        self.adapter = adapter
        self.not_at: set[str] = set()  # where it failed
        self.replica: Replica | None = None
        self.sent: Sent | None = None
        self.ahead = 0  # prompt tokens of those before it, and its own new ones
        self.owed = 0  # of `pending` there, until its first token
        self.sent_s = 0.0
        self.placed: asyncio.Future[Replica] | None = None


class Service:
    def __init__(self, wanted: RoutedService, books: Books) -> None:
        self.wanted = wanted
        self.books = books
        self.replicas: dict[str, Replica] = {}
        self.leaving: list[Replica] = []  # not wanted any more; requests there go on
        self.index = Index()
        self.queue: Queue[Turn] = Queue(self._admit, self._refuse)
        self.chars_per_token = CHARS_PER_TOKEN
        self.ttft, self.itl = Window(), Window()
        self.sums = Sums(6)  # prompt, cached, generated, judged, good, answers
        self.refused = self.resumed = self.broken = 0
        self._turns = 0

    def update(self, wanted: RoutedService, fresh: bool = True) -> None:
        """`fresh`: replicas that are new here are new."""
        self.wanted = wanted
        named = {one.id: one for one in wanted.replicas}
        for one in list(self.replicas.values()):
            new = named.get(one.id)
            if new is None or (new.address, new.port) != (one.wanted.address, one.wanted.port):
                self.leaving.append(self.replicas.pop(one.id))
                one.pool.close()
                self.index.forget(one.id)
        for new in named.values():
            if new.id in self.replicas:
                self.replicas[new.id].wanted = new
            else:
                self.replicas[new.id] = Replica(new, fresh)
        self.index.keep(self.replicas.keys())
        self.queue.pump()

    # -- which replica

    async def place(self, turn: Turn, priority: int, due: float, until: float) -> Replica:
        """Waits for room if need be; `Full` if there is none."""
        if not len(self.queue) and self._admit(turn, wake=False):
            assert turn.replica is not None
            return turn.replica
        turn.placed = asyncio.get_running_loop().create_future()
        waiter = self.queue.add(turn, priority, due, until, self.wanted.queue_max)
        if waiter is None:
            raise Full("full")
        try:
            return await turn.placed
        finally:
            self._left(turn, waiter)

    def _left(self, turn: Turn, waiter: Waiter[Turn]) -> None:
        self.queue.leave(waiter)
        placed, turn.placed = turn.placed, None
        cancelled = placed is not None and placed.cancelled()
        if cancelled and turn.replica is not None:
            self.leave(turn, worked=False)

    def _refuse(self, turn: Turn, why: str) -> None:
        if turn.placed is not None and not turn.placed.done():
            turn.placed.set_exception(Full(why))

    def _admit(self, turn: Turn, wake: bool = True) -> bool | None:
        """Take a place at the cheapest replica that has room."""
        now = time.monotonic()
        able = [one for one in self.replicas.values() if one.takes(now)]
        able = [one for one in able if one.id not in turn.not_at] or able
        offers = [self._offer(one, turn, now) for one in able]
        priced = [one for one in offers if one is not None]
        free = [one for one in priced if self._has_room(one)]
        if not free:
            return None if offers and not priced else False
        best = choose(free)
        replica = self.replicas[best.id]
        self._turns += 1
        replica.turn = self._turns
        replica.in_flight += 1
        if turn.adapter:
            gone = replica.adapters.use(turn.adapter, self.wanted.adapters_max, now)
            replica.drops += [gone] if gone is not None else []
        turn.sent = self.index.send(best.id, turn.blocks)
        turn.owed = best.new
        turn.ahead = replica.pending + best.new
        replica.pending += best.new
        turn.replica = replica
        if wake and turn.placed is not None and not turn.placed.done():
            turn.placed.set_result(replica)
        return True

    def _offer(self, one: Replica, turn: Turn, now: float) -> Candidate | None:
        extra = one.adapters.price(turn.adapter, self.wanted.adapters_max, now)
        if extra is None:
            return None
        cached = self.index.match(one.id, turn.blocks) / max(1, len(turn.blocks)) * turn.tokens
        return Candidate(
            id=one.id,
            new=turn.tokens - int(cached),
            pending=one.pending,
            batch=one.in_flight,
            speed=one.speed,
            failures=one.failed,
            extra=extra,
            turn=one.turn,
        )

    def _has_room(self, offer: Candidate) -> bool:
        one, goals = self.replicas[offer.id], self.wanted.goals
        speed = offer.speed or 1e9
        own_ms = offer.new / speed * 1e3
        wait_ms = offer.pending / speed * 1e3 + own_ms
        goal_ms = max(goals.ttft_ms, int(own_ms * 1.25)) if goals.ttft_ms else 0
        return has_room(one.in_flight, self.wanted.concurrency, one.pace, wait_ms, goal_ms)

    # -- what came of it

    def first(self, turn: Turn, took_s: float) -> None:
        """Its first token has come."""
        replica = turn.replica
        if replica is not None and turn.owed:
            replica.measure(turn.ahead, took_s)
            if replica.fresh:
                replica.fresh, replica.first_ms = False, max(1, round(took_s * 1e3))
        self._settle(turn)

    def _settle(self, turn: Turn) -> None:
        if turn.replica is not None:
            turn.replica.pending -= turn.owed
        turn.owed = 0

    def settle_later(self, turn: Turn) -> asyncio.TimerHandle | None:
        """When its prompt should have been read."""
        replica = turn.replica
        if replica is None or not replica.speed:
            return None
        loop = asyncio.get_running_loop()
        return loop.call_later(turn.ahead / replica.speed, self._settle, turn)

    def others(self, turn: Turn, replica: Replica) -> bool:
        """Could another one answer?"""
        now = time.monotonic()
        known = (*turn.not_at, replica.id)
        return any(one.id not in known and one.takes(now) for one in self.replicas.values())

    def tokens_of(self, text: str) -> int:
        return int(len(text) / self.chars_per_token)

    def leave(self, turn: Turn, worked: bool) -> None:
        """It is no longer at its replica. `worked`: the replica has read its prompt."""
        replica, turn.replica = turn.replica, None
        if replica is None:
            return
        replica.pending -= turn.owed
        turn.owed = 0
        replica.in_flight -= 1
        if turn.adapter:
            replica.adapters.done(turn.adapter, time.monotonic())
        held = self.index.replicas.get(replica.id)
        if not worked and held is not None and turn.sent is not None:
            held.undo(turn.sent)
        self.queue.pump()

    def learn(self, turn: Turn, chars: int, prompt: int, cached: int | None) -> None:
        """What the engine has counted."""
        if prompt > 0 and chars > 0:
            ratio = min(64.0, max(0.25, chars / prompt))
            self.chars_per_token += SMOOTH * (ratio - self.chars_per_token)
        replica = turn.replica
        if cached is None or replica is None or turn.sent is None or not prompt:
            return
        held = self.index.replicas.get(replica.id)
        if held is not None and self.replicas.get(replica.id) is replica:
            held.correct(turn.sent, round(cached / prompt * len(turn.blocks)))

    def remember(self, replica: Replica, blocks: tuple[int, ...]) -> None:
        """It holds the answer, too, which begins the next prompt of the session."""
        if self.replicas.get(replica.id) is replica:
            self.index.send(replica.id, blocks)

    def load(self, now: float) -> TokenLoad:
        ttft, itl = (one.percentiles(now, 0.5, 0.99) for one in (self.ttft, self.itl))
        prompt, cached, generated, judged, good, _ = self.sums.of(now)
        return TokenLoad(
            queued=len(self.queue),
            replicas={
                one.id: RoutedLoad(
                    in_flight=one.in_flight,
                    cached_blocks=self.index.size(one.id),
                    prefill_tokens_per_s=int(one.speed),
                    answers=one.answers,
                    failures=one.failures,
                    first_ms=one.first_ms,
                )
                for one in self.replicas.values()
            },
            ttft_p50_ms=ttft[0],
            ttft_p99_ms=ttft[1],
            itl_p50_ms=itl[0],
            itl_p99_ms=itl[1],
            judged=judged,
            good=good,
            hit_milli=cached * 1_000 // max(1, prompt),
            prompt_per_s=prompt // WINDOW_S,
            generated_per_s=generated // WINDOW_S,
            refused=self.refused,
            resumed=self.resumed,
            broken=self.broken,
        )


class Full(Exception):
    """No room: the queue is full, a more important request took its place, or it is late."""


class World:
    def __init__(self, books: Books) -> None:
        self.books = books
        self.services: dict[str, Service] = {}
        self.refused: dict[str, int] = {}
        self.limited: frozenset[str] = frozenset()
        self._begun = False  # replicas that are there when it begins may be old

    def update(self, wanted: RouterWanted) -> None:
        self.refused = wanted.refused
        self.limited = frozenset(wanted.limited)
        named = {one.name: one for one in wanted.services}
        for gone in self.services.keys() - named.keys():
            service = self.services.pop(gone)
            service.update(RoutedService(name=gone))
        for name, one in named.items():
            if name not in self.services:
                self.services[name] = Service(one, self.books)
            self.services[name].update(one, fresh=self._begun)
        self._begun = True

    def seen(self) -> RouterSeen:
        now = time.monotonic()
        loads = {name: service.load(now) for name, service in self.services.items()}
        return RouterSeen(services=loads, counts=self.books.counts(), folder=self.books.folder)

    def sweep(self, now: float) -> None:
        """A few times a second: what waits too long, and what is silent for too long."""
        for service in self.services.values():
            if len(service.queue):
                service.queue.expire(now)
                service.queue.pump()
            middle = usual(one.speed for one in service.replicas.values())
            for one in service.replicas.values():
                one.speed += DRIFT * (middle - one.speed) if one.speed else 0.0
            service.leaving = [one for one in service.leaving if one.pool.busy]
            for replica in (*service.replicas.values(), *service.leaving):
                replica.pool.sweep(now, service.wanted.response_timeout_ms / 1e3)

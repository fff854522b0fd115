"""One request of OpenAI's routes until it is answered, by several replicas if some fail."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec

from shoal.router import engines
from shoal.router.admission import (
    PATIENCE,
    PATIENCE_MIN_S,
    PRIORITY_MAX,
    priority_of,
    retry_after_s,
)
from shoal.router.books import WINDOW_S
from shoal.router.front import Front, Gone, Request
from shoal.router.index import BLOCK_CHARS, chain
from shoal.router.openai import COUNT_BYTES, COUNTS, UNREADABLE, Ask, Usage, Wrong, error
from shoal.router.stream import Failed, Stream
from shoal.router.wire import (
    OURS,
    Headers,
    Line,
    Lost,
    for_a_replica,
    request_head,
)
from shoal.router.world import Full, Replica, Service, Turn

WHOLE_BYTES_MAX = (
    8 << 20
)  # an answer up to this size is read whole before the client gets any of it
TRIES_MAX = 8
LOSSES_MAX = 3  # a request that ends its engine ends no more of them than this
LATER = frozenset((429, 502, 503, 504))  # another replica may answer
NO_CODING = frozenset((b"accept-encoding",))
PACE_TOKENS = 32


class Busy(Exception):
    """The replica says that it cannot answer now."""


class Message(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    message: Message | None = None
    text: str | None = None


class Answer(msgspec.Struct):
    usage: Usage | None = None
    choices: list[Choice] = []


class Wishes:
    """What a client says of its request's importance."""

    def __init__(self, request: Request) -> None:
        priority, deadline = request.header(b"x-shoal-priority"), request.header(DEADLINE)
        try:
            self.priority = priority_of(priority.decode("latin-1")) if priority else 0
            deadline_ms = float(int(deadline[:20])) if deadline else math.inf
        except ValueError:
            why = "X-Shoal-Priority and X-Shoal-Deadline-Ms are whole numbers"
            raise Wrong(400, why, "invalid_header") from None
        self.deadline = request.began + deadline_ms / 1e3

    def too_late(self) -> bool:
        return time.monotonic() >= self.deadline


DEADLINE = b"x-shoal-deadline-ms"


async def place(
    service: Service, turn: Turn, wishes: Wishes, began: float, again: int = 0
) -> Replica:
    """A place at a replica, or the refusal that the client gets. `again`: it has waited already,
    and its client may have half an answer."""
    if wishes.too_late():
        raise Wrong(504, "its deadline has passed", "deadline_exceeded")
    wanted, now = service.wanted, time.monotonic()
    goal_s = wanted.goals.ttft_ms / 1e3
    until = now + wanted.queue_timeout_ms / 1e3
    due = min(began + goal_s, wishes.deadline) if goal_s else wishes.deadline
    if goal_s and not again:
        until = min(until, now + max(PATIENCE_MIN_S, PATIENCE * goal_s))
    priority = PRIORITY_MAX + 1 if again else wishes.priority
    try:
        return await service.place(turn, priority, due, min(until, wishes.deadline))
    except Full as full:
        service.refused += 1
        if wishes.too_late():
            raise Wrong(504, "its deadline has passed", "deadline_exceeded") from None
        after_s = retry_after_s(len(service.queue), service.sums.of(now)[5] / WINDOW_S)
        if not any(one.takes(now) for one in service.replicas.values()):
            raise Wrong(503, "no replica is ready", "no_replica", after_s) from None
        if wanted.goals.ttft_ms:
            service.sums.add(now, 0, 0, 0, 1)
        why = f"{wanted.name} has more requests than it can answer in time ({full})"
        raise Wrong(429, why, "overloaded", after_s) from None


class Serving:
    def __init__(
        self, front: Front, request: Request, service: Service, ask: Ask, adapter: str
    ) -> None:
        self.front = front
        self.request = request
        self.service = service
        self.ask = ask
        self.adapter = adapter
        self.wishes = Wishes(request)
        self.stream = Stream(ask) if ask.stream else None
        self.text = ask.rendered() if ask.text else ""
        self.headers = for_a_replica(request.headers, NO_CODING)
        self.changes: dict[str, Any] = {}
        if ask.stream and not ask.wants_usage:
            self.changes["stream_options"] = {"include_usage": True}
        self.usage: Usage | None = None
        self.answered = False
        self.first = 0.0  # when the first token came, and the last one
        self.last = 0.0
        self.mark = (0.0, 0)  # a moment, and the tokens until then

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            self._count()

    async def _run(self) -> None:
        tries, losses, failed = 0, 0, set[str]()
        while True:
            before = self.tokens
            turn = self._turn(failed)
            try:
                replica = await place(self.service, turn, self.wishes, self.request.began, tries)
            except Wrong as wrong:
                if not self.front.began:
                    raise
                return await self._break(str(wrong))
            worked = False
            try:
                await self._attempt(turn, replica)
                worked = True
                return replica.well()
            except Busy as busy:
                why, lost = str(busy), False
            except (Lost, Failed) as error:
                why, lost = str(error), isinstance(error, Failed) or error.sent
                replica.fail(time.monotonic())
            finally:
                self.service.leave(turn, worked or self.tokens > before)
            failed.add(replica.id)
            if self.tokens > before:
                tries, losses = 0, 0
            tries, losses = tries + 1, losses + lost
            if await self._is_over():
                return None
            if losses >= LOSSES_MAX or tries >= TRIES_MAX:
                return await self._break(why)
            if self.front.began and not await self._move():
                return None

    @property
    def tokens(self) -> int:
        return self.stream.tokens if self.stream is not None else 0

    def _turn(self, failed: set[str]) -> Turn:
        text = self.text
        if self.stream is not None and self.stream.again:
            text += self.stream.text
        turn = Turn(chain(text, self.adapter), self.service.tokens_of(text), self.adapter)
        turn.not_at = failed
        return turn

    # -- when a replica fails in the middle

    async def _is_over(self) -> bool:
        """Only the end was missing."""
        end = self.stream.over() if self.stream is not None and self.front.began else None
        if end is None:
            return False
        await self.front.write(end)
        self.front.end()
        return True

    async def _move(self) -> bool:
        assert self.stream is not None
        problem = self.stream.problem()
        if problem:
            await self._break(f"its replica failed, and no other can go on, because {problem}")
            return False
        self.service.resumed += 1
        self.changes |= self.stream.move()
        return True

    async def _break(self, why: str) -> None:
        """The client is told: with a status, or with an event if the answer has begun."""
        if not self.front.began:
            raise Wrong(502, f"no replica could answer: {why}", "bad_gateway")
        self.service.broken += 1
        await self.front.write(b"data: " + error(502, why, "stream_broken") + b"\n\n")
        self.front.end()

    # -- at one replica

    async def _attempt(self, turn: Turn, replica: Replica) -> None:
        service = self.service
        named = await engines.naming(service, replica, self.ask.model, self.adapter)
        body = self.ask.body({**self.changes, **named})
        line = await replica.pool.take(service.wanted.connect_timeout_ms / 1e3)
        timer = None
        try:
            line.begin(request_head(b"POST", self.request.target, self.headers, len(body)), body)
            turn.sent_s = time.monotonic()
            if self.stream is None:  # nobody sees its first token
                timer = service.settle_later(turn)
            await line.drain()
            status = await line.head()
            if status in LATER and service.others(turn, replica):
                raise Busy(f"status {status}")
            events = _kind(line.headers).startswith(b"text/event-stream")
            if self.stream is not None and status == 200 and events:
                await self._relay(turn, replica, line)
            elif self.front.began:
                raise Lost(f"the replica cannot go on: status {status}")
            elif events:
                await self._copy(replica, line)
            else:
                await self._whole(turn, replica, line)
        finally:
            if timer is not None:
                timer.cancel()
            replica.pool.put(line)

    async def _relay(self, turn: Turn, replica: Replica, line: Line) -> None:
        stream = self.stream
        assert stream is not None
        try:
            while data := await line.read():
                before = stream.tokens
                out = stream.feed(data)
                if stream.tokens > before:
                    self._token(turn, replica)
                if out:
                    if not self.front.began:
                        self.front.begin(self.request, 200, _headers(line, replica), None)
                    await self.front.write(out)
                if stream.failure:
                    raise Failed(stream.failure)
        except Lost:
            if not stream.done:
                raise
        if stream.understood and not (stream.done or stream.finished):
            raise Lost("the stream ended early")
        if not self.front.began:
            self.front.begin(self.request, 200, _headers(line, replica), None)
        self.front.end()
        self.answered, self.usage = True, stream.usage
        self._learn(turn, replica, stream.text, known=not stream.again)

    def _token(self, turn: Turn, replica: Replica) -> None:
        now, service, tokens = time.monotonic(), self.service, self.tokens
        if not self.first:
            self.first = now
            self.mark = (now, tokens)
            service.ttft.add(now, (now - self.request.began) * 1e3)
        if turn.owed:
            service.first(turn, now - turn.sent_s)
        self.last = now
        if tokens - self.mark[1] >= PACE_TOKENS:
            itl_ms = (now - self.mark[0]) * 1e3 / (tokens - self.mark[1])
            replica.pace.saw(itl_ms, service.wanted.goals.itl_ms, replica.in_flight, now)
            self.mark = (now, tokens)

    async def _whole(self, turn: Turn, replica: Replica, line: Line) -> None:
        """An answer that is no stream: the client gets nothing of it before all is there, so that
        another replica can answer if this one dies."""
        parts, size = list[bytes](), 0
        while size <= WHOLE_BYTES_MAX and (data := await line.read()):
            parts.append(data)
            size += len(data)
        body = b"".join(parts)
        headers = _headers(line, replica)
        self.answered = line.status == 200
        if size > WHOLE_BYTES_MAX:
            self.front.begin(self.request, line.status, headers, None)
            await self.front.write(body)
            try:
                while data := await line.read():
                    await self.front.write(data)
            except Lost:
                raise Gone from None  # the client sees that the answer is not whole
            return self.front.end()
        if line.status == 200:
            self._understand(turn, replica, body)
        return await self.front.answer(self.request, line.status, headers, body)

    def _understand(self, turn: Turn, replica: Replica, body: bytes) -> None:
        try:
            answer = msgspec.json.decode(body, type=Answer)
        except UNREADABLE:
            return
        self.usage = answer.usage
        if self.ask.text:
            choice = answer.choices[0] if answer.choices else Choice()
            text = choice.text or (choice.message.content if choice.message else None)
            self._learn(turn, replica, text or "")

    async def _copy(self, replica: Replica, line: Line) -> None:
        """Events of another kind. Only their counts of tokens are read."""
        self.front.begin(self.request, line.status, _headers(line, replica), None)
        self.answered, self.usage = line.status == 200, Usage()
        tail = b""
        try:
            while data := await line.read():
                tail = (tail + data)[-(len(data) + COUNT_BYTES) :]
                for name, count in COUNTS.findall(tail):
                    self.usage.saw(name, int(count))
                await self.front.write(data)
        except Lost:
            raise Gone from None
        self.front.end()

    # -- what was learned

    def _learn(self, turn: Turn, replica: Replica, answer: str, known: bool = True) -> None:
        """`known`: the usage is of this prompt."""
        usage = self.usage
        if usage is not None and known:
            self.service.learn(turn, len(self.text), usage.prompt, usage.cached)
        if len(answer) >= BLOCK_CHARS:
            text = self.ask.followed(self.text, answer)
            self.service.remember(replica, chain(text, self.adapter))

    def _count(self) -> None:
        """Also of a stream that was cut: what was seen of it."""
        service, usage, now = self.service, self.usage, time.monotonic()
        if not self.answered and not self.tokens:
            return
        if usage is None:
            prompt, cached, made = self.service.tokens_of(self.text), 0, self.tokens
        else:
            prompt, cached, made = usage.prompt, usage.cached or 0, usage.generated
        caller = self.request.header(b"x-shoal-caller").decode("latin-1")
        service.books.add(service.wanted.name, caller, prompt, cached, made)
        goals, judged, good = service.wanted.goals, 0, 0
        itl_ms = (self.last - self.first) * 1e3 / max(1, self.tokens - 1)
        if self.tokens > 1:
            service.itl.add(now, itl_ms)
        if self.stream is not None and (goals.ttft_ms or goals.itl_ms):
            ttft_ms = (self.first - self.request.began) * 1e3
            judged = 1
            good = int(
                (self.answered or self.front.closed)  # who has seen enough was served
                and ttft_ms <= (goals.ttft_ms or math.inf)
                and itl_ms <= (goals.itl_ms or math.inf)
            )
        service.sums.add(now, prompt, cached, made, judged, good, 1)


def _kind(headers: Headers) -> bytes:
    return next((value for name, value in headers if name == b"content-type"), b"").lower()


def _headers(line: Line, replica: Replica) -> Headers:
    kept = [one for one in line.headers if not one[0].startswith(OURS)]
    return [*kept, (b"x-shoal-replica", replica.id.encode())]

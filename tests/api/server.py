"""The real API over real sockets, in a thread of the test: users and tokens without `shoal up`."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import uvicorn

from shoal.api.access import new_token
from shoal.api.app import build
from shoal.api.forwarded import SERVED
from shoal.api.limits import Gate, guarded
from shoal.api.moment import MOMENTS
from shoal.api.notices import POSTING
from shoal.api.routing import App
from shoal.api.timeline import BARS
from shoal.control.home import Home
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.notices.posting import Posting
from shoal.control.packages import PackageStore
from shoal.control.past.following import Bars
from shoal.control.secretstore import SecretStore
from shoal.control.store.marks import Numbers
from shoal.control.store.sqlite import SqliteStore
from shoal.control.stores import Stores
from shoal.core.state.state import State
from shoal.database.settings import FileSettings
from shoal.engines.linked.engine import LinkedEngine
from shoal.ledger.live import LiveLedger
from shoal.model.identity import Only, Role, Token, User
from shoal.model.policy import Policy
from shoal.model.report import Accepted, AddTenant, Request, SetToken, SetUser
from tests.control.test_loop import BookEngine, HandClock

OPERATORS = "o" * 32
Result = TypeVar("Result")


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        return str(msgspec.json.decode(self.body)["message"])


class OwnThread(ControlLoop):
    """The state belongs to the loop's thread: whoever reads it in another one is found here, not
    once in a thousand requests."""

    @property
    def state(self) -> State:
        asyncio.get_running_loop()  # raises in a thread that has none
        return super().state


class Server:
    def __init__(
        self,
        path: Path,
        policy: Policy,
        gate: Gate | None = None,
        linked: LinkedEngine | None = None,
    ) -> None:
        self.linked = linked
        self.home = Home(path)
        path.mkdir(exist_ok=True)
        self.policy = policy
        self.gate = Gate() if gate is None else gate
        self.address, self.port = "127.0.0.1", 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self.asyncio = asyncio.get_running_loop()
        self.engine = BookEngine()
        numbers = Numbers(self.home.marks, (self.home.logs,))
        self.store = SqliteStore(self.home.database, numbers, self.home.spare)
        self.loop = OwnThread(
            self.store,
            self.engine,
            HandClock(),
            self.policy,
            LogStore(self.home.logs),
            PackageStore(self.home.packages),
            alarms=self.store.alarms,
        )
        self.loop.secrets = SecretStore(self.home.secrets)
        books = LiveLedger(
            self.home.ledger, FileSettings(self.home.path), self.store, self.loop.clock
        )
        posting = Posting(self.loop, Stores(self.home), "cafe0001")
        bars = Bars(self.home.bars, self.store, self.loop, print)
        self.loop.followers += [books, posting, bars]
        app = build(
            self.loop, OPERATORS, live_ledger=books, home=self.home.path, linked=self.linked
        )
        self.app = app
        app.state[POSTING] = posting
        app.state[BARS] = bars
        config = uvicorn.Config(
            self.served(app),
            log_level="warning",
            lifespan="off",
            http=guarded(self.gate),
            ws=asyncio.Protocol,
        )
        self.server = uvicorn.Server(config)
        door = socket.create_server((self.address, 0))
        self.port = door.getsockname()[1]
        ticking = asyncio.create_task(self.loop.run())
        sending = asyncio.create_task(posting.run())
        serving = asyncio.create_task(self.server.serve(sockets=[door]))
        while "n1" not in self.loop.tick.state.nodes:
            await self.loop.changed("", 30)  # the node has joined, or had before
        self._ready.set()  # the socket listens since it was made
        await serving
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()  # a stream that its reader has left open
        app.state[SERVED].close()
        ticking.cancel()
        sending.cancel()
        await bars.close()
        await app.state[MOMENTS].close()
        self.store.close()

    def served(self, app: App) -> Any:
        return app.state[SERVED]

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(120)

    def stop(self) -> None:
        self.app.state["feed"].end()
        self.server.should_exit = self.server.force_exit = True
        self._thread.join(120)

    def ask(self, request: Request) -> None:
        future = asyncio.run_coroutine_threadsafe(self.loop.request(request), self.asyncio)
        answer = future.result(120)
        assert isinstance(answer, Accepted), answer

    def run(self, act: Callable[[], Result]) -> Result:
        """What it returns, done in the server's own thread."""

        async def done() -> Result:
            return act()

        return asyncio.run_coroutine_threadsafe(done(), self.asyncio).result(120)

    def tenant(self, name: str) -> None:
        self.ask(AddTenant(name))

    def token(
        self,
        user: str,
        tenant: str,
        role: Role = Role.MEMBER,
        until_ms: int = 0,
        only: Only = "",
    ) -> str:
        """A new token of a user, who is made as needed."""
        if user not in self.loop.tick.state.identity.users:
            self.ask(SetUser(User(name=user, roles={tenant: role}), add=True))
        token_id, token, hash_ = new_token()
        made = Token(
            id=token_id,
            user=user,
            tenant=tenant,
            role=role,
            hash=hash_,
            until_ms=until_ms,
            only=only,
        )
        self.ask(SetToken(made))
        return token

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def call(self, token: str, method: str, path: str, body: Any = None, **more: str) -> Reply:
        connection = self.connect()
        try:
            return exchange(connection, token, method, path, body, **more)
        finally:
            connection.close()


def exchange(
    connection: http.client.HTTPConnection,
    token: str,
    method: str,
    path: str,
    body: Any = None,
    **more: str,
) -> Reply:
    data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {"Authorization": f"Bearer {token}", **more}
    if data is not None:
        headers["Content-Type"] = "application/json"
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    read = answer.read()
    marks = (b"\\u0002", b"\\\\x02")  # in JSON, and in a printable line
    assert not any(mark in read for mark in marks), f"{path} shows a reason that was not rendered"
    return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, read)


@contextlib.contextmanager
def serving(
    path: Path,
    policy: Policy | None = None,
    gate: Gate | None = None,
    linked: LinkedEngine | None = None,
) -> Iterator[Server]:
    server = Server(path, policy or Policy(), gate, linked)
    server.start()
    try:
        yield server
    finally:
        server.stop()

"""Sessions with a job that is at a neighbor. Its node cannot reach us, so this cluster holds a
meeting there and passes on what comes to the one that its user holds here. Both heads see the bytes
of a session, as a head always does."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import msgspec

from shoal.calls.jobs import JobCalls
from shoal.client.transport import Unreachable
from shoal.control.neighboring.wire import Wire
from shoal.link.meeting import DONE, KEY_HEADER, Announced, Opening, dial, key_hash, ws_error
from shoal.model.session import SessionRequest, SessionView

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

GUESTS_MAX = 256  # of one meeting at a time
LOOK_S = 5.0  # whether its user still holds the meeting here


class Meetings(Protocol):
    """Of this head."""

    def held(self, name: str) -> bool: ...

    async def enter(self, end: Any, name: str) -> None: ...


class Crossing:
    """Between the meeting of this name here and one of ours there. It ends with either."""

    def __init__(self, wire: Wire, meetings: Meetings, name: str, key: str) -> None:
        self._wire, self._meetings, self._name, self._key = wire, meetings, name, key
        self._guests = set[asyncio.Task[None]]()
        self._task: asyncio.Task[None] | None = None
        self.there, self.key = secrets.token_hex(16), secrets.token_urlsafe(32)

    @property
    def over(self) -> bool:
        return self._task is None or self._task.done()

    def close(self) -> None:
        for task in (self._task, *self._guests):
            if task is not None:
                task.cancel()

    async def open(self) -> None:
        """Returns when the meeting there is held."""
        try:
            channel = await self._dial("host", {KEY_HEADER: key_hash(self.key)})
            msgspec.json.decode(await channel.recv(), type=Opening)
        except (OSError, TimeoutError, ws_error(), msgspec.DecodeError) as error:
            raise Unreachable(f"{self._wire.url} opens no meeting: {error}") from None
        self._task = asyncio.create_task(self._hold(channel))

    async def _dial(self, what: str, headers: dict[str, str]) -> ClientConnection:
        wire = self._wire
        headers = {"Authorization": f"Bearer {wire.token}", **headers}
        name = urlsplit(wire.url).hostname or ""
        path = f"/v1/meetings/{self.there}/{what}"
        return await dial(wire.url, path, headers, name, wire.certificate)

    async def _hold(self, channel: ClientConnection) -> None:
        try:
            while self._meetings.held(self._name):
                try:
                    message = await asyncio.wait_for(channel.recv(), LOOK_S)
                except TimeoutError:
                    continue
                guest = msgspec.json.decode(message, type=Announced).guest
                if len(self._guests) >= GUESTS_MAX:
                    continue  # no honest node calls so often
                task = asyncio.create_task(self._bring(guest))
                self._guests.add(task)
                task.add_done_callback(self._guests.discard)
        except (OSError, ws_error(), msgspec.DecodeError):
            pass  # it is gone there; its user may ask again
        finally:
            await channel.close(DONE)

    async def _bring(self, guest: int) -> None:
        try:
            channel = await self._dial(f"guests/{guest}", {})
        except (OSError, TimeoutError, ws_error()):
            return
        try:
            await self._meetings.enter(End(channel, self._key), self._name)
        except Exception:  # there is no such meeting any more
            await channel.close(DONE)


class End:
    """What a guest's connection is to the head, made of one that we have with another head."""

    def __init__(self, channel: ClientConnection, key: str) -> None:
        self._channel = channel
        self.scope: dict[str, Any] = {}
        self.headers = {KEY_HEADER: key}

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict[str, Any]:
        try:
            data = await self._channel.recv()
        except ws_error():
            return {"type": "websocket.disconnect", "code": self._channel.close_code}
        return {"type": "websocket.receive", "bytes": data if isinstance(data, bytes) else b""}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "websocket.close":
            await self._channel.close(message["code"])
        else:
            await self._channel.send(message["bytes"])


class Crossings:
    """Those with one neighbor, by the meeting here."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._open: dict[str, Crossing] = {}

    def close(self) -> None:
        for crossing in self._open.values():
            crossing.close()

    async def session(self, there: str, asked: SessionRequest, meetings: Meetings) -> SessionView:
        """With the job of this id there."""
        self._open = {name: one for name, one in self._open.items() if not one.over}
        if not meetings.held(asked.meeting):  # nothing would come of it
            return await self._wire.ask(SessionView, JobCalls.open_session, there, asked)
        if asked.meeting not in self._open:
            made = Crossing(self._wire, meetings, asked.meeting, asked.key)
            await made.open()
            self._open[asked.meeting] = made
        crossing = self._open[asked.meeting]
        asked = msgspec.structs.replace(asked, meeting=crossing.there, key=crossing.key)
        return await self._wire.ask(SessionView, JobCalls.open_session, there, asked)

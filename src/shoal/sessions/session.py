"""The client's end of a session: it holds a meeting at the head, and the member's node enters it.

While the head restarts, both ends come back to the meeting and go on where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.client import Client, ShoalError
from shoal.link.meeting import DONE, Host, ws_error
from shoal.model.session import Kind, SessionRequest, SessionView
from shoal.sessions.reliable import Broken
from shoal.sessions.streams import Began, Ended, Stream, Streams, Word

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

ENTER_S_MAX = 30.0  # for the node to enter the meeting
ASK_AGAIN_S = 5.0  # a message to a node may be lost
WAKE_S_MAX = 600.0  # for a job that is asleep: its GPUs may be in use
WAKE_LOOK_S = 5.0
LOST_S_MAX = 120.0  # without the node; then the session is over
CLOSE_S_MAX = 2.0
LATER = 4000  # the code with which we close a connection that the node should open again


class NotBegun(ShoalError):
    """The node says why; `code` is 127 if what was to be started is not there."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.why)
        self.code = ended.code


class Session(Host):
    """One at a time with one member; after the member's end it may begin again with the next.
    `said` gets the node's words, in the loop's thread. `tell` gets lines about what a session that
    begins waits for."""

    def __init__(
        self,
        client: Client,
        kind: Kind,
        said: Callable[[Word], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
        **wanted: Any,
    ) -> None:
        super().__init__(client.endpoint, lambda _end, _way: None)
        self._client = client
        self._kind, self._wanted = kind, wanted
        self._said, self._tell = said, tell
        self._opened = False
        self.streams = Streams(self._hear)
        self.fixed: list[Stream] = []
        self.view: SessionView | None = None
        self.ended: Ended | None = Ended(why="it has not begun")
        self.over = threading.Event()
        self._arrived = threading.Event()
        self._present: ClientConnection | None = None
        self._losing: asyncio.TimerHandle | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._thread.loop

    def begin(self, job: str, member: int = 0) -> None:
        """Returns when the node has said that it is under way. ShoalError says why it is not."""
        if not self._opened:
            try:
                invitation = self.open()
            except OSError as error:
                self._refused(job, member)
                raise ShoalError(f"the head opens no meeting: {error}") from None
            self._opened = True
            self._wanted |= {"meeting": invitation.meeting, "key": invitation.key}
        self.streams = Streams(self._hear)
        self.fixed = self.streams.fixed(self._kind)
        self.ended = None
        self.over.clear()
        self._arrived.clear()
        request = SessionRequest(kind=self._kind, member=member, **self._wanted)
        for _ in range(int(ENTER_S_MAX / ASK_AGAIN_S)):
            view = self.view = self._woken(job, request)
            if self._arrived.wait(ASK_AGAIN_S):
                break
        else:
            self.ended = Ended(why="the node did not answer")
            message = f"{view.node}, where {job} runs, does not answer; try again, or see: "
            raise ShoalError(f"{message}shoal nodes")
        ended = self.ended
        if ended is not None and ended.why:
            raise NotBegun(ended)

    def _woken(self, job: str, request: SessionRequest) -> SessionView:
        """A job that is asleep is woken first, however often it falls asleep again."""
        since, told = time.monotonic(), [""]
        while (view := self._client.open_session(job, request)).waking:
            if time.monotonic() - since > WAKE_S_MAX:
                message = f"{job} is still {view.waking} after {WAKE_S_MAX:.0f} s"
                raise ShoalError(f"{message}: {view.why}; see: shoal why {job}")
            text = f"{job} is {view.waking}: {view.why}"
            if len(told) == 1:
                text = f"{job} is {view.waking} ..."
                if view.waking != "waking":
                    text = f"{job} is {view.waking}; waking it ..."
            if text not in told[-2:]:
                told.append(text)
                self._tell(text)
            self._client.job(job, wait_for="running", wait_s=WAKE_LOOK_S)
        return view

    def _refused(self, job: str, member: int) -> None:
        """Without a meeting nothing begins; but the head says in words why we may not."""
        wanted = {"meeting": "0" * 32, "key": "0" * 32, **self._wanted}
        self._client.open_session(job, SessionRequest(kind=self._kind, member=member, **wanted))

    def close(self) -> None:
        """The process or the connections on the node end."""
        if not self._opened:
            self._thread.stop()
            return

        async def leave() -> None:
            self._cease("closed")
            if self._present is not None:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._present.close(DONE), CLOSE_S_MAX)

        with contextlib.suppress(Exception):
            self._thread.call(leave()).result(2 * CLOSE_S_MAX)
        super().close()

    # -- in the loop's thread ----------------------------------------------------------------

    async def _met(self, channel: ClientConnection) -> None:
        before, self._present = self._present, channel
        if before is not None:  # the node came again; it knows better whether a connection is good
            before.transport.abort()
            await before.wait_closed()
        if self._losing is not None:
            self._losing.cancel()
        try:
            await self.streams.reliable.carry(channel)
        except (Broken, msgspec.DecodeError) as error:
            self._cease(f"the session broke off: {error}")
        except (OSError, TimeoutError, ws_error()):
            pass  # the node comes again
        finally:
            if self._present is channel:
                self._present = None
                self._losing = self.loop.call_later(
                    LOST_S_MAX, self._cease, "the connection to the node was lost"
                )
            code = DONE if self.ended is not None else LATER
            with contextlib.suppress(Exception):
                await channel.close(code)

    def _hear(self, word: Word) -> None:
        if isinstance(word, Ended):
            self.ended = self.ended or word
            self._said(word)
            self._cease(word.why or "it has ended")
            if self._present is not None:
                self._thread.spawn(self._present.close(DONE))
            return
        self._said(word)
        if isinstance(word, Began):
            self._arrived.set()

    def _cease(self, why: str) -> None:
        """It is over; nothing more comes or goes."""
        if self.ended is None:
            self.ended = Ended(code=255, why=why)
        self.streams.lost(why)
        self._arrived.set()
        self.over.set()

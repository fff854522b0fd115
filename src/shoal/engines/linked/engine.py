"""Nodes on other machines: their agents dial the head, and this is the head's end of their links.

It holds nothing that matters: an agent that dials again reports everything again. A lost link is
only silence. A death is reported by a node's starter alone, which finds the agent's lock free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from shoal.link.wire import (
    AsBefore,
    Ask,
    Commands,
    Died,
    Enter,
    FileKept,
    Finds,
    FromAgent,
    GivesFile,
    Handed,
    Heard,
    Joined,
    Joins,
    Keep,
    Kept,
    Link,
    Log,
    Need,
    Opens,
    Piece,
    Seeks,
    ToAgent,
    Turned,
    Wants,
    WantsFile,
    encode,
)
from shoal.machine.enduring import enduring
from shoal.machine.paths import Hangs
from shoal.model.commands import Envelope
from shoal.model.kept import FileAnswer
from shoal.model.node import JOINED, NodeSpec
from shoal.model.report import NodeGone, NodeReport
from shoal.model.session import SessionOrder
from shoal.ports import Inbox

log = logging.getLogger("shoal.linked")

MESSAGE_BYTES_MAX = 2 * 1024 * 1024  # of one message from a node
# A node may be in the hands of somebody else: what it makes the controller store is bounded.
SPEC_BYTES_MAX = 64 * 1024
MEMBERS_MAX = 10_000  # in one report
# A node that does not read is cut off. What it missed is sent again when it is back.
BACKLOG_BYTES_MAX = 16 * 1024 * 1024
PIECES_BYTES_MAX = 2 * 1024 * 1024  # of packages on their way, so that commands find room
ALIVE_S = 5.0  # a link that was heard so recently is of an agent that lives
SILENT_S = 20.0  # an agent reports every second, and pings every 5
LOOK_S = 5.0
LAST_WORD_S = 1.0  # for a node that is turned away to hear why


class LinkedEngine:
    fences = False  # a machine that cannot be reached cannot be ended

    def __init__(self) -> None:
        self.inbox: Inbox | None = None
        self.deaths: dict[str, NodeGone] = {}
        self.heads: Callable[[], tuple[str, ...]] = tuple  # their URLs, if there are several
        self._told: tuple[str, ...] = ()
        self._lines: dict[str, Line] = {}
        self._new: dict[str, Line] = {}  # beside another link of the node, and not heard yet
        self._task: asyncio.Task[None] | None = None

    async def start(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self._task = asyncio.create_task(enduring("the watch on the links", self._watch))

    def accept(self, node: str) -> Link:
        """The head's end of a new connection of this node."""
        return Line(self, node).link

    def send(self, node: str, envelope: Envelope) -> None:
        line = self._lines.get(node)
        if line is not None:
            line.send(Commands(envelope))

    def invite(self, node: str, order: SessionOrder | FileAnswer) -> bool:
        line = self._lines.get(node)
        if line is not None:
            line.send(FileKept(order) if isinstance(order, FileAnswer) else Enter(order))
        return line is not None

    async def resend(self) -> None:
        for line in list(self._lines.values()):
            line.send(Ask(self.heads()))
        if self.inbox is not None:
            for gone in list(self.deaths.values()):
                self.inbox.gone(gone)

    async def close(self) -> None:
        self.inbox = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for line in self._all():
            line.link.close()

    def __contains__(self, node: str) -> bool:
        return node in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def opened(self, line: Line) -> bool:
        """Of two links of one node, the newer counts: the older is what a broken one left. Until
        its agent has spoken, it only waits (False)."""
        if line.node not in self._lines:
            self._lines[line.node] = line
            return True
        before = self._new.get(line.node)
        self._new[line.node] = line
        if before is not None:
            before.link.close()
        return False

    def counts(self, line: Line) -> bool:
        return self._lines.get(line.node) is line

    def lives_elsewhere(self, line: Line, life: int) -> bool:
        """Another link of the node is of another life of its agent, which is alive. The end of a
        life closes its link, so two lives at once are two machines with one folder: the copy must
        neither cut off the node nor make its jobs run twice."""
        current = self._lines.get(line.node)
        if current is None or current is line or current.life in (0, life):
            return False
        return time.monotonic() - current.heard_at < ALIVE_S

    def may_speak(self, line: Line) -> bool:
        """False: the node's other link is of a later life of its agent, or of one that lives."""
        current = self._lines.get(line.node)
        if current is line:
            return True
        if current is not None and current.life > line.life:
            return False
        if self.lives_elsewhere(line, line.life):
            return False
        self._new.pop(line.node, None)
        self._lines[line.node] = line
        if current is not None:
            current.link.close()
            line.send(Ask(self.heads()))  # its agent did not know yet that a controller answers
        return True

    def closed(self, line: Line) -> None:
        for lines in (self._lines, self._new):
            if lines.get(line.node) is line:
                del lines[line.node]

    def _all(self) -> list[Line]:
        return [*self._lines.values(), *self._new.values()]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            latest = time.monotonic() - SILENT_S
            told, self._told = self._told, self.heads()
            if self._told and told != self._told:  # nodes that linked before may know less
                await self.resend()
            for line in self._all():
                if line.heard_at < latest:
                    log.warning("nothing comes from %s; its link is closed", line.node)
                    line.link.close()


class Line:
    """One connection of one node, which speaks for itself alone."""

    def __init__(self, engine: LinkedEngine, node: str) -> None:
        self.node = node
        self.heard_at = time.monotonic()
        self._engine = engine
        self.life = 0  # the incarnation of its agent
        self._spec: NodeSpec | None = None
        self.link = Link(
            FromAgent,
            self._opened,
            self._received,
            self._closed,
            compress=True,
            most=MESSAGE_BYTES_MAX,
        )

    def send(self, message: ToAgent) -> None:
        if self.link.backlog_bytes > BACKLOG_BYTES_MAX:
            log.error("%s takes no messages; its link is closed", self.node)
            self.link.close()
        else:
            self.link.send(message)

    def _opened(self, link: Link) -> None:
        if self._engine.inbox is None:
            link.close()
            return
        if self._engine.opened(self):
            # So that the agent knows that a controller answers, and where the others are.
            self.send(Ask(self._engine.heads()))

    def _closed(self, _: Link) -> None:
        self._engine.closed(self)

    def _received(self, message: FromAgent) -> None:
        inbox = self._engine.inbox
        if inbox is None:
            return
        self.heard_at = time.monotonic()
        if not (self._engine.counts(self) or isinstance(message, Heard | Died)):
            return
        match message:
            case Heard(report):
                if self._is_own(report.spec.id):
                    self._heard(inbox, report)
            case AsBefore(still):
                if self._is_own(still.node) and not inbox.still(still):
                    self.send(Ask())
            case Log(chunk):
                inbox.log_from(chunk, self.node, lambda size: self.send(Kept(chunk.ref, size)))
            case Need(package, offset):
                # An agent without an answer asks again.
                if self.link.backlog_bytes < PIECES_BYTES_MAX:
                    with contextlib.suppress(Hangs):
                        self.send(Piece(inbox.piece(package, offset, self.node)))
            case Wants(wanted):
                found = inbox.secrets_of(self.node, wanted)
                if found is not None:
                    self.send(Handed(found))
            case Keep(what) if inbox.files is not None:
                inbox.files.take(what, self.node, lambda answer: self.send(FileKept(answer)))
            case WantsFile(wanted) if inbox.files is not None:
                # As for packages: an agent without an answer asks again.
                if self.link.backlog_bytes < PIECES_BYTES_MAX:
                    sent = inbox.files.give(wanted, self.node)
                    if sent is not None:
                        self.send(GivesFile(sent))
            case Opens(door) if inbox.blocks is not None:
                inbox.blocks.opens(self.node, door)
            case Seeks(seek) if inbox.blocks is not None:
                inbox.blocks.seek(seek, self.node, lambda sought: self.send(Finds(sought)))
            case Joins(end) if inbox.tunnels is not None:
                inbox.tunnels.joins(end, self.node, lambda tunnel: self.send(Joined(tunnel)))
            case Died(gone):
                if self._engine.lives_elsewhere(self, gone.incarnation):
                    self._turn_away()
                elif self._is_own(gone.node):
                    self._engine.deaths[self.node] = gone
                    inbox.gone(gone)
                    self.link.close()  # which tells the starter that it was heard

    def _heard(self, inbox: Inbox, report: NodeReport) -> None:
        wrong = self._wrong(report)
        if not wrong and not self._engine.may_speak(self):
            self._turn_away()
            return
        if wrong:
            self._refuse(wrong)
            return
        death = self._engine.deaths.get(self.node)
        if death is not None and death.incarnation < report.incarnation:
            del self._engine.deaths[self.node]
        if not report.spec.origin:  # only nodes of the controller's own machine have none
            spec = msgspec.structs.replace(report.spec, origin=JOINED)
            report = msgspec.structs.replace(report, spec=spec)
        inbox.heard(report)

    def _is_own(self, said: str) -> bool:
        if said == self.node:
            return True
        self._refuse(f"speaks for {said[:64]!r}")
        return False

    def _wrong(self, report: NodeReport) -> str:
        """An agent's life has one number, and ends with its link or later."""
        self.life = self.life or report.incarnation
        if report.incarnation != self.life:
            return "changes its incarnation without a new link"
        members = len(report.alive) + len(report.exits) + len(report.getting)
        if members > MEMBERS_MAX:
            return f"reports {members} members"
        if report.spec != self._spec:
            if len(encode(report.spec)) > SPEC_BYTES_MAX:
                return "has a description that is too long"
            self._spec = report.spec
        return ""

    def _turn_away(self) -> None:
        """It hears why, so that it neither dials every second nor seems to have joined."""
        log.error("%s lives elsewhere: is its folder on two machines? A link is closed", self.node)
        self.send(Turned("another machine is this node, and lives"))
        asyncio.get_running_loop().call_later(LAST_WORD_S, self.link.close)

    def _refuse(self, what: str) -> None:
        log.error("%s %s; its link is closed", self.node, what)
        self.link.close()

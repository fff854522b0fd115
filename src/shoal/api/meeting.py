"""Meetings: two ends that cannot reach each other are connected through the head (ADR 33).

A host opens a meeting with its token; guests enter it with its key. Of the bytes that pass, each
direction of a connection holds one message here, so that a slow reader slows its own sender down.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.http import Closed, Request, Socket
from shoal.api.limits import PROVEN
from shoal.api.principal import SCOPE, Principal
from shoal.api.problems import Refusal, accepted
from shoal.api.quotas import TICKET
from shoal.api.reach import Reach
from shoal.api.watcher import REFUSED
from shoal.calls.jobs import JobCalls
from shoal.calls.page import MachineCalls
from shoal.client.transport import ShoalError, Unreachable
from shoal.core.answers.why import explain
from shoal.link.meeting import DONE, KEY_HEADER, PARTNER_GONE, Announced, Opening, key_hash
from shoal.model.away import Away
from shoal.model.hidden import NO_HASH
from shoal.model.job import COMMAND_BYTES_MAX, Job, Member, MemberRef, MemberStatus, Phase
from shoal.model.report import WakeJob
from shoal.model.session import Kind, SessionOrder, SessionRequest, SessionView

MEETINGS_MAX = 256
MEETINGS_PER_TENANT_MAX = 64
GUESTS_MAX = 512  # in all meetings, as each holds memory and two connections
GUESTS_PER_MEETING_MAX = 256
AWAY_S_MAX = 60.0  # without its host; then the meeting ends
PICKED_UP_S_MAX = 30.0  # a guest that its host does not receive
FULL = 4429

MeetingId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}(?!\n)$")]


class _Guest:
    def __init__(self, end: Socket) -> None:
        self.end = end
        self.host: asyncio.Future[Socket] = asyncio.get_running_loop().create_future()


class _Meeting:
    def __init__(self, who: Principal, hash_: str) -> None:
        self.tenant, self.hash = who.tenant, hash_
        self.owner = who.tenant if who.token else ""  # who its guests' connections count for
        self.guests: dict[int, _Guest] = {}
        self.announcements: asyncio.Queue[int] = asyncio.Queue()
        self.host = 0  # the number of the connection of its present host; 0: it is away
        self.ending: asyncio.TimerHandle | None = None


class Meetings:
    """They are in memory: after a restart of the head, hosts open them again under their names."""

    def __init__(self, urls: Callable[[Socket], tuple[str, ...]]) -> None:
        self._urls = urls
        self._meetings: dict[str, _Meeting] = {}
        self._numbers = itertools.count(1)

    def held(self, name: str) -> bool:
        return name in self._meetings

    # -- the host ------------------------------------------------------------------------------

    async def hold(self, end: Socket, name: str) -> None:
        meeting = self._opened(end, name)
        number = meeting.host = next(self._numbers)
        if meeting.ending is not None:
            meeting.ending.cancel()
            meeting.ending = None
        await end.accept()
        await _say(end, Opening(self._urls(end)))
        for waiting, guest in meeting.guests.items():
            if not guest.host.done():
                meeting.announcements.put_nowait(waiting)
        announcing, code = asyncio.create_task(_announce(end, meeting, number)), DONE
        try:
            code = await _last_code(end)
        finally:  # its sender may no longer hold it: then it ends, as if the host had said so
            announcing.cancel()
            self._left(name, meeting, number, code)

    def _left(self, name: str, meeting: _Meeting, number: int, code: int) -> None:
        if meeting.host != number:
            return  # its host has opened it again
        meeting.host = 0
        if code == DONE:
            self._end(name)
        else:
            loop = asyncio.get_running_loop()
            meeting.ending = loop.call_later(AWAY_S_MAX, self._end, name)

    def _opened(self, end: Socket, name: str) -> _Meeting:
        who: Principal = end.scope[SCOPE]
        hash_ = end.headers.get(KEY_HEADER, "")
        if len(hash_) != len(NO_HASH):
            raise Closed("the header with the key's hash is missing", REFUSED)
        meeting = self._meetings.get(name)
        if meeting is not None:
            if meeting.tenant != who.tenant or not hmac.compare_digest(meeting.hash, hash_):
                raise Closed("there is no such meeting", REFUSED)
            return meeting
        alike = sum(1 for one in self._meetings.values() if one.tenant == who.tenant)
        if alike >= MEETINGS_PER_TENANT_MAX or len(self._meetings) >= MEETINGS_MAX:
            raise Closed("too many meetings", FULL)
        meeting = self._meetings[name] = _Meeting(who, hash_)
        return meeting

    def _end(self, name: str) -> None:
        meeting = self._meetings.pop(name, None)
        if meeting is not None:
            for guest in meeting.guests.values():
                guest.host.cancel()

    async def receive(self, end: Socket, name: str, number: int) -> None:
        """The host's end of the connection to one guest."""
        who: Principal = end.scope[SCOPE]
        meeting = self._meetings.get(name)
        guest = meeting.guests.get(number) if meeting and meeting.tenant == who.tenant else None
        if guest is None or guest.host.done():
            raise Closed("there is no such guest", REFUSED)
        _count_here(end)
        await end.accept()
        if guest.host.done():
            await end.close(code=PARTNER_GONE)
            return
        guest.host.set_result(end)
        await _pass_on(end, guest.end)

    # -- a guest -------------------------------------------------------------------------------

    async def enter(self, end: Socket, name: str) -> None:
        meeting = self._meetings.get(name)
        given = key_hash(end.headers.get(KEY_HEADER, ""))
        right = hmac.compare_digest(given, meeting.hash if meeting else NO_HASH)
        if meeting is None or not right:
            raise Closed("there is no such meeting", REFUSED)
        proven: Any = end.scope.get(PROVEN)
        present = sum(len(one.guests) for one in self._meetings.values())
        full = len(meeting.guests) >= GUESTS_PER_MEETING_MAX or present >= GUESTS_MAX
        if full or (proven is not None and not proven(meeting.owner)):
            raise Closed("too many guests", FULL)
        _count_here(end)
        number, guest = next(self._numbers), _Guest(end)
        meeting.guests[number] = guest
        try:
            await end.accept()
            meeting.announcements.put_nowait(number)
            await _pass_on_once(guest)
        finally:
            meeting.guests.pop(number, None)
            guest.host.cancel()


async def _announce(end: Socket, meeting: _Meeting, number: int) -> None:
    while meeting.host == number:
        guest = await meeting.announcements.get()
        if guest in meeting.guests:
            await _say(end, Announced(guest))


def _count_here(end: Socket) -> None:
    """Connections of a meeting have bounds of their own, and count neither as streams nor as
    requests under way."""
    ticket: Any = end.scope.get(TICKET)
    if ticket is not None:
        ticket.close()


async def _pass_on_once(guest: _Guest) -> None:
    """Waits for the host, then passes on what the guest sends."""
    try:
        host = await asyncio.wait_for(asyncio.shield(guest.host), PICKED_UP_S_MAX)
    except (TimeoutError, asyncio.CancelledError):
        guest.host.cancel()
        await _close(guest.end, PARTNER_GONE)
        return
    await _pass_on(guest.end, host)


async def _pass_on(one: Socket, other: Socket) -> None:
    """Bytes from one to the other, until one is closed; then the other is closed, too."""
    code = PARTNER_GONE
    try:
        while True:
            message: Any = await one.receive()
            if message["type"] == "websocket.disconnect":
                code = DONE if message.get("code") == DONE else PARTNER_GONE
                return
            data = message.get("bytes")
            if data:
                await other.send({"type": "websocket.send", "bytes": data, "text": None})
    except Exception:  # the other is gone, however that shows
        pass
    finally:
        await _close(other, code)
        await _close(one, PARTNER_GONE)


async def _last_code(end: Socket) -> int:
    """The code with which it was closed. Whatever it says before that is ignored."""
    while True:
        message: Any = await end.receive()
        if message["type"] == "websocket.disconnect":
            return int(message.get("code") or 0)


async def _say(end: Socket, what: msgspec.Struct) -> None:
    with contextlib.suppress(Exception):  # it is gone, which its reader notices
        await end.send_text(msgspec.json.encode(what).decode())


async def _close(end: Socket, code: int) -> None:
    with contextlib.suppress(Exception):  # it may be closed already
        await end.send({"type": "websocket.close", "code": code, "reason": ""})


class Meeting:
    @handles(MachineCalls.hold_meeting)
    async def hold(self, socket: Socket, meetings: Meetings, meeting: MeetingId) -> None:
        await meetings.hold(socket, meeting)

    @handles(MachineCalls.receive_guest)
    async def receive(
        self, socket: Socket, meetings: Meetings, meeting: MeetingId, guest: int
    ) -> None:
        await meetings.receive(socket, meeting, guest)

    @handles(MachineCalls.enter_meeting)
    async def enter(self, socket: Socket, meetings: Meetings, meeting: MeetingId) -> None:
        await meetings.enter(socket, meeting)


def urls_of(reach: str) -> Callable[[Socket], tuple[str, ...]]:
    """Where nodes may reach this head: `reach` is its URL for them, if it has one of its own;
    otherwise they use the one that the host has used."""

    def urls(end: Socket) -> tuple[str, ...]:
        found = [reach] if reach else []
        here = end.scope.get("server")
        if here and here[1]:
            scheme = "https" if end.scope.get("scheme") == "wss" else "http"
            host = f"[{here[0]}]" if ":" in str(here[0]) else str(here[0])
            found.append(f"{scheme}://{host}:{here[1]}")
        return tuple(dict.fromkeys(found))

    return urls


# The API of sessions: a user who may cancel a job may also enter it (ADR 48).
#
# The sender holds a meeting open; the member's node is told to enter it. The head keeps nothing of
# a session but the meeting, so after a restart both ends meet again without it.


INVITE = "invite"  # in the app's state: how a node is told
CONFLICT, LATER = 409, 503
LATER_S = 1
TOUCHES = {
    Kind.EXEC: "ran shoal exec",
    Kind.ATTACH: "attached to it",
    Kind.FORWARD: "forwards a port of it",
    Kind.SSH: "connected with ssh",
}


class Sessions:
    @handles(JobCalls.open_session)
    async def open(
        self, request: Request, reach: Reach, meetings: Meetings, job_id: str, data: SessionRequest
    ) -> SessionView:
        job = reach.job(job_id)
        note(request.scope, on=f"{job.id}.{data.member} {data.kind.value}")
        if job.away is not None:
            return await _away(reach, meetings, job, job.away, data)
        member = _living(reach, job, data.member)
        if job.napping:
            return await _woken(reach, job, data)
        if sum(map(len, data.command)) > COMMAND_BYTES_MAX:
            raise Refusal(422, f"is longer than {COMMAND_BYTES_MAX} bytes", "command")
        ref = MemberRef(job.id, job.attempt, data.member)
        invite = request.app.state.get(INVITE)
        order = SessionOrder(ref=ref, request=data, who=reach.who.user)
        node = member.slice.node
        if invite is None or not invite(node, order):
            message = f"{node}, where {job.id} runs, has no contact with the head now; try again"
            raise Refusal(LATER, message, "job", LATER_S)
        return SessionView(job=job.id, attempt=job.attempt, member=data.member, node=node)


async def _away(
    reach: Reach, meetings: Meetings, job: Job, away: Away, asked: SessionRequest
) -> SessionView:
    """Its host says whether it can be entered."""
    driver, neighbor = reach.loop.neighboring, away.neighbor
    site = driver.sites.get(neighbor) if driver is not None else None
    if site is None or not away.id:
        raise Refusal(LATER, f"{job.id} is on its way to {neighbor}; try again", "job", LATER_S)
    try:
        view = await site.crossings.session(away.id, asked, meetings)
    except Unreachable as error:
        raise Refusal(LATER, str(error), "job", LATER_S) from None
    except ShoalError as error:
        raise Refusal(CONFLICT, f"{neighbor} says: {error}", error.field or "job") from None
    return SessionView(
        job=job.id,
        attempt=job.attempt,
        member=asked.member,
        node=neighbor,
        waking=view.waking[:32],
        why=f"{neighbor} says: {view.why[:300]}" if view.why else "",
    )


async def _woken(reach: Reach, job: Job, asked: SessionRequest) -> SessionView:
    """A session needs its job awake: the client asks again until it is."""
    why = f"is waking because {reach.name} {TOUCHES[asked.kind]}"
    accepted(await reach.loop.request(WakeJob(job.id, reach.name, why)))
    await reach.loop.settled()
    job = reach.job(job.id)
    _living(reach, job, asked.member)
    return SessionView(
        job=job.id,
        attempt=job.attempt,
        member=asked.member,
        node=job.members[asked.member].slice.node,
        waking=job.state,
        why=_why(reach, job),
    )


def _why(reach: Reach, job: Job) -> str:
    loop = reach.loop
    return reach.text(explain(loop.state, job, loop.policy, loop.clock.now_ms()))


def _living(reach: Reach, job: Job, number: int) -> Member:
    if job.phase is Phase.FINISHED:
        message = f"{job.id} has ended ({job.state}); read its output with: shoal logs"
        raise Refusal(CONFLICT, f"{message} {job.id}", "job")
    last = max(job.spec.members, job.spec.members_max) - 1
    if number > last:
        raise Refusal(422, f"{job.id} has members 0 to {last}", "member")
    if number < len(job.members):
        member = job.members[number]
        if member.status is MemberStatus.ALIVE:
            return member
        if job.active and member.over:
            message = f"member {number} of {job.id} has ended; read its output with: shoal logs"
            raise Refusal(CONFLICT, f"{message} {job.id} -m {number}", "job")
    why = _why(reach, job)
    message = f"{job.id} does not run yet, it is {job.state}"
    raise Refusal(CONFLICT, f"{message}: {why}" if why else message, "job")

"""`POST /v1/services/NAME/try`: one request to a service from the page, whose origin the gateway's
is not. The service's name alone decides where it goes: this head's own gateway, by the host name
that no other service can have. Nothing of the sender's own request is passed on but what it asks
for, and redirects are not followed.

The answer is lines of JSON, so that a status, a broken stream and a cut have a place, and so that
a service's own page can never be a page of the controller's origin.
"""

from __future__ import annotations

import asyncio
import codecs
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any

import msgspec

from shoal.api.handling import handles
from shoal.api.http import SAFE_HEADERS, Stream
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.calls.page import PageCalls
from shoal.control.gateway_link import PAGE, page_key
from shoal.core.features.service.serve import owner_of
from shoal.core.state.state import State
from shoal.link.http import Headers, Line, Relay, Unsent, request_head
from shoal.model.access import access_of, is_open
from shoal.model.service import GatewayEntry, Service

AT_ONCE = 4
EACH = 2  # of one person
BODY_BYTES_MAX = 256 * 1024
REQUEST_BYTES_MAX = 2 * 1024 * 1024  # a body as a string of JSON is longer than itself
ANSWER_BYTES_MAX = 4 * 1024 * 1024
WHOLE_S = 120.0
RETRY_S = 5
SHOWN = {b"content-type": "type", b"location": "location"}
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Try(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With a body it is a POST of JSON, else a GET."""

    path: Annotated[str, msgspec.Meta(max_length=2048, pattern=r'^/(?!/)[!"$-~]*(?!\n)$')] = "/"
    body: Annotated[str, msgspec.Meta(max_length=BODY_BYTES_MAX)] | None = None


class Place:
    """Of one request among those under way. It ends by itself, whatever becomes of the sender."""

    def __init__(self, tries: Tries, who: str) -> None:
        self._tries, self._who = tries, who
        self.line: Line | None = None
        self.late = False
        self._timer = asyncio.get_running_loop().call_later(WHOLE_S, self._end)
        tries.under_way[who] += 1

    def _end(self) -> None:
        self.late = True
        self.leave()

    def leave(self) -> None:
        self._timer.cancel()
        if self.line is not None:
            self.line.abort()
        if self._who:
            self._tries.under_way[self._who] -= 1
            self._tries.under_way += Counter()  # drops what is zero
            self._who = ""


class Tries:
    """`entry`: of this head's gateway."""

    def __init__(self, entry: Callable[[], GatewayEntry]) -> None:
        self._entry = entry
        self._relay = Relay(self._trust)
        self.under_way: Counter[str] = Counter()

    def place(self, who: str) -> Place:
        if self.under_way[who] >= EACH:
            message = f"you have {EACH} requests to services under way here, the most; stop one"
            raise Refusal(429, message, "", RETRY_S)
        if self.under_way.total() >= AT_ONCE:
            message = f"{AT_ONCE} requests to services are under way here, the most; try again"
            raise Refusal(503, message, "", RETRY_S)
        return Place(self, who)

    async def send(
        self, place: Place, name: str, asked: Try, *, guarded: bool = False
    ) -> tuple[int, Headers]:
        entry = self._entry()
        host = EVERYWHERE.get(entry.address, entry.address)
        host = f"[{host}]" if ":" in host else host
        url = f"http{'s' if entry.certificate else ''}://{host}:{entry.port}"
        try:
            place.line = line = await self._relay.take(url)
            line.begin(_head(f"{name}.{entry.domain}", asked, guarded=guarded))
            if asked.body is not None:
                await line.write(asked.body.encode())
            return await line.head()
        except Unsent as error:
            raise Refusal(502, f"the gateway does not answer: {error}", "service") from None
        except OSError:
            raise Refusal(504 if place.late else 502, _ended(place), "service") from None

    def _trust(self) -> ssl.SSLContext:
        """The gateway's own certificate, by whatever name we reach it."""
        made = ssl.create_default_context(cafile=self._entry().certificate)
        made.check_hostname = False
        made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return made


class Trying:
    @handles(PageCalls.try_service, body_max=REQUEST_BYTES_MAX)
    async def send(self, reach: Reach, tries: Tries, name: str, data: Try) -> Stream:
        service = reach.service(name)
        if service.stopping:
            raise Refusal(409, f"{name} is stopping", "service")
        if data.body is not None and len(data.body.encode()) > BODY_BYTES_MAX:
            raise Refusal(413, f"is longer than {BODY_BYTES_MAX // 1024} KiB", "body")
        place = tries.place(f"{reach.who.tenant}/{reach.who.user}")
        try:
            guarded = asks_for_keys(reach.loop.state, service)
            status, headers = await tries.send(place, name, data, guarded=guarded)
        except BaseException:
            place.leave()
            raise
        head: dict[str, Any] = {"status": status}
        head |= {SHOWN[key]: value.decode("latin-1") for key, value in headers if key in SHOWN}
        lines = _lines(place, head)
        return Stream(lines, media_type="application/x-ndjson", headers=SAFE_HEADERS)


async def _lines(place: Place, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    left = ANSWER_BYTES_MAX
    assert place.line is not None
    try:
        yield _line(head)
        while piece := await place.line.piece():
            if text := decoder.decode(piece[:left]):
                yield _line({"text": text})
            left -= len(piece)
            if left < 0:
                yield _line({"problem": f"cut after {ANSWER_BYTES_MAX >> 20} MiB"})
                return
    except OSError:
        yield _line({"problem": _ended(place)})
    finally:
        place.leave()


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _ended(place: Place) -> str:
    if place.late:
        return f"cut after {WHOLE_S:.0f} s"
    return "the replica ended before its answer was complete"


def asks_for_keys(state: State, service: Service) -> bool:
    """The gateway would refuse the page, too; the page's users have shown who they are."""
    owner = owner_of(state, service.spec.replica.tenant)
    return not is_open(access_of(service.spec.way.access, owner))


def _head(host: str, asked: Try, *, guarded: bool) -> bytes:
    headers = [(b"host", host.encode()), (b"accept", b"*/*"), (b"user-agent", b"shoal")]
    headers.append((b"connection", b"close"))
    if guarded:
        headers.append((b"authorization", f"Bearer shoal_{PAGE}_{page_key()}".encode()))
    if asked.body is not None:
        headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", b"%d" % len(asked.body.encode())))
    return request_head("GET" if asked.body is None else "POST", asked.path.encode(), headers)

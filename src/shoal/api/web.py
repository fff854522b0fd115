"""The page: its files, and how a browser signs in and out."""

from __future__ import annotations

import gzip
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from shoal.api.access import SESSION_MS, Access
from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.http import Cookie, Redirect, Request, Response
from shoal.api.invites import accept
from shoal.api.principal import Principal, Session
from shoal.api.problems import Refusal, accepted
from shoal.calls.page import PageCalls
from shoal.calls.people import PeopleCalls
from shoal.control.loop import ControlLoop
from shoal.model.people import CodeView
from shoal.model.report import EndSignIn

FOLDER = Path(__file__).parent.parent / "web"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Nothing from other hosts, nothing inline; no other site may frame the page or get its address.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # cached but revalidated each time: an update is seen at once
}
Secret = Annotated[str, msgspec.Meta(max_length=512)]
SIGN_IN_BYTES_MAX = 16 * 1024  # the client has not shown a token yet


class SignIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The token, the code of a link from `shoal page`, or that of an invite, which is void then."""

    token: Secret = ""
    code: Secret = ""
    invite: Secret = ""


class SessionView(msgspec.Struct, kw_only=True):
    """`csrf` goes into the header x-shoal-csrf of every request that changes something. `openid`:
    the page can offer a sign-in at /v1/oidc/begin."""

    csrf: str
    until_ms: int
    openid: bool = False
    user: str = ""
    tenant: str = ""  # "*": all of them
    role: str = ""
    token: str = ""  # its id; empty: the operator's own


class Files:
    in_schema = False

    @handles(PageCalls.index)
    def index(self, request: Request) -> Response[bytes]:
        return served("index.html", request)

    @handles(PageCalls.icon)
    def icon(self) -> Redirect:
        return Redirect("/web/icon.svg")

    @handles(PageCalls.file)
    def file(self, request: Request, name: str) -> Response[bytes]:
        return served(name, request)


class Sessions:
    @handles(PageCalls.sign_in, body_max=SIGN_IN_BYTES_MAX)
    async def sign_in(
        self, request: Request, access: Access, loop: ControlLoop, data: SignIn
    ) -> Response[SessionView]:
        await access.settled()
        token = data.token
        if data.invite:
            access.refuse_foreign(request)
            _, token = await accept(request, access, loop, data.invite)
        session, cookie = access.sign_in(request, token, data.code)
        who = access.of_session(session)
        if who is not None:
            note(request.scope, who=who.user, tenant=who.tenant, token=who.token)
        return Response(
            _session_view(access, session, who),
            cookies=[session_cookie(request, access, cookie, SESSION_MS // 1000)],
        )

    @handles(PageCalls.session)
    async def session(self, request: Request, access: Access, openid_on: bool) -> SessionView:
        await access.settled()
        session = access.session(request)
        view = _session_view(access, session, access.of_session(session))
        view.openid = openid_on
        return view

    @handles(PageCalls.sign_out)
    async def sign_out(
        self, request: Request, access: Access, loop: ControlLoop, who: Principal
    ) -> Response[None]:
        """A fact, so that it holds at every head and after a restart."""
        session = access.session(request)
        if session is not None:
            ended = EndSignIn(session.token, session.name, session.until_ms, who.user)
            accepted(await loop.request(ended))
        return Response(None, cookies=[session_cookie(request, access, "", 0)])

    @handles(PeopleCalls.page_code)
    async def code(self, request: Request, access: Access, who: Principal) -> CodeView:
        await access.settled()
        if access.principal(request) is None:
            raise Refusal(403, "a link needs the token, not a session; use: shoal page")
        code, until_ms = access.new_code(who)
        return CodeView(code=code, until_ms=until_ms)


def _session_view(access: Access, session: Session | None, who: Principal | None) -> SessionView:
    if session is None or who is None:
        return SessionView(csrf="", until_ms=0)
    return SessionView(
        csrf=access.csrf(session),
        until_ms=session.until_ms,
        user=who.user,
        tenant=who.tenant,
        role=who.role.value,
        token=who.token,
    )


def session_cookie(request: Request, access: Access, value: str, seconds: int) -> Cookie:
    """The cookie is for this host and the API only: no other path needs it."""
    return Cookie(
        key=access.cookie,
        value=value,
        max_age=seconds,
        path="/v1",
        secure=request.secure,
        samesite="strict",
    )


class Served(NamedTuple):
    """A file of the page, as it is and as it travels."""

    body: bytes
    zipped: bytes
    tag: str


def lean(text: str) -> str:
    """A script or style sheet as it travels: without comments that begin a line, and without
    indentation. Its lines keep their numbers, which a browser names in an error."""
    lines, inside = [], False
    for line in text.splitlines():
        words = line.strip()
        if inside or words.startswith("/*"):
            _, ends, words = words.partition("*/")
            inside = not ends
        lines.append("" if words.startswith("//") else words.strip())
    return "\n".join(lines)


@lru_cache(maxsize=256)
def file_of(path: Path, changed_ns: int) -> Served:  # noqa: ARG001  a file that changed is read again
    body = path.read_bytes()
    body = lean(body.decode()).encode() if path.suffix in (".js", ".css") else body
    return Served(body, gzip.compress(body, mtime=0), hashlib.sha256(body).hexdigest()[:32])


def served(name: str, request: Request) -> Response[bytes]:
    """A file of the page, or 304 if the browser already has it."""
    path = FOLDER / name
    # The name is one that the folder lists, so it cannot lead out of it.
    if path.suffix not in TYPES or name not in {file.name for file in FOLDER.iterdir()}:
        raise Refusal(404, f"there is no file {name[:64]!r}; the page is at /")
    file = file_of(path, path.stat().st_mtime_ns)
    zips = "gzip" in request.headers.get("accept-encoding", "")
    tag = f'"{file.tag}{"-gzip" if zips else ""}"'
    headers = {**HEADERS, "etag": tag, "vary": "accept-encoding"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(b"", status=304, headers=headers, media_type=TYPES[path.suffix])
    if zips:
        headers["content-encoding"] = "gzip"
    body = file.zipped if zips else file.body
    return Response(body, headers=headers, media_type=TYPES[path.suffix])

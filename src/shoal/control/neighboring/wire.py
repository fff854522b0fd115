"""Calls to a neighbor: nothing is sent before its certificate is verified, and what it answers is
bounded in bytes and in time. It may be dead, slow or lying."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from shoal.calls.call import OCTETS, declared
from shoal.client.transport import ShoalError, Unreachable, trust_in
from shoal.link.http import Line, Relay, Unsent, request_head
from shoal.model.views import Problem

CALL_S = 10.0
PIECE_S = 30.0  # for each piece of a package
ANSWER_BYTES_MAX = 8 << 20
NOT_FOUND, LATER = 404, (408, 429, 500, 502, 503, 504, 507)
NO_TOKEN = (401, 403)
SAID_CHARACTERS_MAX = 200

Kind = TypeVar("Kind")


class Wire:
    """ShoalError is the neighbor's own refusal; Unreachable is anything after which it has to be
    asked again. A call may have been carried out then: each is one that may be repeated."""

    def __init__(self, url: str, token: str, certificate: str) -> None:
        self.url, self.token, self.certificate = url, token, certificate
        self._host = urlsplit(url).netloc.encode()
        self._pinned = bool(certificate)
        self._relay = Relay(functools.cache(lambda: trust_in(certificate)))
        self.fastest_ms = 0  # of the calls since somebody looked

    def close(self) -> None:
        self._relay.close()

    async def ask(
        self,
        kind: type[Kind],
        method: Callable[..., Any],
        /,
        *arguments: Any,
        within_s: float = CALL_S,
        **keywords: Any,
    ) -> Kind:
        """A call of the client, its answer read as `kind`: what a newer neighbor adds to it does
        not matter."""
        call = declared(method)
        made = call.request(arguments, keywords)
        for again in (True, False):
            try:
                async with asyncio.timeout(within_s):
                    return await self._exchange(kind, call.method, made.path, made.body)
            except (TimeoutError, Unsent) as error:
                raise self._silent(error, within_s) from None
            except OSError as error:  # a kept connection that was closed meanwhile, perhaps
                if not again:
                    raise self._silent(error, within_s) from None
        raise AssertionError("it has returned")

    async def find(self, kind: type[Kind], method: Callable[..., Any], name: str) -> Kind | None:
        """None: there is no such thing there."""
        try:
            return await self.ask(kind, method, name)
        except ShoalError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    async def send(
        self, method: Callable[..., Any], name: str, size: int, pieces: AsyncIterator[bytes]
    ) -> None:
        """A body that is too large for one piece."""
        call = declared(method)
        path = call.request((name, b""), {}).path
        line: Line | None = None
        try:
            async with asyncio.timeout(PIECE_S):
                line = await self._relay.take(self.url)
            line.begin(self._head(call.method, path, size, OCTETS["Content-Type"]))
            async for piece in pieces:
                async with asyncio.timeout(PIECE_S):
                    await line.write(piece)
            async with asyncio.timeout(PIECE_S):
                await self._answer(Anything, line)
        except (OSError, TimeoutError) as error:
            raise self._silent(error, PIECE_S) from None
        finally:
            if line is not None:
                self._relay.give(line)

    async def _exchange(self, kind: type[Kind], method: str, path: str, body: bytes | None) -> Kind:
        line = await self._relay.take(self.url)
        try:
            began = time.monotonic()
            line.begin(self._head(method, path, len(body or b""), "application/json"))
            if body:
                await line.write(body)
            found = await self._answer(kind, line)
        finally:
            self._relay.give(line)  # which ends one that is not at its answer's end
        took_ms = max(1, round((time.monotonic() - began) * 1000))
        self.fastest_ms = min(self.fastest_ms or took_ms, took_ms)
        return found

    def _silent(self, error: Exception, within_s: float) -> Unreachable:
        if isinstance(error, TimeoutError):
            return Unreachable(f"{self.url} has not answered within {within_s:g} s")
        if "CERTIFICATE_VERIFY_FAILED" not in str(error):
            return Unreachable(f"{self.url} does not answer ({one_line(str(error))})")
        if not self._pinned:
            text = f"this system does not trust the certificate at {self.url}"
            return Unreachable(f"{text}; give the whole token, with what follows its dot")
        text = f"the certificate at {self.url} is not the one that was accepted, and got nothing"
        return Unreachable(f"{text}; add the neighbor again with a new invitation")

    def _head(self, method: str, path: str, size: int, media: str) -> bytes:
        headers = [
            (b"host", self._host),
            (b"authorization", b"Bearer " + self.token.encode()),
            (b"content-length", b"%d" % size),
            (b"content-type", media.encode()),
        ]
        return request_head(method, path.encode(), headers)

    async def _answer(self, kind: type[Kind], line: Line) -> Kind:
        status, _ = await line.head()
        body = bytearray()
        while piece := await line.piece():
            body += piece
            if len(body) > ANSWER_BYTES_MAX:
                raise Unreachable(f"{self.url} answers with more than {ANSWER_BYTES_MAX >> 20} MiB")
        if status >= 300:
            raise _problem(self.url, status, bytes(body))
        try:
            return _decoded(kind, bytes(body))
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = f"{self.url} does not answer as a Shoal that takes jobs of others"
            raise Unreachable(f"{text}; upgrade it") from None


class Anything(msgspec.Struct):
    """An answer of which only the status matters."""


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def _decoded(kind: type[Kind], body: bytes) -> Kind:
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    found: Kind = _decoders[kind].decode(body)
    return found


def one_line(text: str, most: int = SAID_CHARACTERS_MAX) -> str:
    """What a neighbor says is shown to people."""
    plain = "".join(one if one.isprintable() else " " for one in text[: 4 * most])
    return " ".join(plain.split())[:most]


def _problem(url: str, status: int, body: bytes) -> ShoalError:
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = Problem(message=f"status {status}")
    said = one_line(problem.message)
    if status in NO_TOKEN:
        return Unreachable(f"{url} does not accept our token: {said}", status=status)
    if status in LATER:
        return Unreachable(f"{url} cannot do it now: {said}", status=status)
    return ShoalError(said, one_line(problem.field, 40), status)

"""A thin client of the Kubernetes API: JSON in, JSON out, bounded retries, one line per failure."""

from __future__ import annotations

import asyncio
import email.utils
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from shoal.engines.kubernetes.access import Access, Credentials, tls

Object = dict[str, Any]

REQUEST_S = 30.0
CONNECT_S = 10.0
TRIES_MAX = 5
PAUSE_S = 0.25  # before the second try; it doubles
PAUSE_S_MAX = 5.0
ASKED_PAUSE_S_MAX = 30.0  # a longer Retry-After is an error
ANSWER_BYTES_MAX = 64 * 1024 * 1024
MESSAGE_CHARACTERS_MAX = 240
AGAIN = (429, 500, 502, 503, 504)
# A connection that was cut without a word is noticed after 15 + 3 * 5 s.
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", 4), 15),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", 5), 5),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", 6), 3),
]


class KubeError(Exception):
    """The API server cannot be reached, or its answer makes no sense."""


class Refused(KubeError):
    """It answered with a refusal, in its own words."""

    def __init__(self, status: int, reason: str, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.pause_s = status, reason, message, pause_s

    @property
    def exists(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def again(self) -> bool:
        """It is worth asking again. Besides overload, that is a conflict with another writer: a
        pod's quota is such an object."""
        return self.status in AGAIN or (self.status == 409 and not self.exists)


class Client:
    """One API server. Requests may be made at the same time."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.ahead_s = 0.0  # how far the API server's clock is ahead of ours
        self._credentials = Credentials(access)
        self._renewing = asyncio.Lock()
        self._http: httpx.AsyncClient | None = None

    async def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        params: Mapping[str, str | int] | None = None,
    ) -> Object:
        """Ask, and ask again where that can help. Every request that we make may be repeated: an
        object's name is fixed before it is made, and only what we saw is deleted."""
        pause_s = PAUSE_S
        for tried in range(1, TRIES_MAX + 1):
            try:
                return await self._once(method, path, body, params or {})
            except Refused as error:
                if error.status == 401 and tried == 1:
                    self._credentials.refused()
                    continue
                if not error.again or tried == TRIES_MAX or error.pause_s > ASKED_PAUSE_S_MAX:
                    raise
                asked_s = error.pause_s
            except KubeError:
                if tried == TRIES_MAX:
                    raise
                asked_s = 0.0
            await asyncio.sleep(max(asked_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(PAUSE_S_MAX, pause_s * 2)
        raise AssertionError("every try returns or raises")

    async def _once(
        self, method: str, path: str, body: Object | None, params: Mapping[str, str | int]
    ) -> Object:
        http = await self._ready()
        try:
            answer = await http.request(
                method, path, json=body, params=dict(params), headers=self._credentials.headers()
            )
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError) as error:
            raise KubeError(self._unreached(error)) from error
        self._note_clock(answer)
        return _decoded(answer.status_code, answer.headers, answer.content)

    @asynccontextmanager
    async def stream(
        self, path: str, silent_s: float, params: Mapping[str, str | int]
    ) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a watch, for as long as the API server sends some. `silent_s`: how long it
        may send nothing."""
        http = await self._ready()
        timeout = httpx.Timeout(CONNECT_S, read=silent_s)
        try:
            async with http.stream(
                "GET",
                path,
                params=dict(params),
                headers=self._credentials.headers(),
                timeout=timeout,
            ) as answer:
                self._note_clock(answer)
                if answer.status_code != 200:
                    if answer.status_code == 401:
                        self._credentials.refused()
                    _decoded(answer.status_code, answer.headers, await answer.aread())
                yield answer.aiter_lines()
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError) as error:
            raise KubeError(self._unreached(error)) from error

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def _ready(self) -> httpx.AsyncClient:
        async with self._renewing:
            if self._credentials.stale:
                before = self._credentials.certificate
                await asyncio.to_thread(self._credentials.renew)
                if self._credentials.certificate != before:
                    await self.close()
            if self._http is None:
                self._http = self._made()
            return self._http

    def _made(self) -> httpx.AsyncClient:
        access, mine = self.access, self._credentials
        # httpx verifies the name of the URL; a kubeconfig may say that the certificate has another.
        extensions = {"sni_hostname": access.server_name} if access.server_name else {}
        client = httpx.AsyncClient(
            base_url=access.server,
            transport=httpx.AsyncHTTPTransport(
                verify=tls(access, mine.certificate, mine.key),
                socket_options=KEEPALIVE,
                proxy=access.proxy or None,
                limits=httpx.Limits(max_connections=32, max_keepalive_connections=8),
            ),
            headers={"User-Agent": "shoal", "Accept": "application/json"},
            timeout=httpx.Timeout(REQUEST_S, connect=CONNECT_S),
            follow_redirects=False,
            trust_env=False,
        )
        if extensions:

            async def name(request: httpx.Request) -> None:
                request.extensions = {**request.extensions, **extensions}

            client.event_hooks = {"request": [name]}
        return client

    def _note_clock(self, answer: httpx.Response) -> None:
        try:
            said = email.utils.parsedate_to_datetime(answer.headers.get("date", ""))
            self.ahead_s = said.timestamp() - time.time()
        except (ValueError, TypeError):
            return

    def _unreached(self, error: Exception) -> str:
        """One line for people, from the innermost cause."""
        inner: BaseException | None = error
        text = ""
        while inner is not None:
            if isinstance(inner, ssl.SSLCertVerificationError):
                if inner.verify_code == 10:
                    text = "its certificate has expired"
                else:
                    text = f"its certificate is not accepted: {inner.verify_message}"
                break
            text = str(inner) or text
            inner = inner.__cause__ or inner.__context__
        text = text or type(error).__name__
        if isinstance(error, httpx.TimeoutException):
            text = "it does not answer in time"
        elif "alert certificate expired" in text.lower().replace("_", " "):
            text = "our client certificate has expired"
        return f"{self.access.server} ({self.access.source}): {text}"[:MESSAGE_CHARACTERS_MAX]


def _decoded(status: int, headers: Mapping[str, str], content: bytes) -> Object:
    import json

    if len(content) > ANSWER_BYTES_MAX:
        raise KubeError(f"an answer of {len(content)} bytes is too long")
    try:
        found = json.loads(content) if content else {}
    except ValueError:
        found = None
    if status < 400:
        if not isinstance(found, dict):
            raise KubeError("the answer is not a Kubernetes object: is the server's URL right?")
        return found
    said = found if isinstance(found, dict) else {}
    message = str(said.get("message") or content[:200].decode(errors="replace") or f"HTTP {status}")
    raise Refused(
        status, str(said.get("reason") or ""), message[:1000], _pause_s(headers.get("retry-after"))
    )


def _pause_s(text: str | None) -> float:
    try:
        return max(0.0, float(text)) if text else 0.0
    except ValueError:
        return 0.0

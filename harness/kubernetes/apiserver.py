"""An API server of the tests' own, over TLS, with the faults that real ones have.

It is honest about resource versions, watches with bookmarks, 409, 410, 429, finalizers, owners,
eviction, quotas and rights. Every body is validated against the official OpenAPI definitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import email.utils
import json
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from harness.kubernetes import schema
from harness.kubernetes.store import CLUSTER_WIDE, KINDS, ApiError, Object, Store

BOOKMARK_S = 0.5
LIST_PARAMETERS = {
    "labelSelector", "fieldSelector", "limit", "continue", "resourceVersion",
    "resourceVersionMatch", "watch", "allowWatchBookmarks", "timeoutSeconds", "sendInitialEvents",
}  # fmt: skip
OTHER_PARAMETERS = {
    "dryRun", "fieldManager", "fieldValidation", "gracePeriodSeconds", "propagationPolicy", "force",
}  # fmt: skip


class Asked(NamedTuple):
    """A request, in the words of RBAC."""

    user: str
    verb: str
    resource: str  # with its subresource: pods/eviction
    namespace: str
    name: str


class Rule(NamedTuple):
    """What a user may do. Empty `names`: to every object. Empty `namespace`: everywhere."""

    verbs: tuple[str, ...]
    resources: tuple[str, ...]
    names: tuple[str, ...] = ()
    namespace: str = ""

    def allows(self, asked: Asked) -> bool:
        return (
            ("*" in self.verbs or asked.verb in self.verbs)
            and ("*" in self.resources or asked.resource in self.resources)
            and (not self.names or asked.name in self.names)
            and (not self.namespace or asked.namespace == self.namespace)
        )


class Reply(NamedTuple):
    code: int
    body: Object
    headers: dict[str, str] = {}


class ApiServer:
    """Runs on one loop. `users`: who has which token. `rules`: what each of them may do."""

    def __init__(self, tls: ssl.SSLContext, version: str = "1.29") -> None:
        self.store = Store()
        self.users: dict[str, str] = {}
        self.rules: dict[str, list[Rule]] = {}
        self.asked: list[Asked] = []
        self.invalid: list[str] = []  # bodies that the definitions do not allow
        self.version = version
        # Faults: each is asked about every request, and may answer in the server's place.
        self.faults: list[Callable[[Asked], Reply | None]] = []
        self.pages: dict[str, tuple[int, list[Object]]] = {}
        self.watches = 0
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._port = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self._port, ssl=self._tls, limit=2**20
        )
        self._port = int(self._server.sockets[0].getsockname()[1])
        return self._port

    async def stop(self) -> None:
        """It no longer listens, and every connection is cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection in the middle of whatever it carries."""
        for writer in list(self._open):
            writer.transport.abort()

    # -- HTTP ------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, ssl.SSLError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(writer)
            self._tasks.discard(task)
            with contextlib.suppress(Exception):
                writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        parts = urlsplit(target)
        params = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        try:
            asked = self._understood(method, unquote(parts.path), params, headers)
            reply = self._refused(asked) or self._fault(asked)
            if reply is None and asked.verb == "watch":
                await self._watch(writer, asked, params)
                return False
            if reply is None:
                sent = json.loads(body) if body else None
                reply = Reply(200, self._answer(asked, params, sent, headers))
        except ApiError as error:
            reply = Reply(error.code, error.status(), error.headers)
        await _send(writer, reply)
        return True

    def _understood(
        self, method: str, path: str, params: dict[str, str], headers: dict[str, str]
    ) -> Asked:
        kind, _, token = headers.get("authorization", "").partition(" ")
        user = self.users.get(token if kind == "Bearer" else "", "")
        if not user:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        match path.strip("/").split("/"):
            case ["api", "v1", "namespaces", namespace, resource, *rest] if (
                rest or resource in KINDS
            ):
                name, part = (*rest, "", "")[:2]
            case ["api", "v1", resource, *rest]:
                namespace, (name, part) = "", (*rest, "", "")[:2]
            case _:
                raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if resource not in KINDS:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        unknown = params.keys() - (OTHER_PARAMETERS if name else LIST_PARAMETERS | OTHER_PARAMETERS)
        if unknown:
            raise ApiError(400, "BadRequest", f"unknown parameters: {sorted(unknown)}")
        verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        verb = verbs.get(method) or ("get" if name else "list")
        if verb == "list" and params.get("watch") in ("true", "1"):
            verb = "watch"
        asked = Asked(user, verb, f"{resource}/{part}" if part else resource, namespace, name)
        self.asked.append(asked)
        return asked

    def _refused(self, asked: Asked) -> Reply | None:
        if any(rule.allows(asked) for rule in self.rules.get(asked.user, ())):
            return None
        where = (
            f'in the namespace "{asked.namespace}"' if asked.namespace else "at the cluster scope"
        )
        name = f' "{asked.name}"' if asked.name else ""
        text = (
            f'{asked.resource}{name} is forbidden: User "{asked.user}" cannot {asked.verb} '
            f'resource "{asked.resource}" in API group "" {where}'
        )
        return Reply(403, ApiError(403, "Forbidden", text).status())

    def _fault(self, asked: Asked) -> Reply | None:
        for fault in self.faults:
            reply = fault(asked)
            if reply is not None:
                return reply
        return None

    # -- verbs -----------------------------------------------------------------------------

    def _answer(
        self, asked: Asked, params: dict[str, str], body: Object | None, headers: dict[str, str]
    ) -> Object:
        resource, _, part = asked.resource.partition("/")
        place = (resource, asked.namespace, asked.name)
        if body is not None and "patch" not in headers.get("content-type", ""):
            self._validate(body)
        match asked.verb, part:
            case "get", "":
                return self.store.get(*place)
            case "list", "":
                return self._list(resource, asked.namespace, params)
            case "create", "":
                return self.store.create(resource, asked.namespace, body or {})
            case "create", "binding":
                self.store.bind(asked.namespace, asked.name, (body or {})["target"]["name"])
                return _success()
            case "create", "eviction":
                options = (body or {}).get("deleteOptions") or {}
                self.store.evict(asked.namespace, asked.name, options)
                return _success()
            case "update", _:
                return self.store.replace(*place, body or {}, part)
            case "patch", _:
                return self.store.patch(*place, body or {}, part)
            case "delete", "":
                return self.store.delete(*place, body or {})
        raise ApiError(405, "MethodNotAllowed", f"{asked.verb} of {asked.resource}")

    def _validate(self, body: Object) -> None:
        wrong = schema.problems(body, self.version)
        if wrong:
            self.invalid += wrong
            name = body.get("metadata", {}).get("name", "")
            raise ApiError(422, "Invalid", f'{body.get("kind")} "{name}" is invalid: {wrong[0]}')

    def _list(self, resource: str, namespace: str, params: dict[str, str]) -> Object:
        """Pages show the objects as they were when the first was asked for."""
        if "continue" in params:
            version, found = self.pages.pop(params["continue"], (-1, []))
            if version < self.store.floor:
                raise ApiError(410, "Expired", "The provided continue parameter is too old")
        else:
            version = self.store.version
            matches = chosen(params)
            found = [one for one in self.store.all(resource, namespace) if matches(one)]
        limit = int(params.get("limit", "0")) or len(found)
        meta: Object = {"resourceVersion": str(version)}
        if len(found) > limit:
            meta["continue"] = f"page-{version}-{len(self.pages)}-{len(found)}"
            self.pages[meta["continue"]] = (version, found[limit:])
        api, kind = KINDS[resource]
        return {
            "apiVersion": api,
            "kind": f"{kind}List",
            "metadata": meta,
            "items": copy.deepcopy(found[:limit]),
        }

    async def _watch(
        self, writer: asyncio.StreamWriter, asked: Asked, params: dict[str, str]
    ) -> None:
        resource, store = asked.resource, self.store
        after = int(params.get("resourceVersion") or store.version)
        until = asyncio.get_running_loop().time() + float(params.get("timeoutSeconds", 1800))
        matches = chosen(params)
        self.watches += 1
        await _begin(writer)
        while (left := until - asyncio.get_running_loop().time()) > 0:
            if after < store.floor:
                gone = ApiError(410, "Expired", f"too old resource version: {after}")
                await _chunk(writer, {"type": "ERROR", "object": gone.status()})
                break
            for change in store.history:
                if change.version > after and change.resource == resource:
                    event = seen(change, asked.namespace, matches)
                    if event is not None:
                        await _chunk(writer, event)
            after = max(after, store.version)
            news = store.news
            try:
                await asyncio.wait_for(news.wait(), min(left, BOOKMARK_S))
            except TimeoutError:
                # A place that is ahead of the server, which was restored: it waits in silence.
                known = after <= store.version
                if known and params.get("allowWatchBookmarks") == "true":
                    await _chunk(writer, _bookmark(resource, after))
        await _chunk(writer, None)


def seen(change: Any, namespace: str, matches: Callable[[Object], bool]) -> Object | None:
    """A change as a watch with this selector sees it."""

    def shown(found: Object | None) -> bool:
        return (
            found is not None
            and (not namespace or found["metadata"].get("namespace") == namespace)
            and matches(found)
        )

    before, after = shown(change.before), shown(change.after)
    if after:
        return {"type": "MODIFIED" if before else "ADDED", "object": change.after}
    if before:
        gone = copy.deepcopy(change.before)
        gone["metadata"]["resourceVersion"] = str(change.version)
        return {"type": "DELETED", "object": gone}
    return None


def chosen(params: dict[str, str]) -> Callable[[Object], bool]:
    """What labelSelector and fieldSelector choose."""
    labels = [one.partition("=") for one in params.get("labelSelector", "").split(",") if one]
    fields = [one.partition("=") for one in params.get("fieldSelector", "").split(",") if one]

    def matches(found: Object) -> bool:
        own = found["metadata"].get("labels") or {}
        return all(own.get(key) == value for key, _, value in labels) and all(
            _field(found, key) == value for key, _, value in fields
        )

    return matches


def _field(found: Any, path: str) -> str:
    for part in path.split("."):
        found = (found or {}).get(part)
    return str(found or "")


def _success() -> Object:
    return {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Success", "code": 201}


def _bookmark(resource: str, version: int) -> Object:
    api, kind = KINDS[resource]
    meta = {"resourceVersion": str(version), "creationTimestamp": None}
    return {"type": "BOOKMARK", "object": {"apiVersion": api, "kind": kind, "metadata": meta}}


async def _send(writer: asyncio.StreamWriter, reply: Reply) -> None:
    body = json.dumps(reply.body).encode()
    lines = [
        f"HTTP/1.1 {reply.code} X",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"date: {email.utils.formatdate(usegmt=True)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in reply.headers.items()),
    ]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    await writer.drain()


async def _begin(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    await writer.drain()


async def _chunk(writer: asyncio.StreamWriter, event: Object | None) -> None:
    data = json.dumps(event).encode() + b"\n" if event is not None else b""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


assert set(CLUSTER_WIDE) <= set(KINDS)

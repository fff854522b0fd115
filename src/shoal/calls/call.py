"""What a call is: a method of the client, and beside it what its signature cannot say.

The signature holds what goes in and comes out, the docstring what it is for, and the decorator how
it travels, who may send it and which head answers. No web framework is known here (ADR 94).
"""

from __future__ import annotations

import enum
import functools
import importlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_type_hints
from urllib.parse import quote, urlencode

import msgspec

from shoal.model.finding import JobFilter

P = ParamSpec("P")
Answer = TypeVar("Answer")

WEBSOCKET = "WEBSOCKET"  # in place of a method
OCTETS = {"Content-Type": "application/octet-stream"}


class Needs(enum.Enum):
    """Who may send a call."""

    OPEN = "anyone"  # before a sign-in
    SIGNED_IN = "anyone signed in"  # about the sender alone
    READ = "viewer"  # a role in a tenant; the answer shows that tenant alone
    READ_ALL = "viewer of all tenants"
    WRITE = "member"  # changes that tenant alone
    ADMIN = "admin"
    NODE = "node"  # a join token or a node's key, which open nothing else


class Head(enum.Enum):
    """Which of several heads answers. While none leads, others answer what changes nothing."""

    ANY = "any"  # each for itself
    LOG = "any that is up to date"  # the log alone decides
    ENDED = "any, once the job has ended"
    LEADER = "the leader"
    ONLY_LEADER = "only the leader"  # something changes in its memory, though it is read


class Request(NamedTuple):
    """`path` with its query."""

    path: str
    body: bytes | None = None
    headers: dict[str, str] | None = None


class Call:
    def __init__(
        self,
        function: Callable[..., Any],
        method: str,
        path: str,
        may: Needs,
        head: Head,
        body: type[msgspec.Struct] | str,
        status: int,
        renamed: Mapping[str, str],
        headed: tuple[str, ...],
        late: str,
        *,
        streams: bool,
        once: bool,
        neighbor: bool,
    ) -> None:
        self.function = function
        self.method, self.path, self.status = method, path, status
        self.may, self.head, self.streams = may, head, streams
        self.neighbor = neighbor
        self._body, self._renamed, self._once = body, renamed, once
        self.headed, self._late = headed, late

    def __repr__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def text(self) -> str:
        return " ".join((self.function.__doc__ or "").split())

    @functools.cached_property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The path's segments: their text, or the names of parameters."""
        found = []
        for segment in self.path.split("/")[1:]:
            name = segment[1:-1].partition(":")[0] if segment.startswith("{") else ""
            found.append(("", name) if name else (segment, ""))
        return tuple(found)

    @functools.cached_property
    def path_names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.parts if name)

    @functools.cached_property
    def types(self) -> dict[str, Any]:
        late = vars(importlib.import_module(self._late)) if self._late else None
        return get_type_hints(self.function, localns=late)

    @functools.cached_property
    def answer(self) -> Any:
        return self.types["return"]

    @functools.cached_property
    def body(self) -> Any:
        """The type of what is sent; None: nothing."""
        if isinstance(self._body, str):
            return self.types[self._body] if self._body else None
        return self._body

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        code = self.function.__code__
        return self._wired(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])

    def _wired(self, names: Iterable[str]) -> tuple[str, ...]:
        """As the path and the query name them."""
        return tuple(self._renamed.get(name, name) for name in names)

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        code, defaults = self.function.__code__, self.function.__defaults__ or ()
        positional = self._names[: code.co_argcount - 1]
        last = positional[len(positional) - len(defaults) :]
        keyed = self.function.__kwdefaults__ or {}
        return dict(zip((*last, *self._wired(keyed)), (*defaults, *keyed.values()), strict=True))

    @functools.cached_property
    def query(self) -> dict[str, Any]:
        """The parameters of the query with their defaults, without those of a `JobFilter`; a
        parameter that must be given has `...`."""
        if self._body and not isinstance(self._body, str):
            return {}
        names = [name for name in self._names if name not in (*self.path_names, self._body)]
        defaults = {name: self._defaults.get(name, ...) for name in names}
        return {k: v for k, v in defaults.items() if not isinstance(v, JobFilter)}

    def request(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Request:
        """Arguments at their defaults are not sent: an older head may not know them."""
        self.function(None, *arguments, **keywords)  # Python's own error, if they do not fit
        values = dict(zip(self._names, arguments, strict=False))
        values |= zip(self._wired(keywords), keywords.values(), strict=True)
        if self._once and not values.get("key"):
            values["key"] = secrets.token_hex(16)
        whole = values.pop(self._body) if isinstance(self._body, str) and self._body else None
        path = ""
        for text, name in self.parts:
            if name:
                value = values.pop(name) if name in values else getattr(whole, name)
                text = quote(str(value), safe="")
            path += f"/{text}"
        defaults = self._defaults
        values = {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}
        if isinstance(self._body, str):
            query = urlencode(_query(values), doseq=True)
            path = f"{path}?{query}" if query else path
            if isinstance(whole, bytes):
                return Request(path, whole, OCTETS)
            whole = _given(whole) if isinstance(whole, list) else whole
            return Request(path, msgspec.json.encode(whole) if self._body else None)
        fields = {name: _given(value) for name, value in values.items()}
        return Request(path, msgspec.json.encode(fields, enc_hook=_plain))


def _query(values: dict[str, Any]) -> dict[str, Any]:
    query: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, JobFilter):
            query |= filter_query(value)
        elif isinstance(value, bool):
            query[name] = str(value).lower()
        else:
            query[name] = value.value if isinstance(value, enum.Enum) else value
    return query


def filter_query(wanted: JobFilter) -> dict[str, Any]:
    query = {
        "user": wanted.user,
        "tenant": wanted.tenant,
        "name": wanted.name,
        "state": ",".join(wanted.states),
        "label": list(wanted.labels),
        "since_ms": wanted.since_ms,
        "on_node": wanted.node,
        "array": wanted.array,
        "q": wanted.text,
        "service": wanted.service,
        "until_ms": wanted.until_ms,
    }
    return {name: value for name, value in query.items() if value}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise NotImplementedError


class Calls:
    """The base of the classes in which calls are declared."""

    def _send(self, call: Call, request: Request) -> Any:
        raise NotImplementedError  # the client's own


def call(
    method: str,
    path: str,
    may: Needs,
    *,
    head: Head = Head.LEADER,
    body: type[msgspec.Struct] | str = "",
    status: int = 200,
    streams: bool = False,
    once: bool = False,
    renamed: Mapping[str, str] | None = None,
    headed: tuple[str, ...] = (),
    late: str = "",
    neighbor: bool = False,
) -> Callable[[Callable[P, Answer]], Callable[P, Answer]]:
    """`body` names the parameter that is the body, or is a struct whose fields are the parameters.
    `once`: an empty `key` is replaced by a random one, so that repeating the call is safe.
    `renamed`: parameters that have another name in the path or the query. `headed`: parameters of
    the query that the client does not offer, because the answer to them is in headers. `late`: the
    module of its types, if only a client that makes the call should load it. `neighbor`: a token
    for a neighbor is good for it."""

    def declare(function: Callable[P, Answer]) -> Callable[P, Answer]:
        declared = Call(
            function,
            method,
            path,
            may,
            head,
            body,
            status,
            renamed or {},
            headed,
            late,
            streams=streams,
            once=once,
            neighbor=neighbor,
        )

        @functools.wraps(function)
        def send(self: Calls, *arguments: Any, **keywords: Any) -> Any:
            return self._send(declared, declared.request(arguments, keywords))

        send.call = declared  # type: ignore[attr-defined]
        return send  # type: ignore[return-value]

    return declare


def declared(method: Callable[..., Any]) -> Call:
    """The call of a method that was declared."""
    found: Call = method.call  # type: ignore[attr-defined]
    return found


def declared_in(kind: type) -> Iterable[Call]:
    return (value.call for value in vars(kind).values() if hasattr(value, "call"))


# What was asked for, without what is so by default: an older head may not know those fields.


def given(spec: msgspec.Struct) -> dict[str, Any]:
    """The fields of a struct that differ from their defaults."""
    found = {}
    for field in _fields(type(spec)):
        value = getattr(spec, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if value != default:
            found[field.encode_name] = value
    return found


def _given(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_given(one) for one in value]
    return given(value) if isinstance(value, msgspec.Struct) else value


@cache  # msgspec evaluates all annotations each time that it is asked, which takes milliseconds
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)

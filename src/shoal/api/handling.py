"""How a handler says which call it answers: path, method, status and access come from the call, its
parameters from its signature; and the threads in which it reads the past."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar, get_origin, get_type_hints

import msgspec

from shoal.api.http import JSON, Connection, Response, State
from shoal.api.problems import Refusal, invalid
from shoal.calls.call import Call, declared

SCHEMA = "/schema"
BODY_BYTES_MAX = 4 * 1024 * 1024


class Handler:
    """A function that answers a call. `call` is None for what the API itself answers. `body_max`
    is None for a body that goes to the disk as it comes. Signatures are read when they are needed
    first: most are not needed soon after a start."""

    def __init__(
        self,
        call: Call | None,
        fn: Callable[..., Any],
        body_max: int | None = BODY_BYTES_MAX,
        media_type: str = JSON,
    ) -> None:
        self.call, self.fn, self.body_max, self.media_type = call, fn, body_max, media_type
        self.owner: type | None = None
        self.verb = fn.__qualname__.lower()  # as `jobs.cancel`: the group and the function
        self.awaits = asyncio.iscoroutinefunction(fn)
        self.streams = call is not None and call.streams
        self.status = call.status if call is not None else 200

    def __set_name__(self, owner: type, _: str) -> None:
        self.owner = owner

    @cached_property
    def hints(self) -> dict[str, Any]:
        return get_type_hints(self.fn, include_extras=True)

    @cached_property
    def decoder(self) -> msgspec.json.Decoder[Any] | None:
        """Of the body. None: the handler takes none, or reads it itself."""
        kind = self.hints.get("data")
        return msgspec.json.Decoder(kind, strict=False) if kind is not None else None

    def params(self, given: frozenset[str]) -> Params:
        """Without those that are `given` otherwise."""
        return Params(self.fn, given, self.call.path_names if self.call is not None else ())


def handles(
    method: Callable[..., Any], *, body_max: int | None = BODY_BYTES_MAX, media_type: str = JSON
) -> Callable[[Callable[..., Any]], Handler]:
    """`method` is a call as the client declares it."""
    call = declared(method)
    return lambda fn: Handler(call, fn, body_max, media_type)


def is_schema(path: str) -> bool:
    """The document that describes the calls."""
    return path == SCHEMA or path.startswith(f"{SCHEMA}/")


# Parameters in the path and the query, as a function's signature declares them.


class Params:
    def __init__(
        self,
        fn: Callable[..., Any],
        given: frozenset[str] = frozenset(),
        path_names: tuple[str, ...] = (),
    ) -> None:
        hints = get_type_hints(fn, include_extras=True)
        found = inspect.signature(fn).parameters.values()
        self.types = {
            one.name: (hints[one.name], one.default)
            for one in found
            if one.name not in given and hints.get(one.name) not in (None, State)
        }
        self._lists = {name for name, (kind, _) in self.types.items() if _is_list(kind)}
        self._required = [
            name
            for name, (_, default) in self.types.items()
            if default is inspect.Parameter.empty and name not in path_names
        ]
        self._numbers = [name for name in path_names if self.types[name][0] is int]
        self._plain = {name for name, (kind, _) in self.types.items() if kind is str}
        fields = [
            (name, kind, *(() if default is inspect.Parameter.empty else (default,)))
            for name, (kind, default) in self.types.items()
        ]
        self._model = msgspec.defstruct(fn.__name__, fields, kw_only=True)

    def read(self, connection: Connection, path: dict[str, str]) -> dict[str, Any]:
        """By their names, without those that are left out."""
        if not connection.query and self._plain.issuperset(path) and not self._required:
            return path
        values: dict[str, Any] = dict(path)
        for name, text in connection.query:
            if name in self._lists:
                values.setdefault(name, []).append(text)
            elif name in self.types and name not in path:
                values[name] = text
        for name in self._numbers:
            try:
                values[name] = int(values[name])
            except ValueError:
                raise Refusal(404, "Not Found") from None
        for name in self._required:
            if name not in values:
                message = f"Missing required query parameter {name!r} for path {connection.path}"
                raise Refusal(400, message)
        ordered = {name: values[name] for name in self.types if name in values}
        try:
            made = msgspec.convert(ordered, self._model, strict=False)
        except msgspec.ValidationError as error:
            raise invalid(error) from None
        return {name: getattr(made, name) for name in ordered}


def _is_list(kind: Any) -> bool:
    parts = (kind, *getattr(kind, "__args__", ()))
    return any(get_origin(part) is list for part in parts)


class Asked:
    """A value that is made of parameters of the query, for several handlers."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    @cached_property
    def params(self) -> Params:
        return Params(self._fn)

    def __call__(self, connection: Connection) -> Any:
        return self._fn(**self.params.read(connection, {}))


# Threads that read the past, so that the loop never waits for a long list: one reads long lists
# and encodes them as JSON, one after the other; short answers have their own threads. The loop only
# sends the bytes.


Result = TypeVar("Result")

LONG_ROWS = 500  # a longer list counts as long
ROWS_AT_ONCE = 100  # live jobs per piece; then the loop gets a turn

_short = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reading")
_long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reading-long")
_encode = msgspec.json.Encoder().encode


async def aside(work: Callable[[], Result], rows: int = 0) -> Result:
    """The work must not touch what belongs to the loop, above all the state."""
    pool = _long if rows > LONG_ROWS else _short
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def json_list(parts: list[bytes]) -> bytes:
    return b"[" + b",".join(part[1:-1] for part in parts if len(part) > len(b"[]")) + b"]"


def respond(body: bytes, headers: dict[str, str] | None = None) -> Response[Any]:
    return Response(body, headers=headers)


def encoded(value: object) -> bytes:
    return _encode(value)

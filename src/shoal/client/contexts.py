"""The clusters that a user knows on other machines, and which cluster a command uses.

They are in one file of the user's configuration folder, with the tokens, so nobody else may read
it. The name `local` stands for the home on this machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.client.transport import Endpoint, ShoalError, at
from shoal.machine.files import lock, read_own, require_own, write_private

LOCAL = "local"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
CONTEXTS_MAX = 1_000
LOCK_S = 10.0
REMEMBER_S = 0.1


class Context(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An empty token: logged out. An empty certificate: the system decides whom to trust. Of a
    cluster with several heads, `urls` are those that the user named after the first, `heads` those
    that the cluster names itself, and `last` answered last."""

    url: str
    token: str = ""
    certificate: str = ""
    urls: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    last: str = ""

    def __repr__(self) -> str:
        return f"Context({self.url})"  # a traceback must not show the token


class Contexts(msgspec.Struct):
    current: str = ""
    contexts: dict[str, Context] = {}

    def __repr__(self) -> str:
        return f"Contexts({self.current}, {list(self.contexts)})"


class Chosen(NamedTuple):
    """The name of a context, and why it is the one."""

    name: str
    why: str

    @property
    def is_local(self) -> bool:
        return self.name == LOCAL


def choose(context: str, home: str) -> Chosen:
    """The cluster of a command without --home and --context, from what SHOAL_CONTEXT and SHOAL_HOME
    name, if anything."""
    if context:
        return Chosen(context, "SHOAL_CONTEXT names it")
    if home:
        return Chosen(LOCAL, "SHOAL_HOME names its home")
    current = load().current
    if current:
        return Chosen(current, "shoal login or shoal context use chose it")
    return Chosen(LOCAL, "no other is chosen")


def endpoint(name: str) -> Endpoint:
    """ShoalError if there is no such context, or nobody is logged in to it."""
    context = find(name)
    if not context.token:
        raise ShoalError(f"you are logged out of {name}; log in with: shoal login --context {name}")
    return reached(context, name)


def reached(context: Context, name: str = "") -> Endpoint:
    first = at(context.last or context.url, context.token, context.certificate, name)
    urls = tuple(one for one in (context.url, *context.urls) if one != first.url)
    return msgspec.structs.replace(first, urls=urls, heads=context.heads)


def remember(name: str, **changes: Any) -> None:
    """What a cluster says of its heads, for the next command. Nothing depends on it, so a file that
    cannot be written now is left as it is."""
    if not name:
        return
    with contextlib.suppress(ShoalError, OSError), changing(REMEMBER_S) as kept:
        known = kept.contexts.get(name)
        if known is not None:
            kept.contexts[name] = msgspec.structs.replace(known, **changes)


def find(name: str) -> Context:
    known = load().contexts
    if name not in known:
        names = ", ".join([*list(known)[:8], LOCAL])
        advice = f"choose one of {names}, or add it with: shoal login https://HEAD:PORT"
        raise ShoalError(f"there is no context {name[:64]!r}; {advice}")
    return known[name]


def folder() -> Path:
    given = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    return (given if given.is_absolute() else Path.home() / ".config") / "shoal"


def load() -> Contexts:
    path = _path()
    try:
        require_own(path.parent)
        if stat.S_IMODE(path.lstat().st_mode) & 0o077:
            advice = f"close it with: chmod 600 {path}; if others use this machine, get new tokens"
            raise ShoalError(f"{path} holds tokens, and other users may read it; {advice}")
        return msgspec.json.decode(read_own(path), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise ShoalError(f"cannot use {error.filename or path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"{path} is damaged ({error}); repair it, or remove it and log in again"
        raise ShoalError(message) from None


@contextmanager
def changing(lock_s: float = LOCK_S) -> Iterator[Contexts]:
    """Change the contexts; what is left at the end is stored. Others who change them wait."""
    path = _path()
    require_own(path.parent)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(path.parent)
    guard = path.with_name("contexts.lock")
    deadline = time.monotonic() + lock_s
    while (handle := lock(guard)) is None:
        if time.monotonic() > deadline:
            raise ShoalError(f"another command is changing {path}; try again")
    try:
        contexts = load()
        yield contexts
        if len(contexts.contexts) > CONTEXTS_MAX:
            raise ShoalError(f"there are more than {CONTEXTS_MAX} contexts; remove some")
        write_private(path, msgspec.json.format(msgspec.json.encode(contexts)) + b"\n")
    finally:
        os.close(handle)


def checked_name(name: str) -> str:
    if name == LOCAL:
        raise ShoalError(f"{LOCAL} is the home on this machine; choose another name", "--context")
    if not NAME.fullmatch(name):
        message = f"{name[:64]!r} is not a name; use letters, digits, dots and dashes"
        raise ShoalError(message, "--context")
    return name


def _path() -> Path:
    return folder() / "contexts.json"

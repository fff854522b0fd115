"""How a machine joins: it shows the join token to a head that it can trust, gets a key of its own,
and writes the node's folder, from which the starter runs the agent.

A join token is `shoal_ID_SECRET.FINGERPRINT`. What follows the dot is the fingerprint of the
certificate that the head, or a proxy before it, must show or be signed by. Without it the system
decides whom to trust. Nothing is sent to a head that is not trusted.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from shoal.client import transport
from shoal.client.transport import Endpoint, ShoalError, WrongCertificate
from shoal.engines.agentlink import last_incarnation, write_spec
from shoal.link.wire import PROTOCOL, LinkFile
from shoal.machine.files import LEAVING, LINK_FILE, require_own, tighten, write_private
from shoal.model.joining import Joined, Joining
from shoal.model.node import NodeSpec
from shoal.model.views import Problem
from shoal.ports import EngineError

ANSWER_S_MAX = 30.0
ANSWER_BYTES_MAX = 1024 * 1024
PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 10.0
DISK_MB_MIN = 256  # for the agent's own files; jobs need more
TOKEN_PATTERN = r"(shoal_[a-z0-9]{8,16}_[A-Za-z0-9_-]{16,200})(?:\.(.{0,100}))?"
ADVICE = "copy the file join-token of the head's home"


class JoinToken(NamedTuple):
    secret: str
    fingerprint: str  # empty: the system decides whom to trust


def prepare(home: Path, url: str, token: str, spec: NodeSpec, patience_s: float = 0.0) -> Path:
    """The folder of a node that has joined. EngineError or ShoalError, in one line, if it cannot.
    For `patience_s` a head that does not answer is tried again; a refusal is final."""
    shown, directory = read_token(token), home / "nodes" / spec.id
    require_own(home)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(home)  # somebody may have made it meanwhile
    tighten(home)
    for folder in (home / "nodes", directory):
        folder.mkdir(mode=0o700, exist_ok=True)
    lack = lack_of_disk(home)
    if lack:
        raise EngineError(lack)
    deadline, pause_s = time.monotonic() + patience_s, PAUSE_FIRST_S
    while True:
        try:
            joined, endpoint = _ask(at(url), shown, spec, directory)
            break
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline:
                raise EngineError(silence(url, error)) from None
        time.sleep(random.uniform(pause_s / 2, pause_s))
        pause_s = min(PAUSE_MAX_S, pause_s * 2)
    urls = tuple(dict.fromkeys((endpoint.url, *joined.urls)))
    file = LinkFile(urls=urls, key=joined.key, certificate=endpoint.certificate)
    labels = {**joined.labels, **spec.labels}  # ours were given by people
    write_spec(directory, msgspec.structs.replace(spec, labels=labels))
    if joined.incarnation > last_incarnation(directory):
        # Another machine was this node; ours counts on, even if its clock is behind.
        write_private(directory / "incarnation", str(joined.incarnation).encode())
    write_private(directory / LINK_FILE, msgspec.json.encode(file))
    (directory / LEAVING).unlink(missing_ok=True)  # of a `shoal leave` that was interrupted
    return directory


def at(text: str) -> Endpoint:
    """`https://head:7700` or `head:7700`; plain HTTP only within one machine."""
    text = text.strip()
    bare = "://" not in text
    endpoint = transport.at(f"https://{text}" if bare else text, "")
    if bare and is_local(endpoint.host):
        return transport.at(f"http://{text}", "")
    if not endpoint.secure and not is_local(endpoint.host):
        message = f"{endpoint.url} is not encrypted, so it works on the head's own machine alone"
        raise EngineError(f"{message}; use https://, and start the head with: shoal up --host")
    return endpoint


def is_local(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def read_token(text: str) -> JoinToken:
    match = re.fullmatch(TOKEN_PATTERN, text.strip())
    if match is None:
        raise EngineError(f"this is not a join token; {ADVICE}")
    try:
        pinned = transport.read_fingerprint(match[2]) if match[2] else ""
    except ValueError:
        message = "what follows the dot is not the fingerprint of a certificate"
        raise EngineError(f"the join token is damaged: {message}; {ADVICE}") from None
    return JoinToken(match[1], pinned)


def lack_of_disk(home: Path) -> str:
    """Why this machine has too little room for its files; empty if it has enough."""
    free_mb = shutil.disk_usage(home).free // 1_000_000
    if free_mb >= DISK_MB_MIN:
        return ""
    return f"only {free_mb} MB are free at {home}: {DISK_MB_MIN} are needed; name another --home"


def silence(url: str, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    advice = "is the head up, and does a firewall let this port through?"
    return f"no response from {url} ({reason}); {advice}"


def _ask(
    endpoint: Endpoint, token: JoinToken, spec: NodeSpec, directory: Path
) -> tuple[Joined, Endpoint]:
    if endpoint.secure:
        endpoint = _trusted(endpoint, token.fingerprint)
    asked = Joining(
        spec=spec,
        protocol=PROTOCOL,
        shoal=_own_version(),
        incarnation=last_incarnation(directory),
        key=_key_before(directory),
    )
    connection = transport.connection_to(endpoint, ANSWER_S_MAX)
    try:
        headers = {"Authorization": f"Bearer {token.secret}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/join", msgspec.json.encode(asked), headers)
        with connection.getresponse() as response:
            status, data = response.status, response.read(ANSWER_BYTES_MAX)
    except WrongCertificate as error:
        raise EngineError(_wrong_certificate(endpoint, error)) from None
    except transport.Unreachable as error:
        raise EngineError(str(error)) from None
    finally:
        connection.close()
    if status == 200:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(data, type=Joined), endpoint
    if status in (502, 503, 504):
        raise OSError(f"it answers with status {status}")
    try:
        problem = msgspec.json.decode(data, type=Problem)
    except msgspec.DecodeError:
        message = f"what answers at {endpoint.url} is not a Shoal that accepts machines"
        raise EngineError(f"{message} (status {status}); is it 0.4 or newer?") from None
    raise ShoalError(problem.message, problem.field, status)


def _trusted(endpoint: Endpoint, pinned: str) -> Endpoint:
    """The head, with the certificate that it shows and that the token names."""
    if not pinned:
        return endpoint
    try:
        shown = transport.presented(endpoint)
    except ConnectionResetError as error:
        raise OSError(f"{error.strerror}; does it speak TLS?") from None
    for certificate in (shown.anchor, shown.leaf):
        if transport.fingerprint(certificate) == pinned:
            return msgspec.structs.replace(endpoint, certificate=certificate)
    found = transport.fingerprint(shown.leaf)
    message = f"the certificate at {endpoint.url} is not the one of the join token"
    detail = f"expected {pinned}, found {found}"
    advice = f"{ADVICE} again; if it is the same, someone is in between, and got nothing"
    raise EngineError(f"{message} ({detail}); {advice}")


def _wrong_certificate(endpoint: Endpoint, error: WrongCertificate) -> str:
    what = error.message.partition("; ")[0]
    if " is for " in what:
        return f"{what}; use one of these, or on the head: shoal up --node-address {endpoint.host}"
    if "you logged in with" in what:
        what = what.replace("the one you logged in with", "the one of the join token")
        return f"{what}; {ADVICE} again, or name the certificate of a proxy there after the dot"
    if "does not trust" in what:
        return f"{what}; put the certificate's fingerprint after the join token, with a dot"
    return error.message


def _key_before(directory: Path) -> str:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory / LINK_FILE).read_bytes(), type=LinkFile).key
    return ""


def head_of(directory: Path) -> str:
    """Where the node of this folder dials; empty if it does not."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        file = msgspec.json.decode((directory / LINK_FILE).read_bytes(), type=LinkFile)
        return urlsplit(file.urls[0]).geturl() if file.urls else ""
    return ""


def _own_version() -> str:
    """For people; the protocol's number decides. A Shoal that runs from its source has none."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "source"

"""Before a machine joins: is there a head, does it accept our token, and do versions match?

Ray is asked in a process of its own (`python -m shoal.engines.ray.admission HOST:PORT`): it reads
its token once, when it is imported, and it may hang.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from shoal.engines.ray.messages import FACTS_KEY, Facts
from shoal.engines.ray.render import NAMESPACE, environment, without_ray
from shoal.ports import EngineError

CONNECT_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 40.0
PUBLISH_TIMEOUT_S = 20.0
PUBLISH_PAUSE_S = 0.5
DISK_MB_MIN = 512  # for Ray's own files and an agent's; jobs need more

# A head answers at once; Ray itself would wait most of a minute for an answer.
IMPATIENT = {"RAY_gcs_rpc_server_connect_timeout_s": "2", "RAY_py_gcs_connect_timeout_s": "8"}

WRONG_TOKEN = "wrong token"


class Asked(msgspec.Struct, frozen=True):
    """What the head answered: its facts, if it has any, or what went wrong."""

    facts: Facts | None = None
    trouble: str = ""


def resolve(host: str, port: int) -> str:
    """The head's numeric address, after something has answered there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EngineError(f"there is no host '{host}': {error.strerror or error}") from None
    address: str = str(found[0][4][0])
    try:
        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise EngineError(
            f"nobody answers at {host}:{port} ({error.strerror or error}); "
            "is the head up, and does a firewall let this port through?"
        ) from None
    return address


def ask(home: Path, address: str) -> Facts:
    """What the controller of the cluster at this address has published."""
    facts = ask_ray(home, address, PUBLISH_TIMEOUT_S)
    if facts is None:
        raise EngineError(
            f"a Ray is led at {address}, but no Shoal; start one there with: shoal up --engine ray"
        )
    return facts


def ask_ray(home: Path, address: str, patience_s: float) -> Facts | None:
    """The same for a Ray that may not run Shoal yet."""
    try:
        run = subprocess.run(
            [sys.executable, "-m", "shoal.engines.ray.admission", address, str(patience_s)],
            env={**without_ray(dict(os.environ)), **environment(home), **IMPATIENT},
            capture_output=True,
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
        asked = msgspec.json.decode(run.stdout, type=Asked)
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        asked = Asked(trouble="no answer in the language of Ray")
    if asked.trouble == WRONG_TOKEN:
        raise EngineError(f"the token is not the one of the cluster at {address}: {TOKEN_ADVICE}")
    if asked.trouble:
        raise EngineError(
            f"what answers at {address} is not the head of a cluster: {asked.trouble}"
        )
    return asked.facts


TOKEN_ADVICE = "copy ray/token of the head's home, and name the copy with --token-file"


def refusal(facts: Facts, versions: tuple[str, str, str], name: str, incarnation: int) -> str:
    """Why this machine cannot join as it is; empty if it can. `incarnation` is the last life of its
    own agent, by which the controller may know it."""
    shoal, ray, python = versions
    if facts.ray != ray:
        return f"Ray is {ray} here and {facts.ray} on the head: pip install ray=={facts.ray}"
    if facts.python.split(".")[:2] != python.split(".")[:2]:
        return f"Python is {python} here and {facts.python} on the head: use {facts.python} here"
    if facts.shoal != shoal:
        return f"Shoal is {shoal} here and {facts.shoal} on the head: install the same on both"
    known = facts.nodes.get(name)
    if known is not None and known.incarnation != incarnation:
        return f"the name {name} is taken by the machine at {known.address}: choose one by --name"
    return ""


def lack_of_disk(home: Path) -> str:
    """Why this machine has too little room for its files; empty if it has enough."""
    free_mb = shutil.disk_usage(home).free // 1_000_000
    if free_mb < DISK_MB_MIN:
        return (
            f"only {free_mb} MB are free at {home}: {DISK_MB_MIN} are needed; name another --home"
        )
    return ""


def main() -> None:
    """Ask the head, print what it said."""
    from importlib import import_module

    from ray.exceptions import AuthenticationError

    asked = Asked()
    try:
        client = import_module("ray._raylet").GcsClient(address=sys.argv[1])
        data = _published(client, float(sys.argv[2]))
        if data is not None:
            asked = Asked(facts=msgspec.json.decode(data, type=Facts))
    except AuthenticationError:
        asked = Asked(trouble=WRONG_TOKEN)
    except Exception as error:
        asked = Asked(trouble=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    sys.stdout.buffer.write(msgspec.json.encode(asked))
    sys.stdout.flush()
    os._exit(0)


def _published(client: Any, patience_s: float) -> bytes | None:
    """A head that has only just come up has yet to say what it is."""
    deadline = time.monotonic() + patience_s
    while True:
        data: bytes | None = client.internal_kv_get(
            FACTS_KEY, namespace=NAMESPACE.encode(), timeout=10
        )
        if data is not None or time.monotonic() > deadline:
            return data
        time.sleep(PUBLISH_PAUSE_S)


if __name__ == "__main__":
    main()

"""Connecting to the cluster, and the jobs, nodes and services that a user names."""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.cli.screen.show import note
from shoal.client import Client, ShoalError, Unreachable
from shoal.forms import units
from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.model.ids import JOB_ID_PATTERN, in_order, number_of

NOT_FOUND = 404
NAMES_MAX = 8
# A killed controller is back in a few seconds. After a minute it will not come back.
RETRY_S = 60.0
RETRY_PAUSE_S = 0.5

JOB_ID = re.compile(JOB_ID_PATTERN)
_SERVICE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NODE_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")

Answer = TypeVar("Answer")


def connect(home: Path) -> Client:
    """The cluster that the verb uses: a context, or the one in this home."""
    context = context_in_use()
    return Client(context=context) if context else Client.at_home(home)


def context_in_use() -> str:
    """As `settle` left it; empty: the cluster is the one in the home."""
    return os.environ.get("SHOAL_CONTEXT", "")


def job_id(text: str) -> str:
    """The id in what the user typed. Anything else never reaches the controller."""
    return _checked(text, JOB_ID, "JOB", "a job id like j7 or j7.3", "shoal ps -a")


def node_id(text: str) -> str:
    return _checked(text, _NODE_ID, "NODE", "a node id like n1", "shoal nodes")


def service_name(text: str) -> str:
    name = _checked(text, _SERVICE, "NAME", "a service", "shoal services")
    if JOB_ID.fullmatch(name):
        raise Failure(f"NAME: '{name}' is a job id; list services with: shoal services", USAGE)
    return name


def is_service(text: str) -> bool:
    """Whether it can only be the name of a service: no service is named like a job id."""
    cleaned = text.strip()
    return bool(_SERVICE.fullmatch(cleaned)) and not JOB_ID.fullmatch(cleaned)


def _checked(text: str, pattern: re.Pattern[str], name: str, kind: str, listing: str) -> str:
    cleaned = text.strip()
    if not pattern.fullmatch(cleaned):
        message = f"{name}: {units.quoted(cleaned)} is not {kind}; list them with: {listing}"
        raise Failure(message, USAGE)
    return cleaned


def on_job(client: Client, job: str, act: Callable[[Client], Answer]) -> Answer:
    """Act on a job; if it does not exist, the error names the newest job that the user can see."""
    try:
        return act(client)
    except ShoalError as error:
        if error.status != NOT_FOUND:
            raise
    newest = max((number_of(row.id) for row in client.jobs(finished=True)), default=0)
    hint = f"the newest is j{newest}" if newest else "no job was submitted yet"
    raise Failure(f"there is no job {job}; {hint}", REFUSED)


def on_service(client: Client, name: str, act: Callable[[Client], Answer]) -> Answer:
    """Act on a service; if it does not exist, the error names those that do."""
    try:
        return act(client)
    except ShoalError as error:
        if error.status != NOT_FOUND:
            raise
    known = [view.name for view in client.services()]
    raise _no_such("service", name, known, "shoal services")


def on_node(client: Client, node: str, act: Callable[[Client], Answer]) -> Answer:
    """Act on a node; if it does not exist, the error names those that do."""
    try:
        return act(client)
    except ShoalError as error:
        if error.status != NOT_FOUND:
            raise
        require_node(client, node)
        raise


def require_node(client: Client, node: str) -> None:
    known = [view.id for view in client.nodes()]
    if node not in known:
        raise _no_such("node", node, known, "shoal nodes")


def _no_such(kind: str, asked: str, known: list[str], listing: str) -> Failure:
    names = sorted(known)
    if not names:
        hint = f"there are no {kind}s yet"
    elif len(names) <= NAMES_MAX:
        hint = f"the {kind}s are {', '.join(names)}" if len(names) > 1 else f"there is {names[0]}"
    else:
        close = difflib.get_close_matches(asked, names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"see: {listing}"
    return Failure(f"there is no {kind} {asked}; {hint}", REFUSED)


class Retry:
    """Repeats a call while no controller answers, at the address that the next controller leaves
    in the home. Says so once."""

    def __init__(self, home: Path, retry_s: float = RETRY_S) -> None:
        self._home = home
        self._retry_s = retry_s
        self._client: Client | None = None

    def __call__(self, act: Callable[[Client], Answer]) -> Answer:
        deadline, waiting = time.monotonic() + self._retry_s, False
        while True:
            try:
                if self._client is None:
                    self._client = connect(self._home)
                answer = act(self._client)
            except Unreachable:
                self.close()
                if time.monotonic() >= deadline:
                    raise
                if not waiting:
                    note("the controller does not answer; retrying")
                    waiting = True
                time.sleep(RETRY_PAUSE_S)
                continue
            if waiting:
                note("the controller is back")
            return answer

    def __enter__(self) -> Retry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def replica_of(client: Client, service: str) -> str:
    """The job of the service's newest replica."""
    view = on_service(client, service, lambda c: c.service(service))
    if not view.replicas:
        raise Failure(f"{service} has no replica: {view.why or 'it is ' + view.state}")
    return max(view.replicas, key=lambda replica: in_order(replica.job)).job

"""Reaching the cluster: its client, and the jobs and nodes that a user names."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.cli.screen.show import note
from shoal.client import Client, ShoalError, Unreachable
from shoal.forms import units
from shoal.forms.failure import REFUSED, USAGE, Failure

NOT_FOUND = 404
NODES_NAMED_MAX = 8
# A controller that was killed is back in a few seconds; a minute later nobody brings it back.
STEADY_S = 60.0
STEADY_PAUSE_S = 0.5

_JOB_ID = re.compile(r"j[0-9]{1,15}")
_SERVICE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NODE_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")

Answer = TypeVar("Answer")


def connect(home: Path) -> Client:
    return Client.at_home(home)


def job_id(text: str) -> str:
    """The id in what the user typed. Nothing else reaches the controller."""
    cleaned = text.strip()
    if not _JOB_ID.fullmatch(cleaned):
        message = f"JOB: {units.quoted(cleaned)} is no job id like j7; list them with: shoal ps -a"
        raise Failure(message, USAGE)
    return cleaned


def is_service(text: str) -> bool:
    """Whether it can only be the name of a service: no such name looks like a job's id."""
    cleaned = text.strip()
    return bool(_SERVICE.fullmatch(cleaned)) and not _JOB_ID.fullmatch(cleaned)


def service_name(text: str) -> str:
    cleaned = text.strip()
    if not is_service(cleaned):
        message = f"NAME: {units.quoted(cleaned)} is no service; list them with: shoal services"
        raise Failure(message, USAGE)
    return cleaned


def node_id(text: str) -> str:
    cleaned = text.strip()
    if not _NODE_ID.fullmatch(cleaned):
        message = (
            f"NODE: {units.quoted(cleaned)} is no node id like n1; list them with: shoal nodes"
        )
        raise Failure(message, USAGE)
    return cleaned


def no_such_job(client: Client, asked: str) -> Failure:
    newest = client.status().submitted  # ids are given in order, from j1
    hint = f"the newest is j{newest}" if newest else "none was submitted yet"
    return Failure(f"there is no job {asked}; {hint}", REFUSED)


def no_such_service(client: Client, asked: str) -> Failure:
    known = sorted(view.name for view in client.services())
    if not known:
        hint = "none is served; start one with: shoal serve"
    elif len(known) <= NODES_NAMED_MAX:
        hint = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}"
    else:
        close = difflib.get_close_matches(asked, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "see: shoal services"
    return Failure(f"there is no service {asked}; {hint}", REFUSED)


def no_such_node(client: Client, asked: str) -> Failure:
    known = sorted(node.id for node in client.nodes())
    if len(known) <= NODES_NAMED_MAX:
        hint = f"the nodes are {', '.join(known)}"
    else:
        close = difflib.get_close_matches(asked, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "see: shoal nodes"
    return Failure(f"there is no node {asked}; {hint}", REFUSED)


class Steady:
    """Calls that outlive the controller: while none answers they try again, at the address that
    the next one leaves in the home, and say so once."""

    def __init__(self, home: Path, steady_s: float = STEADY_S) -> None:
        self._home = home
        self._steady_s = steady_s
        self._client: Client | None = None

    def __call__(self, act: Callable[[Client], Answer]) -> Answer:
        deadline, told = time.monotonic() + self._steady_s, False
        while True:
            try:
                if self._client is None:
                    self._client = connect(self._home)
                answer = act(self._client)
            except Unreachable:
                self.close()
                if time.monotonic() >= deadline:
                    raise
                if not told:
                    note("the controller does not answer; trying again ...")
                    told = True
                time.sleep(STEADY_PAUSE_S)
                continue
            if told:
                note("the controller is back")
            return answer

    def __enter__(self) -> Steady:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def found(client: Client, asked: str, act: Callable[[Client], Answer]) -> Answer:
    """Act on a job; one that is not there is answered with those that are."""
    try:
        return act(client)
    except ShoalError as error:
        if error.status == NOT_FOUND:
            raise no_such_job(client, asked) from None
        raise


def found_service(client: Client, asked: str, act: Callable[[Client], Answer]) -> Answer:
    """Act on a service; one that is not there is answered with those that are."""
    try:
        return act(client)
    except ShoalError as error:
        if error.status == NOT_FOUND:
            raise no_such_service(client, asked) from None
        raise


def replica_of(client: Client, asked: str) -> str:
    """The newest replica's job."""
    view = found_service(client, asked, lambda c: c.service(asked))
    if not view.replicas:
        raise Failure(f"{asked} has no replica: {view.why or 'it is ' + view.state}")
    return max(view.replicas, key=lambda replica: int(replica.job[1:])).job

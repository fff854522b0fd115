"""Connecting to the cluster, the jobs, nodes and services that a user names, and acting on each."""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shoal.calls.call import declared
from shoal.cli.errors import print_error
from shoal.cli.screen import show
from shoal.cli.screen.show import note
from shoal.client import Client, ShoalError, Unreachable
from shoal.forms import units
from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.model.finding import JobFilter
from shoal.model.ids import JOB_ID_PATTERN, in_order, number_of
from shoal.model.job import JOB_NAME_PATTERN
from shoal.model.views import Done, JobView

NOT_FOUND = 404
NAMES_MAX = 8
# A killed controller is back in a few seconds. After a minute it will not come back.
RETRY_S = 60.0
RETRY_PAUSE_S = 0.5

JOB_ID = re.compile(JOB_ID_PATTERN)
_NUMBERED = re.compile(r"j[0-9]+(\.[0-9]+)*")  # never a name, even if somebody named a job so
_SERVICE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NODE_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")

Answer = TypeVar("Answer")


def connect(home: Path) -> Client:
    """The cluster that the verb uses: a context, or the one in this home."""
    context = context_in_use()
    return Client(context=context) if context else Client.at_home(home)


def read_as(kind: type[Answer], method: Callable[..., Any], /, **keywords: Any) -> Answer:
    """A call of a client, its answer read as another type: a verb that shows only a part of it need
    not load the rest."""
    call = declared(method)
    path = call.request((), keywords).path
    client: Client = method.__self__  # type: ignore[attr-defined]
    return client.request(call.method, path, kind)


def context_in_use() -> str:
    """As `settle` left it; empty: the cluster is the one in the home."""
    return os.environ.get("SHOAL_CONTEXT", "")


def job_id(client: Client, text: str, *, acts: bool = False, what: str = "job") -> str:
    """The job that the user means by an id or a name; ids win. Of several with that name it is the
    newest, but a verb that `acts` on a job does not guess between two that have not ended.
    `what`: it could be."""
    word = spelled(client, text, acts=acts, what=what)
    return _checked(word, JOB_ID, "JOB", "a job id like j7 or j7.3, or a name", "shoal ps -a")


def job_ids(client: Client, texts: Iterable[str]) -> list[str]:
    """Each once, for a verb that acts on them."""
    return list(dict.fromkeys(job_id(client, text, acts=True) for text in texts))


def spelled(client: Client, text: str, *, acts: bool = False, what: str = "job") -> str:
    """The same with an id for the name: prep.3 may be j7.3, an element or member. Text that is
    neither stays as it is."""
    word = text.strip()
    if _NUMBERED.fullmatch(word) or not re.fullmatch(JOB_NAME_PATTERN, word):
        return word
    if (found := _by_name(client, word, acts=acts)) is not None:
        return found
    name, dot, number = word.rpartition(".")
    if dot and number.isdecimal() and (found := _by_name(client, name, acts=acts)) is not None:
        return f"{found}.{number}"
    rows = client.jobs(finished=True)
    names = sorted({row.name for row in rows if row.name})
    close = difflib.get_close_matches(word, names, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else "list them with: shoal ps -a"
    raise Failure(f"there is no {what} named {word}; {hint}", REFUSED)


def _by_name(client: Client, name: str, *, acts: bool) -> str | None:
    rows = client.jobs(finished=True, wanted=JobFilter(name=name))
    live = [row.id for row in rows if row.finished_ms is None]
    if acts and len(live) > 1:
        some = ", ".join(sorted(live, key=in_order)[:NAMES_MAX])
        raise Failure(f"{len(live)} jobs named {name} have not ended; give an id: {some}", USAGE)
    ids = sorted((live if acts and live else [row.id for row in rows]), key=in_order)
    if len(rows) > 1:
        note(f"{name} is {ids[-1]}, the newest of {len(rows)} jobs with this name")
    return ids[-1] if ids else None


def node_id(text: str) -> str:
    return _checked(text, _NODE_ID, "NODE", "a node id like n1", "shoal nodes")


def service_name(text: str) -> str:
    name = _checked(text, _SERVICE, "NAME", "a service", "shoal services")
    if JOB_ID.fullmatch(name):
        raise Failure(f"NAME: '{name}' is a job id; list services with: shoal services", USAGE)
    return name


def is_service(client: Client, text: str) -> bool:
    """Whether a verb for jobs and services means a service. Its name counts before a job's."""
    word = text.strip()
    if not _SERVICE.fullmatch(word) or _NUMBERED.fullmatch(word):
        return False
    return word in [view.name for view in client.services()]


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
    in the home. Says so once. Where no cluster was started, nothing will answer."""

    def __init__(self, home: Path, retry_s: float = RETRY_S) -> None:
        self._home = home
        self._retry_s = retry_s
        self._client: Client | None = None
        self._answered = False

    def __call__(self, act: Callable[[Client], Answer]) -> Answer:
        deadline, waiting = time.monotonic() + self._retry_s, False
        while True:
            try:
                if self._client is None:
                    self._client = connect(self._home)
                answer = act(self._client)
                self._answered = True
            except Unreachable:
                self.close()
                if time.monotonic() >= deadline or not (self._answered or _may_answer(self._home)):
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


def _may_answer(home: Path) -> bool:
    """Another machine's cluster may; here, somebody has to have started one."""
    if context_in_use():
        return True
    from shoal.control.home import Home
    from shoal.control.lifecycle import is_up

    return is_up(Home(home))


def replica_of(client: Client, service: str) -> str:
    """The job of the service's newest replica."""
    view = on_service(client, service, lambda c: c.service(service))
    if not view.replicas:
        raise Failure(f"{service} has no replica: {view.why or 'it is ' + view.state}")
    return max(view.replicas, key=lambda replica: in_order(replica.job)).job


def print_preview(client: Client, action: str, names: Iterable[str]) -> None:
    """What an action does, for somebody who watches; a script gets nothing more than before."""
    from shoal.model.preview import Action

    if not show.at_terminal():
        return
    try:
        lines = client.preview(Action(action), list(names)).lines
    except ShoalError:
        return  # the action itself says what is wrong
    for text in lines:
        note(text)


# One action on each of several jobs or nodes: all are tried, and each result is printed.


def each(ids: list[str], act: Callable[[str], Done], done_text: str, json: bool) -> int:
    """The exit code: one refusal does not stop the others, but the command fails."""
    done, refused = [], 0
    for one in ids:
        try:
            done.append(act(one))
        except Unreachable:
            raise
        except (ShoalError, Failure) as error:
            print_error(str(error))
            refused = REFUSED
            continue
        if not json:
            answer = done[-1]
            show.line(f"{answer.id}: {answer.note}" if answer.note else f"{answer.id} {done_text}")
    if json:
        show.as_json(done)
    return refused


# Which job, element or member a user means by `j7`, `j7.3` and `j7.3.1`.
#
# `j7.3` is element 3 if j7 is an array, and member 3 of j7 if it is not. `j7.3.1` is always member
# 1 of element 3. The API takes a job's id and a member apart, so this is decided here, once.


_NAME = re.compile(r"(j[0-9]{1,15})(?:\.([0-9]{1,9}))?(?:\.([0-9]{1,5}))?")
LISTING = "list them with: shoal ps -a"


class Named(NamedTuple):
    """`job` is an id for the API: j7, or j7.3 for an element. `member` None: none was named."""

    job: str
    member: int | None = None

    def __str__(self) -> str:
        return self.job if self.member is None else f"{self.job}.{self.member}"


def named(text: str, look: Callable[[str], JobView]) -> Named:
    """`look` fetches a job; it is called only where the text alone does not decide, for example
    with `lambda job: cluster.on_job(client, job, lambda c: c.job(job))`."""
    cleaned = text.strip()
    found = _NAME.fullmatch(cleaned)
    if found is None:
        kind = "a job, element or member like j7, j7.3 or j7.3.1"
        raise Failure(f"JOB: {units.quoted(cleaned)} is not {kind}; {LISTING}", USAGE)
    job, second, third = found.groups()
    if second is None:
        return Named(job)
    element = f"{job}.{int(second)}"
    if third is not None:
        return Named(element, int(third))
    if look(job).array is not None:
        return Named(element)
    return Named(job, int(second))

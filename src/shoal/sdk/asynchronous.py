"""`shoal.AsyncClient`: the calls of `shoal.Client` for asyncio, each in a thread.

There is one implementation, `Client`. The list below names its calls once more, for type checkers
and editors; `make generate` writes it. A cancelled task interrupts its call.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from shoal.client.connections import Interrupt, Interrupted
from shoal.client.transport import ShoalError
from shoal.model.views import JobView
from shoal.sdk.client import Client
from shoal.sdk.following import LOOK_S, deadline_of, ended, line_groups

P = ParamSpec("P")
Answer = TypeVar("Answer")

# Those that make clients, and the map: an Executor has futures, which can be awaited.
NOT_CALLS = frozenset(("at_home", "to", "lent", "map", "remote", "endpoint", "url"))
OWN = frozenset(("wait", "result", "results", "follow", "close"))  # written here
CALLS_MAX = 64  # at a time, as many as a token may have under way; more wait for their turn
# Calls that wait for something long. They take turns, so that a call to cancel a job that many
# wait for finds a thread.
WAITS_MAX = 32
TURN_S = 2.0


def _call(
    method: Callable[Concatenate[Client, P], Answer],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Answer]]:
    @functools.wraps(method)
    async def call(self: AsyncClient, /, *arguments: P.args, **keywords: P.kwargs) -> Answer:
        interrupt = Interrupt()
        lent = self._client.lent(interrupt=interrupt)
        return await self._in_thread(interrupt, method, lent, *arguments, **keywords)

    return call


_fetch = _call(Client.result)
_fetch_all = _call(Client.results)


class AsyncClient:
    """`shoal.Client` for asyncio: the same calls, to be awaited.

        async with shoal.AsyncClient() as cluster:
            job = await cluster.run("python train.py", gpus=8)
            async for line in cluster.follow(job.id):
                print(line)

    A call runs in a thread, 64 of them at a time. Cancelling a task (also by `asyncio.timeout`)
    ends its call at once. It cannot take back what the call has done by then: a job that was
    submitted stays."""

    def __init__(
        self,
        url: str = "",
        token: str = "",
        *,
        home: Path | str | None = None,
        context: str = "",
        certificate: str = "",
        timeout_s: float = 60,
        patience_s: float = 3,
    ) -> None:
        self._client = Client(
            url,
            token,
            home=home,
            context=context,
            certificate=certificate,
            timeout_s=timeout_s,
            patience_s=patience_s,
        )
        self._threads = ThreadPoolExecutor(CALLS_MAX, "shoal-client")
        self._running: set[Interrupt] = set()
        self._turns = asyncio.Semaphore(WAITS_MAX)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the calls that are under way, and closes the connections."""
        for interrupt in self._running:
            interrupt.ask()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._client.close()

    async def _in_thread(
        self,
        interrupt: Interrupt,
        function: Callable[P, Answer],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Answer:
        call = functools.partial(function, *arguments, **keywords)
        self._running.add(interrupt)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except asyncio.CancelledError:
            interrupt.ask()
            raise
        except Interrupted:
            raise ShoalError("the client was closed during the call") from None
        finally:
            self._running.discard(interrupt)

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobView:
        """Returns when the job has ended; TimeoutError after `timeout_s`. The job goes on."""
        interrupt, deadline = Interrupt(), deadline_of(timeout_s)
        lent = self._client.lent(interrupt=interrupt)
        while True:
            async with self._turns:
                look_s = TURN_S if self._turns.locked() else LOOK_S
                view = await self._in_thread(interrupt, ended, lent, job_id, deadline, look_s)
            if view is not None:
                return view

    async def result(self, job_id: str, *, timeout_s: float | None = None) -> Any:
        """What the function of a job returned in member 0, when the job has ended."""
        await self.wait(job_id, timeout_s=timeout_s)
        return await _fetch(self, job_id)

    async def results(self, job_id: str, *, timeout_s: float | None = None) -> list[Any]:
        """What the function of a job returned in each member, or in each element of an array."""
        await self.wait(job_id, timeout_s=timeout_s)
        return await _fetch_all(self, job_id)

    async def follow(self, job_id: str, *, member: int = 0, attempt: int = 0) -> AsyncIterator[str]:
        """The lines that a member writes, as it writes them, until the job has ended."""
        interrupt = Interrupt()
        groups = line_groups(self._client.lent(interrupt=interrupt), job_id, member, attempt)
        lines: list[str] | None = []
        while lines is not None:
            for line in lines:
                yield line
            async with self._turns:
                lines = await self._in_thread(interrupt, _next, groups)

    # -- made by `make generate` --
    accept_invite = _call(Client.accept_invite)
    add_api_key = _call(Client.add_api_key)
    add_rule = _call(Client.add_rule)
    add_tenant = _call(Client.add_tenant)
    add_token = _call(Client.add_token)
    add_user = _call(Client.add_user)
    api_keys = _call(Client.api_keys)
    audit = _call(Client.audit)
    begin_device = _call(Client.begin_device)
    call = _call(Client.call)
    cancel = _call(Client.cancel)
    cancel_workflow = _call(Client.cancel_workflow)
    change_node = _call(Client.change_node)
    check = _call(Client.check)
    check_network = _call(Client.check_network)
    check_result = _call(Client.check_result)
    check_storage = _call(Client.check_storage)
    cost = _call(Client.cost)
    drain_in = _call(Client.drain_in)
    events = _call(Client.events)
    explanation = _call(Client.explanation)
    fabric = _call(Client.fabric)
    fetch = _call(Client.fetch)
    file_key = _call(Client.file_key)
    file_part = _call(Client.file_part)
    files = _call(Client.files)
    forget_head = _call(Client.forget_head)
    hand_files = _call(Client.hand_files)
    hand_part = _call(Client.hand_part)
    handed = _call(Client.handed)
    has_package = _call(Client.has_package)
    heads = _call(Client.heads)
    invite = _call(Client.invite)
    job = _call(Client.job)
    job_series = _call(Client.job_series)
    jobs = _call(Client.jobs)
    join_key = _call(Client.join_key)
    join_token = _call(Client.join_token)
    keys = _call(Client.keys)
    label_job = _call(Client.label_job)
    leaving = _call(Client.leaving)
    ledger = _call(Client.ledger)
    logs = _call(Client.logs)
    me = _call(Client.me)
    neighbor_gone = _call(Client.neighbor_gone)
    neighbors = _call(Client.neighbors)
    node_series = _call(Client.node_series)
    node_tree = _call(Client.node_tree)
    nodes = _call(Client.nodes)
    note_job = _call(Client.note_job)
    notice_key = _call(Client.notice_key)
    notice_settings = _call(Client.notice_settings)
    offers = _call(Client.offers)
    oidc = _call(Client.oidc)
    open_session = _call(Client.open_session)
    package = _call(Client.package)
    page_code = _call(Client.page_code)
    page_link = _call(Client.page_link)
    pause_schedule = _call(Client.pause_schedule)
    policy = _call(Client.policy)
    poll_device = _call(Client.poll_device)
    preview = _call(Client.preview)
    prices = _call(Client.prices)
    put_package = _call(Client.put_package)
    remove_key = _call(Client.remove_key)
    remove_neighbor = _call(Client.remove_neighbor)
    remove_oidc = _call(Client.remove_oidc)
    remove_rule = _call(Client.remove_rule)
    remove_schedule = _call(Client.remove_schedule)
    remove_secret = _call(Client.remove_secret)
    remove_tenant = _call(Client.remove_tenant)
    remove_token = _call(Client.remove_token)
    remove_user = _call(Client.remove_user)
    renew_lease = _call(Client.renew_lease)
    request = _call(Client.request)
    requeue = _call(Client.requeue)
    resume_schedule = _call(Client.resume_schedule)
    retry = _call(Client.retry)
    revoke_api_key = _call(Client.revoke_api_key)
    roll_back_service = _call(Client.roll_back_service)
    rotate_join_token = _call(Client.rotate_join_token)
    rotate_token = _call(Client.rotate_token)
    rules = _call(Client.rules)
    run = _call(Client.run)
    run_file = _call(Client.run_file)
    run_schedule = _call(Client.run_schedule)
    samples = _call(Client.samples)
    schedule = _call(Client.schedule)
    schedules = _call(Client.schedules)
    secrets = _call(Client.secrets)
    send_package = _call(Client.send_package)
    serve = _call(Client.serve)
    serve_file = _call(Client.serve_file)
    service = _call(Client.service)
    service_series = _call(Client.service_series)
    services = _call(Client.services)
    set_intent = _call(Client.set_intent)
    set_labels = _call(Client.set_labels)
    set_neighbor = _call(Client.set_neighbor)
    set_notice_settings = _call(Client.set_notice_settings)
    set_oidc = _call(Client.set_oidc)
    set_policy = _call(Client.set_policy)
    set_prices = _call(Client.set_prices)
    set_schedule = _call(Client.set_schedule)
    set_secret = _call(Client.set_secret)
    set_service_sites = _call(Client.set_service_sites)
    set_status_page = _call(Client.set_status_page)
    set_user = _call(Client.set_user)
    shared_with_neighbors = _call(Client.shared_with_neighbors)
    sleep = _call(Client.sleep)
    status = _call(Client.status)
    status_page = _call(Client.status_page)
    stop_service = _call(Client.stop_service)
    storage_check = _call(Client.storage_check)
    stream = _call(Client.stream)
    submit = _call(Client.submit)
    submit_many = _call(Client.submit_many)
    submit_service = _call(Client.submit_service)
    submit_workflow = _call(Client.submit_workflow)
    supply = _call(Client.supply)
    tenants = _call(Client.tenants)
    test_rule = _call(Client.test_rule)
    tokens = _call(Client.tokens)
    tour = _call(Client.tour)
    trials = _call(Client.trials)
    users = _call(Client.users)
    wake = _call(Client.wake)
    why = _call(Client.why)
    workflow = _call(Client.workflow)
    # -- end --


def _next(groups: Iterator[list[str]]) -> list[str] | None:
    return next(groups, None)

"""Many clients at the same moment, against every verb that changes something."""

from __future__ import annotations

import hashlib
import io
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import pytest
from harness.waiting import until

from shoal.client import Client, ShoalError
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished
from shoal.model.job import JobSpec
from shoal.model.ledger import Price, PriceList
from shoal.model.node import NodeIntent
from tests.live.cluster import Live, live_cluster

CLIENTS = 12
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=4) as cluster:
        yield cluster


def at_once(live: Live, *calls: Callable[[Client], Result]) -> list[Result | ShoalError]:
    """Each call by a client of its own that is connected already, all let go together."""
    gate = threading.Barrier(len(calls))

    def one(call: Callable[[Client], Result]) -> Result | ShoalError:
        with Client.at_home(live.home.path, patience_s=60) as client:
            client.status()
            gate.wait(60)
            try:
                return call(client)
            except ShoalError as error:
                return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def all_well(answers: list[Any]) -> list[Any]:
    assert [answer for answer in answers if isinstance(answer, ShoalError)] == []
    return answers


def events_of(live: Live, job_id: str, kind: type) -> list[Any]:
    page = live.client.events(after=0, job=job_id, limit=1000)
    return [recorded.event for recorded in page.events if isinstance(recorded.event, kind)]


def blocked(live: Live) -> JobSpec:
    """Waits for as long as the cluster is full."""
    return live.spec("true", gpus=4, members=2)


def still_stores(live: Live) -> None:
    job_id = live.run("true")
    assert live.wait(job_id) == "succeeded"


def test_one_key_is_one_job_however_many_submit_it(live: Live) -> None:
    spec = live.spec("true")
    answers = at_once(live, *[lambda client: client.submit(spec, "one key").id] * CLIENTS)
    assert len(set(all_well(answers))) == 1
    assert live.wait(answers[0]) == "succeeded"  # type: ignore[arg-type]
    again = at_once(live, *[lambda client: client.submit(spec, "one key").id] * CLIENTS)
    assert set(again) == set(answers)


def test_cancels_beside_submissions_with_the_same_key_make_no_second_job(live: Live) -> None:
    filler = live.run("sleep 600", gpus=4, members=2)
    live.wait(filler, "running")
    spec = blocked(live)
    for number in range(8):
        key = f"waiting {number}"
        job_id = live.client.submit(spec, key).id
        calls: list[Callable[[Client], Any]] = [lambda c, j=job_id: c.cancel(j)] * 3  # type: ignore[misc]
        calls += [lambda c, k=key: c.submit(spec, k).id] * 3  # type: ignore[misc]
        answers = all_well(at_once(live, *calls))
        assert set(answers[3:]) == {job_id}
        assert len(events_of(live, job_id, JobFinished)) == 1
    live.client.cancel(filler)
    live.wait(filler)
    submitted = Counter(
        recorded.event.key
        for recorded in live.client.events(after=0, limit=1000).events
        if isinstance(recorded.event, JobSubmitted)
    )
    assert {key: count for key, count in submitted.items() if count > 1} == {}
    still_stores(live)


def test_a_job_ends_once_whoever_cancels_or_requeues_it_as_it_ends(live: Live) -> None:
    for _ in range(6):
        job_id = live.run("read line < /dev/null; exit 0")
        calls: list[Callable[[Client], Any]] = [lambda c, j=job_id: c.cancel(j)] * 6  # type: ignore[misc]
        all_well(at_once(live, *calls))
        assert live.wait(job_id) in ("cancelled", "succeeded")
        assert len(events_of(live, job_id, JobFinished)) == 1
    job_id = live.run("sleep 600")
    live.wait(job_id, "running")
    mixed: list[Callable[[Client], Any]] = [lambda client: client.cancel(job_id)] * 4
    mixed += [lambda client: client.requeue(job_id)] * 4
    for answer in at_once(live, *mixed):  # whoever comes too late is told so, in words
        assert not isinstance(answer, ShoalError) or answer.status in (404, 409, 422)
    live.client.cancel(job_id)
    assert live.wait(job_id) == "cancelled"
    assert len(events_of(live, job_id, JobFinished)) == 1


def test_the_last_word_about_a_node_holds(live: Live) -> None:
    intents = [NodeIntent.CORDONED, NodeIntent.OPEN, NodeIntent.DRAINING] * 4
    all_well(at_once(live, *[lambda client, i=i: client.set_intent("n1", i) for i in intents]))
    live.client.set_intent("n1", NodeIntent.OPEN)
    assert {node.id: node.state for node in live.client.nodes()} == {"n1": "ready", "n2": "ready"}
    still_stores(live)


def test_the_policy_in_force_is_one_that_was_set_and_stored(live: Live) -> None:
    before = live.client.policy()
    policies = [msgspec.structs.replace(before, name=f"p{n}", spares=0) for n in range(5)]
    answers = at_once(live, *[lambda client, p=p: client.set_policy(p) for p in policies])
    all_well(answers)
    now = live.client.policy()
    assert now in policies
    page = live.client.events(after=-1000, limit=1000)
    stored = [r.event.policy for r in page.events if isinstance(r.event, PolicyChanged)]
    assert stored[-1] == now
    live.client.set_policy(before)


def test_prices_set_at_once_are_one_whole_list(live: Live) -> None:
    lists = [
        PriceList(currency="EUR", gpus={f"model-{n}": Price(per_hour=n + 1.0)})
        for n in range(CLIENTS)
    ]
    all_well(at_once(live, *[lambda client, p=p: client.set_prices(p) for p in lists]))
    assert live.client.prices() in lists
    assert msgspec.json.decode(live.home.prices.read_bytes(), type=PriceList) in lists


def test_a_package_sent_by_many_at_once_is_whole(live: Live) -> None:
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("hello.txt")
        info.size = 300_000
        tar.addfile(info, io.BytesIO(b"x" * info.size))
    body = buffer.getvalue()
    name = hashlib.sha256(body).hexdigest()
    all_well(
        at_once(
            live,
            *[lambda client: client.send_package(name, len(body), io.BytesIO(body))] * 6,
        )
    )
    spec = live.spec("wc", "-c", "hello.txt", package=name)
    job_id = live.client.submit(spec).id
    assert live.wait(job_id) == "succeeded"
    assert "300000" in live.output(job_id)


def test_clients_that_go_away_in_the_middle_harm_nobody(live: Live) -> None:
    spec = live.spec("true")
    body = msgspec.json.encode({"spec": spec, "key": "given up"})
    token = live.home.token.read_text().strip()
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    address = live.client.url.removeprefix("http://").split(":")
    for number in range(60):
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head + body[: len(body) if number % 2 else len(body) // 2])
    job_id = live.client.submit(spec, "given up").id
    assert live.wait(job_id) == "succeeded"
    assert live.client.submit(spec, "given up").id == job_id


def test_a_restart_after_all_of_this_loads_what_was_stored(live: Live) -> None:
    before = {row.id: row.state for row in live.client.jobs(finished=True, limit=500)}
    live.kill_controller()
    after = {row.id: row.state for row in live.client.jobs(finished=True, limit=500)}
    assert after == before
    still_stores(live)
    until(lambda: not live.member_processes())

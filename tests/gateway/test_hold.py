"""Scaled to zero: requests wait for a replica, within bounds, and are what wakes the service."""

from __future__ import annotations

import threading

import pytest
from harness.waiting import until

from shoal.model.service import Route
from tests.gateway.world import Answer, World, raw


def test_requests_wait_for_the_first_replica_and_the_last_takes_leave(world: World) -> None:
    if not world.gateway._binary.lua:
        pytest.skip("this HAProxy was built without Lua")
    route = Route(service="chat", concurrency=2)
    world.serve(route)
    answers: list[Answer] = []
    body = b"x" * 300_000  # more than the proxy can keep: it waits where it is

    def ask() -> None:
        answers.append(world.get("/chat/", method="POST", body=body))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    until(lambda: world.gateway.tick()[0].held == 5, "five that wait")
    assert world.gateway.tick()[0].work == 5
    (one,) = world.start("one")
    world.serve(route, one)
    for thread in threads:
        thread.join()
    assert [(answer.status, answer.body) for answer in answers] == [(200, "one")] * 5
    world.serve(route)  # to zero again
    with raw(world.port, "GET /chat/ HTTP/1.1\nHost: x\n\n") as connection:
        until(lambda: world.gateway.tick()[0].held == 1, "one that waits")
        world.serve(route, one)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_waiting_has_a_bound_in_number_and_in_time(world: World) -> None:
    if not world.gateway._binary.lua:
        pytest.skip("this HAProxy was built without Lua")
    world.serve(Route(service="chat", queue_max=2, queue_timeout_ms=500))
    with (
        raw(world.port, "GET /chat/ HTTP/1.1\nHost: x\n\n") as first,
        raw(world.port, "GET /chat/ HTTP/1.1\nHost: x\n\n"),
    ):
        until(lambda: world.gateway.tick()[0].held == 2, "two that wait")
        full = world.get("/chat/")
        assert (full.status, full.body) == (503, '{"error":"the queue is full"}')
        assert b"no replica became ready in time" in first.recv(4096)


def test_a_service_whose_only_replica_restarts_fails_nobody(world: World) -> None:
    if not world.gateway._binary.lua:
        pytest.skip("this HAProxy was built without Lua")
    world.serve(Route(service="chat"), *world.start("one"))
    world.kill("one")
    until(lambda: not world.gateway.tick()[0].replicas[0].up, "the death to be noticed")
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(world.get("/chat/", method="POST")))
    thread.start()
    until(lambda: world.gateway.tick()[0].held == 1, "one that waits")
    world.start("one")
    thread.join()
    assert answers[0].body == "one"

"""Sleep as its users see it, with real processes: lent, woken by use, and never a step lost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pytest
from harness.waiting import until

import shoal.sessions
from tests.live.cluster import Live, live_cluster
from tests.live.test_sessions import Typist, finish, say, shoal_command

# Writes a chain of hashes, and answers each connection in capitals.
CHAIN = """
import hashlib, socket, threading, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def serve():
    while True:
        end = listener.accept()[0]
        said = b""
        while data := end.recv(65536):
            said += data
        end.sendall(said.upper())
        end.close()
threading.Thread(target=serve, daemon=True).start()
link = b""
while True:
    link = hashlib.sha256(link).digest()
    print(link.hex()[:16], flush=True)
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=1) as cluster:
        yield cluster


def command(live: Live, *args: str) -> tuple[int, str, str]:
    code, out, err = finish(shoal_command(live, *args))
    return code, out.decode(), err.decode()


def chain(count: int) -> list[str]:
    links, link = [], b""
    for _ in range(count):
        link = hashlib.sha256(link).digest()
        links.append(link.hex()[:16])
    return links


def goes_on(live: Live, job: str) -> None:
    """What it writes is what it would have written undisturbed, and there is more of it."""
    count = len(live.output(job).splitlines())
    until(lambda: len(live.output(job).splitlines()) > count + 3)
    lines = live.output(job).splitlines()[1:-1]
    assert lines == chain(len(lines))


def test_a_gpu_is_lent_out_and_comes_back_when_the_job_is_used(live: Live) -> None:
    job = live.client.submit(live.spec("python3", "-c", CHAIN, gpus=1)).id
    until(lambda: live.output(job).count("\n") > 3)
    port = int(live.output(job).splitlines()[0])
    forwarded = shoal.sessions.forward(live.client, job, port)
    shell = Typist(live, "exec", "-it", job, "--", "sh")
    shell.sees("# ")

    # By hand, while sessions are open; another job gets the GPU, and reading wakes nobody.
    assert command(live, "sleep", "--wait", job) == (0, f"{job} is asleep\n", "")
    assert command(live, "sleep", job) == (0, f"{job}: it is already asleep\n", "")
    assert live.wait(live.run("true", gpus=1)) == "succeeded"
    before = live.output(job)
    assert command(live, "logs", job)[1] == before
    assert command(live, "why", job)[0] == 0
    assert json.loads(command(live, "ps", "--state", "asleep", "--json")[1])[0]["id"] == job
    live.kill_controller()
    assert live.client.job(job).state == "asleep"
    assert live.output(job) == before

    # A key in the open shell wakes it.
    shell.type("echo aw''ake\r")
    shell.sees("awake")
    goes_on(live, job)

    # A command wakes it when the GPU is free, and says what it waits for.
    live.client.sleep(job)
    assert live.wait(job, "asleep") == "asleep"
    other = live.run("sleep 3600", gpus=1)
    assert live.wait(other, "running") == "running"
    waits = shoal_command(live, "exec", job, "--", "echo", "beside")
    until(lambda: "is waking" in live.client.job(job).why)
    assert f"{other} runs there" in live.client.job(job).why
    live.kill_controller()
    live.client.cancel(other)
    code, out, err = finish(waits)
    assert (code, out) == (0, b"beside\n"), err
    assert err.decode().splitlines()[0] == f"{job} is asleep; waking it ..."
    goes_on(live, job)

    # A connection through the port that has been open all the time wakes it, too.
    assert command(live, "sleep", "--wait", job)[0] == 0
    assert say(forwarded.port, b"hello") == b"HELLO"
    goes_on(live, job)
    forwarded.close()
    shell.type("exit\r")
    assert shell.end() == 0

    # In words.
    assert command(live, "wake", job) == (
        1,
        "",
        f"error: job: {job} is not asleep: it is running\n",
    )
    result, slept, errors = command(live, "sleep", "--wait", "--json", job, other, "j999")
    assert result == 1
    assert [one["id"] for one in json.loads(slept)] == [job]
    assert errors.splitlines() == [
        f"error: job: {other} cannot be put to sleep: it has ended (cancelled)",
        "error: there is no job j999; the newest is " + other,
    ]
    assert command(live, "wake", "--wait", job) == (0, f"{job} is awake\n", "")
    told = command(live, "events", "--job", job)[1]
    assert told.count("is asleep and holds no GPU") == 4
    for text in (
        "is being put to sleep by a user",
        "is waking because one of its sessions was used",
        "is waking because a user ran shoal exec",
        "is waking because a user asked",
        "of sleep",
    ):
        assert text in told, told

    # A sleeper can be cancelled.
    live.client.sleep(job)
    live.client.cancel(job)
    assert live.wait(job) == "cancelled"
    until(lambda: not live.member_processes())

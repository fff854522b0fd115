"""Tours: hosts of one list meet each other in rounds, and let nobody else in."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.model.fabric import Host, Tour
from shoal.model.health import CheckResult
from shoal.probes import tour_door as doors
from shoal.probes.tour import rounds
from shoal.probes.tour_door import rate_of

KEY = "a key that only the hosts of a tour know"
PAIR_MS = 60


def hosts(count: int) -> tuple[Host, ...]:
    """Each with a free port of this machine, over IPv4 and IPv6 in turn."""
    with contextlib.ExitStack() as stack:
        doors_ = [stack.enter_context(doors.listen(0)) for _ in range(count)]
        ports = [door.getsockname()[1] for door in doors_]
    v6 = "::1" if socket.has_dualstack_ipv6() else "127.0.0.1"
    return tuple(Host(f"n{i}", (v6, "127.0.0.1")[i % 2], port) for i, port in enumerate(ports))


class Probe:
    def __init__(self, folder: Path, list_: tuple[Host, ...], own: int, **more: int) -> None:
        asked = {"key": KEY, "pair_ms": PAIR_MS, "start_ms": 20_000, **more}
        file = folder / f"{own}.json"
        file.write_bytes(msgspec.json.encode(Tour(hosts=list_, own=own, **asked)))  # type: ignore[arg-type]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal.probes.tour", str(file), "--id", f"t{own}"],
            stdout=subprocess.PIPE,
        )

    def result(self) -> CheckResult:
        output, _ = self.process.communicate(timeout=120)
        return msgspec.json.decode(output, type=CheckResult)


@pytest.fixture
def started() -> Iterator[list[Probe]]:
    found: list[Probe] = []
    yield found
    for probe in found:
        probe.process.kill()
        probe.process.communicate()


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16, 33])
def test_in_every_round_each_host_meets_one_other_and_everybody_meets_everybody(count: int) -> None:
    ways = [rounds(count, own) for own in range(count)]
    assert {len(way) for way in ways} == {count - 1 + count % 2}
    for own, way in enumerate(ways):
        assert sorted(one for one in way if one >= 0) == [n for n in range(count) if n != own]
        for turn, partner in enumerate(way):
            assert partner < 0 or ways[partner][turn] == own


def test_hosts_that_start_apart_measure_every_pair_once_though_one_never_comes(
    tmp_path: Path, started: list[Probe]
) -> None:
    """n1 is on the list and never starts; n3 starts when the others have waited for a while."""
    list_ = hosts(4)
    started += [Probe(tmp_path, list_, own, start_ms=4_000) for own in (0, 2)]
    until_knocked(list_[0])
    started.append(Probe(tmp_path, list_, 3, start_ms=4_000))
    found = {number: probe.result() for number, probe in zip((0, 2, 3), started, strict=True)}
    assert [result.error for result in found.values()] == ["", "", ""]
    met = [
        (number, pair.peer) for number, one in found.items() for pair in one.pairs if not pair.fault
    ]
    assert sorted(met) == [(2, "n0"), (3, "n0"), (3, "n2")]
    for pair in found[3].pairs:
        assert pair.fault or (pair.mbs > 10 and pair.back_mbs > 10)
        assert pair.fault or 0 < pair.least_us <= pair.latency_us
    for number, one in found.items():
        (fault,) = [pair.fault for pair in one.pairs if pair.peer == "n1"]
        assert fault == f"n{number} could not measure with n1: Connection refused"


def until_knocked(host: Host) -> None:
    """Its probe listens."""
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection((host.address, host.port), timeout=5).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_strangers_get_no_byte_and_hold_up_nobody(tmp_path: Path, started: list[Probe]) -> None:
    list_ = hosts(2)
    started.append(Probe(tmp_path, list_, 0))
    until_knocked(list_[0])
    place = (list_[0].address, list_[0].port)
    wrong = doors.HELLO.pack(doors.MAGIC, doors.VISIT, 1, 0, 0, bytes(16), bytes(32))
    with contextlib.ExitStack() as stack:
        for _ in range(doors.STRANGERS_MAX + 20):  # they connect, and say nothing
            stack.enter_context(socket.create_connection(place, timeout=120))
        for said in (b"GET / HTTP/1.1\r\nHost: n0\r\n\r\n", wrong, b"\xff" * 1_000_000):
            line = stack.enter_context(socket.create_connection(place, timeout=120))
            with contextlib.suppress(ConnectionError):  # it hangs up on them
                line.sendall(said)
                assert line.recv(1) == b""
        started.append(Probe(tmp_path, list_, 1))
        assert started[1].result().pairs[0].fault == ""
    assert started[0].result().pairs == ()


def test_a_recorded_hello_is_worth_nothing(tmp_path: Path, started: list[Probe]) -> None:
    list_ = hosts(2)
    started.append(Probe(tmp_path, list_, 0, start_ms=2_000))
    until_knocked(list_[0])
    with socket.create_connection((list_[0].address, list_[0].port), timeout=120) as line:
        answer = doors.greet(line, KEY.encode(), doors.VISIT, 1, 0, 0)
        assert answer.word in (doors.NOW, doors.WAIT)
        while doors.exactly(line, 1) == doors.WAIT:
            pass
        line.sendall(bytes(doors.PROOF_BYTES) + b"p")
        with contextlib.suppress(ConnectionError):
            assert line.recv(1) == b""
    (pair,) = started[0].result().pairs
    assert "a stranger came in its name" in pair.fault


def test_a_tour_that_is_ended_or_cannot_listen_still_prints_a_result(
    tmp_path: Path, started: list[Probe]
) -> None:
    list_ = hosts(2)
    started.append(Probe(tmp_path, list_, 0))
    until_knocked(list_[0])
    started.append(Probe(tmp_path, list_[:1], 0))
    assert "could not listen" in started[1].result().error
    started[0].process.send_signal(signal.SIGTERM)
    assert started[0].result().error == "the tour was ended"


def test_a_tour_without_a_key_lets_nobody_in(tmp_path: Path, started: list[Probe]) -> None:
    file = tmp_path / "tour.json"
    file.write_bytes(msgspec.json.encode(Tour(hosts=hosts(2), own=0)))
    run = subprocess.run(
        [sys.executable, "-m", "shoal.probes.tour", str(file)], capture_output=True, timeout=120
    )
    found = msgspec.json.decode(run.stdout, type=CheckResult)
    assert found.error == "the tour has no key, so nobody could be trusted"


def test_the_rate_is_that_of_arrival_without_the_burst_at_the_beginning() -> None:
    """A megabyte at once, then 1.25 MB/s in packets that come in lumps of 20 ms."""
    events = [(0.0, 1_000_000), *((0.02 * number, 25_000) for number in range(1, 14))]
    rate, agrees = rate_of(events, 0.1, 0.25)
    assert (round(rate), agrees) == (1_250_000, True)
    slows = [(0.01 * number, 20_000 - 700 * number) for number in range(26)]
    assert not rate_of(slows, 0.1, 0.25)[1]
    assert rate_of([(0.0, 500)], 0.4, 1.0) == (500.0, False)

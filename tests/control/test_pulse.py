"""Probes are sent as rarely as can be: a server's log is for its users."""

from __future__ import annotations

from shoal.control.gateway_link import Pulse
from shoal.model.service import Probe, ReplicaLoad

PROBE = Probe()
IDLE = ReplicaLoad(up=True, in_flight=0)
BUSY = ReplicaLoad(up=True, in_flight=1)
ANSWERS = ReplicaLoad(up=True, in_flight=1, answers_per_ks=500)
LOOK_S = 0.5


def probes(pulse: Pulse, load: ReplicaLoad | None, span_s: float, *, answers: bool = True) -> int:
    """How many a ready replica gets in this time, which is looked at as the link does."""
    sent, at = 0, 0.0
    while (at := at + LOOK_S) <= span_s:
        pulse.plan(PROBE, load, at)
        if pulse.due_s <= at:
            pulse.felt(at, answered=answers)
            sent += 1
    return sent


def ready() -> Pulse:
    pulse = Pulse(1)
    pulse.greeted(0.0, answered=True, ready=True)
    return pulse


def test_a_replica_that_answers_requests_is_not_probed() -> None:
    assert probes(ready(), ANSWERS, 3_600) == 0


def test_an_idle_replica_is_probed_a_dozen_times_an_hour() -> None:
    assert probes(ready(), IDLE, 3_600) == 12


def test_while_somebody_waits_it_is_probed_as_often_as_the_service_says() -> None:
    assert probes(ready(), BUSY, 60) == 6
    assert probes(ready(), None, 60) == 6, "the gateway says nothing"


def test_one_probe_without_an_answer_is_followed_by_the_next_soon() -> None:
    pulse = ready()
    assert probes(pulse, IDLE, 300 + 5 * 10, answers=False) == PROBE.failures
    assert pulse.unanswered == PROBE.failures
    pulse.plan(PROBE, ANSWERS, 400.0)
    assert pulse.unanswered == 0, "what answers requests is alive"


def test_a_server_that_loads_for_ten_minutes_is_not_asked_twice_a_second() -> None:
    pulse, sent, at = Pulse(1), 0, 0.0
    while (at := at + LOOK_S) < 600:
        if pulse.due_s <= at:
            pulse.greeted(at, answered=True, ready=False)
            sent += 1
            assert pulse.due_s - at <= 5
    assert sent < 160  # 1,200 looks


def test_a_server_that_does_not_listen_yet_is_tried_at_each_look() -> None:
    pulse = Pulse(1)
    for at in range(1, 100):
        assert pulse.due_s <= at
        pulse.greeted(float(at), answered=False, ready=False)

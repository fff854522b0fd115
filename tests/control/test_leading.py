"""A leader acts only while its lease is certain."""

from __future__ import annotations

import threading
import time

from shoal.control.leading import Leadership
from shoal.database.base import StoreAway


class Lent:
    def __init__(self) -> None:
        self.sure = True
        self.renewals = 0
        self.answer: bool | Exception = True
        self.given_up = False

    def renew(self) -> bool:
        self.renewals += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def give_up(self) -> None:
        self.sure, self.given_up = False, True


class Ended:
    def __init__(self) -> None:
        self.whys: list[str] = []
        self.happened = threading.Event()

    def __call__(self, why: str) -> None:
        self.whys.append(why)
        self.happened.set()


def test_a_leader_that_could_not_renew_in_time_ends_before_it_acts() -> None:
    lease, ended = Lent(), Ended()
    leadership = Leadership(lease, ended)
    leadership.check()
    assert not ended.whys
    lease.sure = False  # as after a SIGSTOP: no thread has run meanwhile
    leadership.check()
    assert "was stopped, or the machine slept" in ended.whys[0]


def test_the_threads_notice_another_leader_and_a_server_that_is_away() -> None:
    lease, ended = Lent(), Ended()
    leadership = Leadership(lease, ended)
    lease.answer = False
    leadership.start()
    assert ended.happened.wait(120)
    assert ended.whys == ["another head leads by now"]

    lease, ended = Lent(), Ended()
    lease.answer = StoreAway("no route to the server")
    Leadership(lease, ended).start()
    deadline = time.monotonic() + 20
    while not lease.renewals and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not ended.whys  # it may be back in time
    lease.sure = False
    assert ended.happened.wait(120)
    assert "no route to the server" in ended.whys[0]


def test_a_renewal_comes_although_the_other_thread_is_busy() -> None:
    lease, ended = Lent(), Ended()
    Leadership(lease, ended).start()
    deadline = time.monotonic() + 20
    while lease.renewals < 3 and time.monotonic() < deadline:
        sum(range(10_000))
    assert lease.renewals >= 3


def test_a_lease_that_is_given_up_ends_nothing() -> None:
    lease, ended = Lent(), Ended()
    leadership = Leadership(lease, ended)
    leadership.start()
    leadership.give_up()
    assert lease.given_up
    leadership.check()
    assert not ended.happened.wait(0.3)

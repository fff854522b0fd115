"""Notices of a real cluster whose controller is killed again and again: none is lost."""

from __future__ import annotations

from pathlib import Path

from harness.waiting import until

from tests.live.cluster import live_cluster
from tests.notices.receivers import Receiver, is_signed

KILLS, JOBS = 3, 4


def test_every_end_is_reported_whatever_happens_to_the_controller(tmp_path: Path) -> None:
    answers = iter([503] * 4)
    receiver = Receiver(lambda: next(answers, 200))
    with live_cluster(nodes=2) as live:
        wanted = {}
        for _ in range(KILLS):
            for number in range(JOBS):
                job = live.run(f"exit {number % 2}", notify=(f"started,ended={receiver.url}",))
                wanted[job] = "failed" if number % 2 else "succeeded"
            live.kill_controller()
        for job in wanted:
            live.wait(job)

        def ends() -> dict[str, str]:
            found = [one for one in receiver.notices if one["type"] == "ended"]
            return {one["job"]: one["state"] for one in found}

        until(lambda: ends() == wanted, more=lambda: (ends(), wanted))
        numbers: dict[tuple[str, str], set[str]] = {}
        for one in receiver.notices:
            numbers.setdefault((one["job"], one["type"]), set()).add(one["id"])
        assert all(len(ids) == 1 for ids in numbers.values()), "what comes twice has the same id"
        key = live.client.notice_key().key
        assert all(is_signed(key, headers, body) for headers, body in receiver.taken)
    receiver.close()

"""Tokens of a real service, through its router, while router and controller are killed."""

from __future__ import annotations

import contextlib
import os
import signal

import httpx
from harness.waiting import until

from shoal.model.ledger import By, Price, PriceList
from tests.live.cluster import Live, all_pids
from tests.live.serving import language_model, serving_cluster


def router_pid(live: Live) -> int:
    """0: there is none at this moment."""
    for pid in all_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
            if b"shoal.router" in words and str(live.home.path).encode() in b"".join(words):
                return pid
    return 0


def test_tokens_add_up_to_what_the_engine_counted_whoever_is_killed() -> None:
    with serving_cluster() as live:
        serving = language_model(live)
        url, truth = serving.view().url, {"requests": 0, "prompt": 0, "generated": 0}

        def asks(number: int) -> bool:
            """Whether the router answered: without one, replicas are asked, and nobody counts."""
            body = {"model": "chat", "prompt": f"{number} " * 200, "max_tokens": 5 + number}
            answer = httpx.post(f"{url}v1/completions", json=body, timeout=60)
            if answer.status_code != 200 or "x-shoal-replica" not in answer.headers:
                return False
            usage = answer.json()["usage"]
            truth["requests"] += 1
            truth["prompt"] += usage["prompt_tokens"]
            truth["generated"] += usage["completion_tokens"]
            return True

        def told() -> dict[str, int]:
            costs = live.client.ledger(by=By.SERVICE).token_costs
            return {name: getattr(costs[0], name) for name in truth} if costs else {}

        def five() -> None:
            for number in range(5):
                until(lambda number=number: asks(number))  # type: ignore[misc]
            until(lambda: told() == truth, more=lambda: f"{told()} of {truth}")

        five()
        live.kill_controller()
        five()
        (kept,) = live.home.path.rglob("counts.json")  # written once a second
        until(lambda: f'"requests":{truth["requests"]},' in kept.read_text(), more=kept.read_text)
        os.kill(killed := router_pid(live), signal.SIGKILL)
        until(lambda: router_pid(live) not in (0, killed))
        five()

        (row,) = live.client.ledger().tokens
        assert (row.service, row.caller, row.requests) == ("chat", "", 15)
        assert row.cached > 0  # each prompt was asked for more than once
        live.client.set_prices(PriceList(currency="EUR", gpus={"*": Price(per_hour=1)}))
        assert live.client.ledger().token_costs[0].cost is None  # its replica has no GPU
        series = live.client.service_series("chat")
        assert max(filter(None, series.generated_per_s)) > 0
        view = live.client.service("chat")
        assert view.tokens is not None
        assert view.help == []

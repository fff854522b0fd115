"""A service of a language model on the page: its curves with their goals, its cost, and a chat."""

from __future__ import annotations

import os

import httpx
import msgspec
from harness.browser import Visit
from harness.waiting import until
from playwright.sync_api import expect

from shoal.model.ledger import PriceList
from tests.live.cluster import Live
from tests.live.serving import language_model, need_gateway, replica_ports
from tests.web.test_open_to_all import found


def test_tokens_of_a_service_are_shown_with_goals_and_a_chat_says_when_it_began(
    visit: Visit, live: Live
) -> None:
    need_gateway()
    policy = msgspec.structs.replace(live.client.policy(), **replica_ports())
    live.client.set_policy(policy)
    url = language_model(live, gpus=1).view().url

    def counted() -> bool:
        body = {"model": "chat", "prompt": "word " * 300, "max_tokens": 40}
        assert httpx.post(f"{url}v1/completions", json=body, timeout=60).status_code == 200
        return len(live.client.service_series("chat").generated_per_s) > 3

    until(counted)
    visit.go("services")
    card = visit.page.locator("section[data-service=chat]")
    tokens = card.locator("[data-tokens=chat]")
    for title in ("Tokens", "Time to first token", "Time between tokens"):
        expect(tokens.get_by_role("slider", name=title, exact=True)).to_be_visible()
    expect(tokens.get_by_text("goal").first).to_be_visible()
    expect(tokens.get_by_text("First token (p99)")).to_be_visible()
    expect(tokens.get_by_text("1M generated")).to_be_visible()

    card.get_by_text("Try it").click()
    chat = card.get_by_role("form", name="Chat with chat")
    chat.get_by_label("Message").fill("Hello")
    chat.get_by_role("button", name="Send").click()
    expect(chat.get_by_role("status")).to_contain_text("First token after")
    if folder := os.environ.get("SHOAL_SHOTS"):
        visit.page.screenshot(path=f"{folder}/tokens.png", full_page=True)
    prices = {"currency": "EUR", "gpus": {"*": {"per_hour": 2.5}}}
    live.client.set_prices(msgspec.convert(prices, PriceList))
    visit.go("ledger")
    row = visit.page.get_by_role("region", name="Tokens").locator("tbody tr")
    expect(row).to_contain_text("without a key")
    for name in ("Requests", "Prompt", "Generated"):
        expect(row.locator(f"td[data-name={name}]")).not_to_have_text("0")
    expect(row.locator("td[data-name='1M generated']")).to_contain_text("€")
    assert not found(visit.page)
    if folder:
        visit.page.screenshot(path=f"{folder}/token-table.png", full_page=True)
    live.client.stop_service("chat")

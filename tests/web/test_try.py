"""A service used from the page: its URL, one request, a chat, and the way back."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys

import msgspec
from harness.browser import Visit
from harness.waiting import until
from playwright.sync_api import expect

from shoal.model.service import Scale
from tests.live.cluster import Live, all_pids
from tests.live.serving import Serving, need_gateway, replica_ports
from tests.web.test_open_to_all import found


def kill(port: str) -> None:
    """The replica that listens on this port."""
    for pid in all_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
            if b"tests.api.chat_server" in words and port.encode() in words:
                os.kill(pid, signal.SIGKILL)


def test_a_service_is_tried_talked_to_and_rolled_back(visit: Visit, live: Live) -> None:
    need_gateway()
    policy = msgspec.structs.replace(live.client.policy(), **replica_ports())
    live.client.set_policy(policy)
    serving = Serving(live, "talk")
    for name in ("one", "two"):
        script = f"exec {sys.executable} -m tests.api.chat_server $PORT {name}"
        put = serving.put(serving.shell(script), Scale(least=1, most=1))
        serving.settles(version=put.version)

    visit.go("services")
    card = visit.page.locator("section[data-service=talk]")
    url = serving.view().url
    expect(card.get_by_label("URL of talk", exact=True)).to_have_text(url)
    card.get_by_text("Use from code").click()
    snippet = card.get_by_label("OpenAI client for talk", exact=True).inner_text()
    compile(snippet, "snippet", "exec")
    assert f'"{url}v1"' in snippet

    # One request, and where a path leads nowhere.
    card.get_by_text("Try it").click()
    request = card.get_by_role("form", name="Request to talk")
    request.get_by_label("Path").fill("/echo")
    request.get_by_label("JSON body").fill('{"a": 1}')
    request.get_by_role("button", name="Send").click()
    expect(request.get_by_role("status")).to_contain_text("Status 200 in")
    expect(card.get_by_label("Response of talk")).to_contain_text("POST /echo")
    assert "cookie" not in card.get_by_label("Response of talk").inner_text()

    # Words as they come; the conversation goes on after a stop, an error and a broken stream.
    chat = card.get_by_role("form", name="Chat with talk")
    told, last = chat.get_by_role("status"), chat.locator("[data-role=assistant] span").last

    def say(words: str) -> None:
        chat.get_by_label("Message").fill(words)
        chat.get_by_label("Message").press("Enter")

    say("good morning")
    expect(last).to_have_text("GOOD MORNING ")
    expect(told).to_contain_text("First token after")
    say("half wait never")
    expect(last).to_have_text("HALF ")  # while the answer is under way
    chat.get_by_role("button", name="Stop").click()
    expect(told).to_have_text("Stopped")
    say("some wrong")
    expect(told).to_have_text("the engine is out of memory")
    say("dead wait")
    expect(last).to_have_text("DEAD ")
    view = serving.view()
    for one in view.replicas:
        if one.version == view.version:
            kill(one.address.rpartition(":")[2])
    expect(told).to_have_text("the replica ended before its answer was complete")
    expect(last).to_have_text("DEAD ")

    assert not found(visit.page), "open to all, with everything opened"

    # Back to what ran before.
    card.get_by_role("button", name="Roll back").click()
    dialog = visit.page.locator("dialog")
    expect(dialog.locator(".diff del")).to_contain_text("chat_server $PORT two")
    expect(dialog.locator(".diff ins")).to_contain_text("chat_server $PORT one")
    visit.page.get_by_role("button", name="Roll back service").click()
    expect(card.get_by_text(re.compile("^Version 3$"))).to_be_visible()
    serving.settles(version=3)
    until(lambda: serving.ask("whoami").body == "one")
    visit.go("cluster")  # a view of it would ask for what is no longer there
    live.client.stop_service("talk")

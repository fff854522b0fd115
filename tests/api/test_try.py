"""One request to a service through the controller, and the way back to the version before."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest
from harness.waiting import until

from shoal.api import try_service
from shoal.api.problems import Refusal
from shoal.api.try_service import AT_ONCE, BODY_BYTES_MAX, EACH, Tries
from shoal.client.transport import ShoalError
from shoal.model.identity import Role
from shoal.model.people import NewToken
from shoal.model.service import GatewayEntry, Scale
from tests.live.cluster import Live
from tests.live.serving import Serving, serving_cluster


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving_cluster() as cluster:
        yield cluster


def chatting(serving: Serving, name: str) -> None:
    script = f"exec {sys.executable} -m tests.api.chat_server $PORT {name}"
    hook = "waiting:1d=http://127.0.0.1:9/secret"
    replica = msgspec.structs.replace(serving.shell(script), notify=(hook,))
    serving.settles(version=serving.put(replica, Scale(least=1, most=1)).version)


class Asked:
    """One request. `held`: its answer is not read."""

    def __init__(
        self, live: Live, token: str, path: str, body: str | None = None, held: bool = False
    ) -> None:
        where = urlsplit(live.client.url)
        self.line = http.client.HTTPConnection(where.hostname or "", where.port or 0, timeout=60)
        headers = {"authorization": f"Bearer {token}", "cookie": "a=secret", "x-shoal-seen": "1"}
        headers["content-type"] = "application/json"
        sent = {"path": path} if body is None else {"path": path, "body": body}
        self.line.request("POST", "/v1/services/talk/try", json.dumps(sent), headers)
        self.answer = self.line.getresponse()
        self.status = self.answer.status
        self.data = b"" if held else self.answer.read()
        if not held:
            self.leave()

    def leave(self) -> None:
        self.answer.close()
        self.line.close()

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.data.splitlines()]

    def text(self) -> str:
        return "".join(str(line.get("text", "")) for line in self.lines())


def chat(words: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": words}], "stream": True})


def test_a_request_reaches_the_service_alone_and_the_version_before_comes_back(live: Live) -> None:
    serving, mine = Serving(live, "talk"), live.home.read_token()
    chatting(serving, "one")

    # What arrives is what was asked for, and nothing of the sender's.
    echoed = Asked(live, mine, "/echo").text().lower()
    assert echoed.startswith("get /echo\n")
    assert all(word not in echoed for word in ("authorization", "cookie", "shoal-", mine.lower()))

    # The name decides where it goes; the path is never a part of that.
    found = Asked(live, mine, "/talk/v1/models").lines()
    assert found == [{"status": 200}, {"text": "one"}]
    for path in ("http://127.0.0.1/", "//other/", "/a b", "/a\r\nx: y"):
        assert Asked(live, mine, path).status == 400, path

    # Piece by piece, told apart from what breaks.
    whole = Asked(live, mine, "/v1/chat/completions", chat("a b")).lines()
    assert whole[0] == {"status": 200, "type": "text/event-stream"}
    assert "problem" not in whole[-1] and "[DONE]" in str(whole[-1])
    broken = Asked(live, mine, "/v1/chat/completions", chat("a break b")).lines()
    assert "A " in str(broken) and broken[-1] == {
        "problem": "the replica ended before its answer was complete"
    }
    long = Asked(live, mine, f"/bulk?bytes={try_service.ANSWER_BYTES_MAX + 1}").lines()
    assert long[-1] == {"problem": "cut after 4 MiB"}
    assert sum(len(str(line.get("text", ""))) for line in long) == try_service.ANSWER_BYTES_MAX
    assert Asked(live, mine, "/", "é" * (BODY_BYTES_MAX // 2 + 1)).status == 413

    # A sender who leaves gives the place back; until then no more than these.
    waits = ("/v1/chat/completions", chat("a wait"))
    held = [Asked(live, mine, *waits, held=True) for _ in range(EACH)]
    more = Asked(live, mine, "/")
    assert more.status == 429 and "stop one" in str(more.lines())
    for one in held:
        one.leave()
    until(lambda: Asked(live, mine, "/").status == 200)

    # Neither a viewer nor another tenant gets anything, and neither goes back.
    live.client.add_tenant("red")
    live.client.add_user("vi", {"*": Role.VIEWER})
    live.client.add_user("ann", {"red": Role.MEMBER})
    viewer = live.client.add_token(NewToken(user="vi", tenant="*")).secret
    other = live.client.add_token(NewToken(user="ann", tenant="red")).secret
    assert (Asked(live, viewer, "/").status, Asked(live, other, "/").status) == (403, 404)

    # The version before, with the present size, and only if it is the one that was meant.
    with pytest.raises(ShoalError, match="no other version"):
        live.client.roll_back_service("talk")
    chatting(serving, "two")
    view = serving.view()
    assert (view.version, view.before) == (2, 1)
    assert "secret" not in str(view.spec.replica.notify), "what is put back has a mask in it"
    live.client.submit_service(msgspec.structs.replace(view.spec, scale=Scale(least=1, most=3)))
    with pytest.raises(ShoalError, match="cannot go back to version 7, only to 1"):
        live.client.roll_back_service("talk", version=7)
    live.client.roll_back_service("talk", version=1)
    serving.settles(version=3)
    until(lambda: "one" in Asked(live, mine, "/v1/models").text())
    view = serving.view()
    assert view.spec.scale.most == 3 and view.before == 2

    live.client.stop_service("talk")
    until(serving.gone)
    assert Asked(live, mine, "/").status == 404


def test_places_are_few_and_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_service, "WHOLE_S", 0.01)

    async def story() -> None:
        tries = Tries(GatewayEntry)
        for number in range(AT_ONCE):
            tries.place(f"user{number // EACH}")
        with pytest.raises(Refusal) as mine:
            tries.place("user0")
        with pytest.raises(Refusal) as all_:
            tries.place("new")
        assert (mine.value.status, all_.value.status) == (429, 503)
        gone = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, gone.set)  # timers run in their order
        await gone.wait()
        assert not tries.under_way
        place = tries.place("user0")
        place.leave()
        place.leave()
        assert not tries.under_way

    asyncio.run(story())

"""A service that asks for keys, in a real cluster: a program, the page, and a revoked key."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from harness.waiting import until

from shoal.model.people import NewApiKey
from shoal.model.service import Probe, Route, Routing, Scale
from tests.api.test_try import Asked
from tests.gateway.world import get
from tests.live.cluster import Live
from tests.live.serving import Serving, serving_cluster


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving_cluster() as cluster:
        yield cluster


def test_a_key_opens_its_service_until_it_is_revoked(live: Live) -> None:
    talk, mine = Serving(live, "talk"), live.home.read_token()
    script = f"exec {sys.executable} -m tests.api.chat_server $PORT one"
    route = Route(service="talk", access=("cluster",), routing=Routing.CACHE, concurrency=8)
    made = talk.put(talk.shell(script), Scale(), Probe(path="/health"), route)
    talk.settles(version=made.version)
    port = talk.port

    def status(key: str = "", path: str = "/talk/echo") -> int:
        return get(port, path, headers={"authorization": f"Bearer {key}"} if key else {}).status

    assert status() == 401
    key = live.client.add_api_key(NewApiKey(services=("talk",), user="app", rpm=1_000))
    until(lambda: status(key.secret) == 200, "the gateway to know the key")
    assert live.client.api_keys(service="talk")[0].user == "app"
    assert key.secret not in (live.home.path / "gateway" / "callers.map").read_text()

    seen = Asked(live, mine, "/echo").text().lower()
    assert seen.startswith("get /echo\n") and "authorization" not in seen, "the page may, too"

    bearer = {"authorization": f"Bearer {key.secret}"}
    listed = get(port, "/v1/models", headers=bearer)
    assert [one["id"] for one in json.loads(listed.body)["data"]] == ["talk"]

    live.kill_controller()  # the proxy asks without one
    assert status() == 401 and status(key.secret) == 200
    until(lambda: live.client.status().now_ms > 0, "the next controller")
    live.client.revoke_api_key(key.key.id)
    until(lambda: status(key.secret) == 401, "the end of the key")
    assert live.client.api_keys() == []

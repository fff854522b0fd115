"""A real model behind a real engine: the example of llama.cpp, and what its own queue causes."""

from __future__ import annotations

import http.client
import json
import threading

import msgspec
import pytest
from harness.waiting import until

from shoal.forms.request import SERVICE, complete, read_file
from shoal.model.service import Scale
from tests.gateway.world import ROOT
from tests.live.cluster import live_cluster
from tests.live.serving import Serving, need_gateway, replica_ports

INSTALL_S = 240  # pip fetches the engine once
TALKERS = 12


def say(port: int, tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/llama/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, text
    return str(json.loads(text)["choices"][0]["finish_reason"])


@pytest.mark.soak  # a small server with a queue stands for it in test_services.py
@pytest.mark.outside("pip fetches an engine, HAProxy and a cluster start")
def test_an_engine_serves_a_model_and_its_own_queue_asks_for_more_replicas() -> None:
    need_gateway()
    file = read_file(SERVICE, ROOT / "examples" / "engine" / "llama.yaml")
    wish = complete(SERVICE, {}, file).spec
    # The gateway alone would be content with one replica.
    scale = Scale(least=1, most=2, target=1_000)
    with live_cluster(nodes=2, gpus=0) as live:
        policy = live.client.policy()
        live.client.set_policy(msgspec.structs.replace(policy, **replica_ports()))
        live.client.submit_service(msgspec.structs.replace(wish, scale=scale))
        llama = Serving(live, "llama")
        until(lambda: llama.view().state == "ready", more=lambda: llama.view().why)
        assert say(llama.port, 4) == "length"
        port, done, failed = llama.port, threading.Event(), []

        def talk() -> None:
            try:
                while not done.is_set():
                    say(port, 400)
            except (OSError, AssertionError, http.client.HTTPException) as error:
                failed.append(repr(error))

        threads = [threading.Thread(target=talk) for _ in range(TALKERS)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: llama.view().wanted == 2, more=lambda: llama.view())
            why = [one.why for one in llama.scaled()]
            assert any("wait inside the engines" in text for text in why), why
        finally:
            done.set()
            for thread in threads:
                thread.join(60)
        assert not failed

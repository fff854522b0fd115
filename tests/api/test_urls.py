"""Which URL of a service is for browsers, and which for programs."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.api.views import _browser_url, _url
from shoal.model.job import JobSpec
from shoal.model.service import GatewayEntry, Route, Service, ServiceSpec

PATH = "http://127.0.0.1:8080/chat/"


@pytest.mark.parametrize(
    ("entry", "route", "browser", "program"),
    [
        ({}, {}, "http://chat.localhost:8080/", PATH),
        ({"address": "0.0.0.0"}, {}, "http://chat.localhost:8080/", PATH),
        ({"address": "::"}, {}, "http://chat.localhost:8080/", "http://[::1]:8080/chat/"),
        ({"domain": "ai.example.com"}, {}, "http://chat.ai.example.com:8080/", PATH),
        ({"address": "10.0.0.7"}, {}, "", "http://10.0.0.7:8080/chat/"),
        (
            {"address": "10.0.0.7"},
            {"path": "/of/chat"},
            "http://10.0.0.7:8080/of/chat/",
            "http://10.0.0.7:8080/of/chat/",
        ),
        (
            {"address": "10.0.0.7", "certificate": "/x.pem"},
            {"host": "chat.example.com"},
            "https://chat.example.com:8080/",
            "https://10.0.0.7:8080/chat/",
        ),
        (
            {},
            {"port": 9443, "certificate": "tls"},
            "https://127.0.0.1:9443/",
            "https://127.0.0.1:9443/",
        ),
    ],
)
def test_the_urls(entry: dict[str, Any], route: dict[str, Any], browser: str, program: str) -> None:
    spec = ServiceSpec(
        name="chat", replica=JobSpec(command=("true",)), route=Route(service="chat", **route)
    )
    service, at = Service(spec=spec), GatewayEntry(**entry)
    assert (_browser_url(service, at), _url(service, at)) == (browser, program)

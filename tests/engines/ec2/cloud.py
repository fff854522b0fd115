"""An EC2 for tests: Moto's server, which is not ours, behind a small proxy of our own, which adds
what Moto lacks: client tokens, refused capacity, throttling, answers that are lost, and prices.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.error import HTTPError
from urllib.parse import parse_qs

import boto3
from moto.server import ThreadedMotoServer

REGION = "us-east-1"
IMAGE = "ami-12c6146b"  # one of Moto's
LIVING = ("pending", "running", "stopping", "stopped")
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
ERROR = (
    "<Response><Errors><Error><Code>{code}</Code><Message>{text}</Message></Error></Errors>"
    "<RequestID>1</RequestID></Response>"
)


class Cloud:
    """`full`: (type, zone) without room, "" for any. `throttled`, `lost`, `hidden`: of the next so
    many requests of an action, which are refused, answered to nobody, or seem to have no result."""

    def __init__(self, moto: str, client: Any) -> None:
        self._moto = moto
        self._client = client
        self._lock = threading.Lock()
        self.url = ""
        self.clear()

    def clear(self) -> None:
        urllib.request.urlopen(f"{self._moto}/moto-api/reset", data=b"").close()
        self.full: set[tuple[str, str]] = set()
        self.throttled: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.hidden: Counter[str] = Counter()
        self.prices: dict[tuple[str, str], str] = {}
        self.refusal: tuple[str, str] | None = None  # of RunInstances: code and message
        self.at_loss: Callable[[], None] = lambda: None
        self.asked: list[dict[str, str]] = []
        self._tokens: dict[str, tuple[dict[str, str], bytes]] = {}

    # -- what tests look at ----------------------------------------------------------------

    @property
    def env(self) -> dict[str, str]:
        return {**KEYS, "AWS_ENDPOINT_URL_EC2": self.url, "AWS_EC2_METADATA_DISABLED": "true"}

    def client(self) -> Any:
        """Past the proxy."""
        return self._client

    def instances(self, *states: str) -> list[dict[str, Any]]:
        found = self.client().describe_instances()["Reservations"]
        all_ = [one for each in found for one in each["Instances"]]
        return [one for one in all_ if one["State"]["Name"] in (states or LIVING)]

    def user_data(self, instance: str) -> str:
        found = self.client().describe_instance_attribute(InstanceId=instance, Attribute="userData")
        return base64.b64decode(found["UserData"]["Value"]).decode()

    def of(self, action: str) -> list[dict[str, str]]:
        return [one for one in self.asked if one["Action"] == action]

    # -- the proxy -------------------------------------------------------------------------

    def answer(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes] | None:
        """None: the connection breaks."""
        fields = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        action = fields.get("Action", "")
        with self._lock:
            self.asked.append(fields)
            if self._due(self.throttled, action):
                return _error(503, "RequestLimitExceeded", "Request limit exceeded.")
            status, found = self._found(action, fields, body, headers)
            if self._due(self.hidden, action):
                empty = b"<DescribeInstancesResponse><reservationSet/></DescribeInstancesResponse>"
                return 200, empty
            if not self._due(self.lost, action):
                return status, found
        self.at_loss()
        return None

    def _due(self, counts: Counter[str], action: str) -> bool:
        counts[action] -= 1
        return counts[action] >= 0

    def _found(
        self, action: str, fields: dict[str, str], body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        if action == "DescribeSpotPriceHistory" and self.prices:
            return 200, self._history()
        if action != "RunInstances":
            return self._forward(body, headers)
        if self.refusal is not None:
            return _error(400, *self.refusal)
        kind, zone = fields["InstanceType"], fields.get("Placement.AvailabilityZone", "")
        if {(kind, zone), (kind, "")} & self.full:
            text = f"We currently do not have sufficient {kind} capacity."
            return _error(500, "InsufficientInstanceCapacity", text)
        token = fields["ClientToken"]
        if token in self._tokens:
            before, answer = self._tokens[token]
            if before != fields:
                return _error(400, "IdempotentParameterMismatch", "Not the same parameters.")
            return 200, answer
        status, answer = self._forward(body, headers)
        if status == 200:
            self._tokens[token] = fields, answer
        return status, answer

    def _history(self) -> bytes:
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><availabilityZone>{zone}</availabilityZone>"
            f"<spotPrice>{price}</spotPrice><productDescription>Linux/UNIX</productDescription>"
            "<timestamp>2026-11-19T00:00:00.000Z</timestamp></item>"
            for (kind, zone), price in self.prices.items()
        )
        name = "DescribeSpotPriceHistoryResponse"
        return f"<{name}><spotPriceHistorySet>{items}</spotPriceHistorySet></{name}>".encode()

    def _forward(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        request = urllib.request.Request(self._moto, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return int(answer.status), bytes(answer.read())
        except HTTPError as error:
            return error.code, error.read()


def _error(status: int, code: str, text: str) -> tuple[int, bytes]:
    return status, ERROR.format(code=code, text=text).encode()


@contextmanager
def cloud() -> Iterator[Cloud]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    moto_url = f"http://{host}:{port}"
    # What EC2 can do is half a megabyte of JSON, which each session reads again.
    session = boto3.session.Session("test", "test", region_name=REGION)
    made = Cloud(moto_url, session.client("ec2", endpoint_url=moto_url))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept = ("Authorization", "Content-Type", "X-Amz-Date")
            found = made.answer(body, {name: self.headers[name] or "" for name in kept})
            if found is None:
                self.close_connection = True
                return
            status, answer = found
            self.send_response(status)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{proxy.server_port}"
    try:
        with (
            mock.patch.dict(os.environ, made.env),
            mock.patch("boto3.session.Session", return_value=session),
        ):
            yield made
    finally:
        proxy.shutdown()
        proxy.server_close()
        moto.stop()

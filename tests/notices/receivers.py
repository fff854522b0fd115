"""Real receivers: an HTTP server that can be told to misbehave, and a small SMTP server."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from harness.waiting import WAIT_S


class Receiver:
    """`answers`: the status for each request; 0 hangs until the receiver ends."""

    def __init__(self, answers: Callable[[], int] = lambda: 204, port: int = 0) -> None:
        self.answers = answers
        self.asked = 0
        self.taken: list[tuple[dict[str, str], bytes]] = []  # what was answered with 2xx
        self.over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.asked += 1
                status = receiver.answers()
                if not status:
                    receiver.over.wait(WAIT_S)
                    return
                if 200 <= status < 300:
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    receiver.taken.append((headers, body))
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", f"{receiver.url}elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """The sender may be gone."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def notices(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.taken]

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


def is_signed(key: str, headers: dict[str, str], body: bytes) -> bool:
    """As https://www.standardwebhooks.com describes it; it shares nothing with the sender."""
    secret = base64.b64decode(key.split("_", 1)[1])
    text = b".".join((headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body))
    wanted = base64.b64encode(hmac.digest(secret, text, hashlib.sha256)).decode()
    fresh = abs(time.time() - int(headers["webhook-timestamp"])) < 300
    return fresh and f"v1,{wanted}" in headers["webhook-signature"].split(" ")


class MailServer:
    """Speaks as much SMTP as a sender without TLS needs, with a login."""

    def __init__(self, password: str) -> None:
        self.mails: list[str] = []
        login = base64.b64encode(f"\0shoal\0{password}".encode()).decode()
        server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(b"220 mail\r\n")
                known = False
                while line := self.rfile.readline().decode().strip():
                    word = line.split(" ")[0].upper()
                    if word == "EHLO":
                        self.wfile.write(b"250-mail\r\n250 AUTH PLAIN\r\n")
                    elif word == "AUTH":
                        known = line == f"AUTH PLAIN {login}"
                        self.wfile.write(b"235 ok\r\n" if known else b"535 wrong password\r\n")
                    elif word == "DATA" and known:
                        self.wfile.write(b"354 go on\r\n")
                        lines = []
                        while (part := self.rfile.readline()) != b".\r\n":
                            lines.append(part.decode())
                        server.mails.append("".join(lines))
                        self.wfile.write(b"250 ok\r\n")
                    elif word == "QUIT":
                        self.wfile.write(b"221 bye\r\n")
                        return
                    else:
                        self.wfile.write(b"250 ok\r\n" if known else b"530 log in first\r\n")

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

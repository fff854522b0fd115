"""When a notebook's server counts as used."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shoal.cli.dev.server import Jupyter, moment

LAST = "2026-11-19T04:26:46.126943Z"
KERNEL = {"id": "k", "execution_state": "idle", "last_activity": LAST}


class WithoutTerminals(BaseHTTPRequestHandler):
    """As Jupyter answers if its user has switched terminals off."""

    def do_GET(self) -> None:
        known = self.path.startswith("/api/kernels?")
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps([KERNEL] if known else {"message": None}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_without_terminals_is_idle_when_its_kernels_are() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), WithoutTerminals)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert Jupyter(server.server_port, "token").used(0) == moment(LAST)
    finally:
        server.shutdown()
        server.server_close()

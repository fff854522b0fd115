"""A replica that notes each request when it begins and when its answer is sent, so that one which
failed because its replica died can be told from others."""

from __future__ import annotations

import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.soak.member import hold_gpus, note

WORK_S = 0.02
NOTES = Path(os.environ["SOAK_SHARED"]) / "requests" / os.environ["SHOAL_REF"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        number = parse_qs(urlsplit(self.path).query).get("n", [""])[0]
        if number:
            note(NOTES, f"begin {number}")
            time.sleep(WORK_S)
        body = os.environ["SHOAL_REF"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if number:
            note(NOTES, f"end {number}")

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    hold_gpus()
    ThreadingHTTPServer(("", int(os.environ["PORT"])), Handler).serve_forever()

"""A registry of images on this machine: as much of one as a pull needs."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Registry:
    """One image, `work:1`. While `open` is not set, half of its layer is sent. With a password,
    only `login` may have it."""

    def __init__(self, layer: bytes) -> None:
        self.open = threading.Event()
        self.login = ""
        self.layers_sent = 0
        self.blobs: dict[str, bytes] = {}
        packed = gzip.compress(layer, 1)
        uname = os.uname()
        config = {
            "architecture": ARCHITECTURES.get(uname.machine, uname.machine),
            "os": "linux",
            "config": {"Entrypoint": ["/no/such/entrypoint"], "Env": ["OF_THE_IMAGE=1"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
        self.layer = self._add(packed)
        kind = "application/vnd.docker"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kind}.distribution.manifest.v2+json",
            "config": {
                "mediaType": f"{kind}.container.image.v1+json",
                **self._named(self._add(json.dumps(config).encode())),
            },
            "layers": [
                {"mediaType": f"{kind}.image.rootfs.diff.tar.gzip", **self._named(self.layer)}
            ],
        }
        self.manifest = json.dumps(manifest).encode()
        self.digest = _digest(self.manifest)
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with contextlib.suppress(OSError):  # whoever pulled has gone away
                    registry.answer(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.image = f"{self.host}/work:1"

    def _add(self, data: bytes) -> str:
        digest = _digest(data)
        self.blobs[digest] = data
        return digest

    def _named(self, digest: str) -> dict[str, object]:
        return {"size": len(self.blobs[digest]), "digest": digest}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path
        wanted = "Basic " + base64.b64encode(self.login.encode()).decode()
        if self.login and request.headers.get("Authorization") != wanted:
            request.send_response(401)
            request.send_header("WWW-Authenticate", 'Basic realm="test"')
            self._send(request, b'{"errors":[{"code":"UNAUTHORIZED"}]}')
        elif path == "/v2/":
            request.send_response(200)
            self._send(request, b"{}")
        elif path in ("/v2/work/manifests/1", f"/v2/work/manifests/{self.digest}"):
            request.send_response(200)
            request.send_header("Docker-Content-Digest", self.digest)
            request.send_header("Content-Type", json.loads(self.manifest)["mediaType"])
            self._send(request, self.manifest)
        elif path.startswith("/v2/work/blobs/") and path.rpartition("/")[2] in self.blobs:
            request.send_response(200)
            self._send(request, self.blobs[path.rpartition("/")[2]])
        else:
            request.send_response(404)
            self._send(request, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"unknown"}]}')

    def _send(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "HEAD":
            return
        half = len(body) // 2 if body is self.blobs[self.layer] else len(body)
        self.layers_sent += body is self.blobs[self.layer]
        request.wfile.write(body[:half])
        request.wfile.flush()
        if half < len(body):
            self.open.wait(120)
        request.wfile.write(body[half:])

    def settings(self, folder: Path) -> dict[str, str]:
        """For podman: this registry has no certificate."""
        file = folder / "registries.conf"
        file.write_text(f'[[registry]]\nlocation = "{self.host}"\ninsecure = true\n')
        return {"CONTAINERS_REGISTRIES_CONF": str(file)}

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def registry(layer: bytes) -> Iterator[Registry]:
    made = Registry(layer)
    try:
        yield made
    finally:
        made.close()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"

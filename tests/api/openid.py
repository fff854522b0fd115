"""A small OpenID provider over HTTP on loopback: real keys, real codes, and lies on request."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

SECRET = "the client's secret"
ACCESS = "an access token"


@functools.cache
def rsa_key(name: str) -> rsa.RSAPrivateKey:
    """Making one takes a second."""
    assert name
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class FakeProvider:
    """Everybody who comes to `authorize` is the person in `person`; `lies` replaces claims."""

    def __init__(self) -> None:
        self.key = rsa_key("the provider's")
        self.kid = "k1"
        self.person: dict[str, Any] = {"sub": "1", "preferred_username": "ann", "groups": ["team"]}
        self.lies: dict[str, Any] = {}
        self.alg = "RS256"
        self.signing_key: Any = self.key
        self.agreed = False  # to the device
        self.codes: dict[str, dict[str, str]] = {}
        self.asked: list[dict[str, str]] = []  # at the token endpoint
        self.issuer = ""
        self.userinfo: dict[str, Any] = {}  # what the ID token leaves out
        self.methods: list[str] = ["client_secret_basic", "client_secret_post"]

    def jwks(self) -> dict[str, Any]:
        public = json.loads(RSAAlgorithm.to_jwk(self.key.public_key()))
        return {"keys": [{**public, "kid": self.kid, "use": "sig"}]}  # most name no algorithm

    def discovery(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/jwks",
            "device_authorization_endpoint": f"{self.issuer}/device",
            "userinfo_endpoint": f"{self.issuer}/userinfo",
            "authorization_response_iss_parameter_supported": True,
            "token_endpoint_auth_methods_supported": self.methods,
        }

    def id_token(self, nonce: str) -> str:
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": "shoal", "iat": now, "exp": now + 300, **self.person}
        if nonce:
            claims["nonce"] = nonce
        claims.update(self.lies)
        claims = {name: value for name, value in claims.items() if value is not None}
        key: Any = None if self.alg == "none" else self.signing_key
        return jwt.encode(claims, key, algorithm=self.alg, headers={"kid": self.kid})

    def authorize(self, query: dict[str, str]) -> str:
        code = secrets.token_urlsafe(8)
        self.codes[code] = query
        back = {"code": code, "state": query["state"], "iss": self.issuer}
        return f"{query['redirect_uri']}?{urlencode(back)}"

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        self.asked.append(form)
        posted = self.methods == ["client_secret_post"]
        given = form.get("client_secret") if posted else basic_secret(authorization)
        if given != SECRET or form.get("client_id") != "shoal":
            return 401, {"error": "invalid_client"}
        if form["grant_type"].endswith("device_code"):
            if form["device_code"] != "the-device":
                return 400, {"error": "invalid_grant"}
            if not self.agreed:
                return 400, {"error": "authorization_pending"}
            return 200, {"id_token": self.id_token(""), "access_token": ACCESS}
        asked = self.codes.pop(form["code"], None)
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if (
            asked is None
            or asked["code_challenge"] != challenge
            or asked["code_challenge_method"] != "S256"
            or asked["redirect_uri"] != form["redirect_uri"]
        ):
            return 400, {"error": "invalid_grant"}
        return 200, {"id_token": self.id_token(asked["nonce"]), "access_token": ACCESS}


def basic_secret(authorization: str) -> str:
    pair = base64.b64decode(authorization.removeprefix("Basic ")).decode()
    return unquote_plus(pair.partition(":")[2])


class _Handler(BaseHTTPRequestHandler):
    provider: FakeProvider

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        if where.path == "/authorize":
            self.send_response(302)
            self.send_header("Location", self.provider.authorize(query))
            self.end_headers()
        elif where.path == "/jwks":
            self._answer(200, self.provider.jwks())
        elif where.path == "/userinfo":
            known = self.headers["Authorization"] == f"Bearer {ACCESS}"
            person = {"sub": self.provider.person.get("sub"), **self.provider.userinfo}
            self._answer(200, person) if known else self._answer(401, {"error": "invalid_token"})
        else:
            self._answer(200, self.provider.discovery())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = {name: values[0] for name, values in parse_qs(body).items()}
        if self.path == "/device":
            answer = {
                "device_code": "the-device",
                "user_code": "WDJB-MJHT",
                "verification_uri": f"{self.provider.issuer}/activate",
                "expires_in": 300,
                "interval": 0,
            }
            self._answer(200, answer)
        else:
            self._answer(*self.provider.token(form, self.headers.get("Authorization", "")))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fake_provider() -> Iterator[FakeProvider]:
    provider = FakeProvider()
    handler = type("Handler", (_Handler,), {"provider": provider})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    provider.issuer = f"http://127.0.0.1:{server.server_address[1]}"
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield provider
    finally:
        server.shutdown()
        serving.join()
        server.server_close()

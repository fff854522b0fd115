"""An OpenID provider, as its client sees it: discovery, keys, codes, and what to believe."""

from __future__ import annotations

import base64
import hashlib
import http.client
import socket
import time
from typing import Any
from urllib.parse import quote_plus, urlencode, urlsplit

import msgspec

from shoal.api.problems import Refusal
from shoal.link.http import fetch
from shoal.model.people import OidcConfig

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 1024 * 1024
KNOWN_S = 3600.0  # how long discovery and keys are believed
LEEWAY_S = 60
# By public keys only. With a shared key, whoever knows the client's secret could write a token.
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"]
SCOPE = "openid profile email groups"
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"


class Discovery(msgspec.Struct, kw_only=True):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    device_authorization_endpoint: str = ""
    userinfo_endpoint: str = ""
    authorization_response_iss_parameter_supported: bool = False
    scopes_supported: list[str] = []
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


class Claims(msgspec.Struct, kw_only=True):
    """What is believed of a person."""

    subject: str
    name: str
    groups: list[str]


class Provider:
    """All methods block: they are called in a thread."""

    def __init__(self, config: OidcConfig) -> None:
        self.config = config
        self._known: tuple[float, Discovery] | None = None
        self._keys: tuple[float, dict[str, dict[str, Any]]] = (0.0, {})

    def discovery(self) -> Discovery:
        if self._known is not None and time.monotonic() - self._known[0] < KNOWN_S:
            return self._known[1]
        where = f"{self.config.issuer.rstrip('/')}/.well-known/openid-configuration"
        status, body = _fetch(where)
        try:
            found = msgspec.convert(body, Discovery)
        except msgspec.ValidationError as error:
            raise Refusal(502, f"{where} is not that of a provider: {error}", "issuer") from None
        if status != 200 or found.issuer != self.config.issuer:
            message = f"{where} speaks for {found.issuer[:200]}, not {self.config.issuer}"
            raise Refusal(502, message, "issuer")
        self._known = (time.monotonic(), found)
        return found

    def way_to_sign_in(self, redirect: str, state: str, nonce: str, verifier: str) -> str:
        """Where the browser goes. The code that comes back needs `verifier`."""
        found = self.discovery()
        digest = hashlib.sha256(verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self.config.client_id,
            "redirect_uri": redirect,
            "scope": self._scope(found),
            "state": state,
            "nonce": nonce,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        glue = "&" if "?" in found.authorization_endpoint else "?"
        return f"{found.authorization_endpoint}{glue}{urlencode(query)}"

    def redeem(self, code: str, redirect: str, verifier: str, nonce: str) -> Claims:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect,
            "code_verifier": verifier,
        }
        status, body = self._ask(self.discovery().token_endpoint, form)
        if status != 200 or "id_token" not in body:
            raise Refusal(401, f"the provider refused the code: {_reason(body)}")
        return self._person(body, nonce)

    def check_sender(self, issuer: str) -> None:
        """Of an answer that a browser brings. A provider that names itself there does so always,
        so that nobody can pass the answer of one provider off as that of another."""
        if not issuer and not self.discovery().authorization_response_iss_parameter_supported:
            return
        if issuer != self.config.issuer:
            raise Refusal(401, "this answer is not from the provider that was asked")

    def begin_device(self) -> dict[str, Any]:
        found = self.discovery()
        if not found.device_authorization_endpoint:
            message = f"{self.config.issuer} has no sign-in for devices; use a token instead"
            raise Refusal(501, message)
        form = {"scope": self._scope(found)}
        status, body = self._ask(found.device_authorization_endpoint, form)
        if status != 200 or "device_code" not in body:
            raise Refusal(502, f"the provider refused: {_reason(body)}")
        return body

    def poll_device(self, device_code: str) -> Claims | str:
        """The person, or how it stands: `authorization_pending` or `slow_down`."""
        form = {"grant_type": DEVICE_GRANT, "device_code": device_code}
        status, body = self._ask(self.discovery().token_endpoint, form)
        if status == 200 and "id_token" in body:
            return self._person(body, None)
        error = str(body.get("error", ""))
        if error in ("authorization_pending", "slow_down"):
            return error
        raise Refusal(401, f"the provider refused: {_reason(body)}")

    def _person(self, answer: dict[str, Any], nonce: str | None) -> Claims:
        """By the ID token. What it leaves out, as the standard has it for this flow, the provider
        tells whoever shows the access token that came with it."""
        config = self.config
        claims = self.believe(str(answer["id_token"]), nonce)
        where, token = self.discovery().userinfo_endpoint, answer.get("access_token")
        if where and token and not {config.user_claim, config.groups_claim} <= claims.keys():
            status, more = _fetch(where, authorization=f"Bearer {token}")
            if status != 200:
                raise Refusal(502, f"the provider refused to name the person: {_reason(more)}")
            if more.get("sub") != claims["sub"]:
                raise Refusal(401, "the provider named another person than its token does")
            claims = {**more, **claims}
        name, groups = claims.get(config.user_claim), claims.get(config.groups_claim, [])
        if not isinstance(name, str) or not name:
            message = f"the provider gave no {config.user_claim}"
            raise Refusal(403, f"{message}; set another user_claim: shoal oidc --help")
        if isinstance(groups, str):
            groups = [groups]
        return Claims(
            subject=f"{config.issuer}#{claims['sub']}",
            name=name,
            groups=[str(group) for group in groups] if isinstance(groups, list) else [],
        )

    def believe(self, id_token: str, nonce: str | None) -> dict[str, Any]:
        """The claims of an ID token, if this provider signed it, for us, now, for this sign-in."""
        jwt = _library()
        try:
            header = jwt.get_unverified_header(id_token)
            key = self._key(str(header.get("kid", "")), str(header.get("alg", "")))
            claims: dict[str, Any] = jwt.decode(
                id_token,
                key,
                algorithms=ALGORITHMS,
                audience=self.config.client_id,
                issuer=self.config.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iat", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise Refusal(401, f"the provider's token is not valid: {error}") from None
        azp = claims.get("azp")
        if azp is not None and azp != self.config.client_id:
            raise Refusal(401, "the provider's token is for another program")
        if nonce is not None and claims.get("nonce") != nonce:
            raise Refusal(401, "the provider's token belongs to another sign-in")
        return claims

    def _key(self, kid: str, alg: str) -> Any:
        jwt = _library()
        if alg not in ALGORITHMS:
            raise jwt.InvalidAlgorithmError(f"it is signed by {alg[:20] or 'nothing'}")
        key = self._named_key(kid)
        if key is None:
            raise jwt.InvalidKeyError("it is signed by a key that the provider does not name")
        if (meant := key.get("alg", alg)) != alg:
            raise jwt.InvalidAlgorithmError(f"the key is for {meant}, not {alg}")
        return jwt.PyJWK.from_dict(key, algorithm=alg).key  # one for RSA may serve several

    def _named_key(self, kid: str) -> dict[str, Any] | None:
        """A key that is new to us asks for the keys again: the token came from the provider itself,
        so nobody else can cause that."""
        since, keys = self._keys
        if kid not in keys or time.monotonic() - since >= KNOWN_S:
            keys = self._fetched_keys()
            self._keys = (time.monotonic(), keys)
        return keys.get(kid)

    def _fetched_keys(self) -> dict[str, dict[str, Any]]:
        _, body = _fetch(self.discovery().jwks_uri)
        listed = body.get("keys")
        return {
            str(key.get("kid", "")): key
            for key in (listed if isinstance(listed, list) else [])
            if isinstance(key, dict) and key.get("use", "sig") == "sig"
        }

    def _ask(self, url: str, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """As the client that the provider knows."""
        config = self.config
        form = {**form, "client_id": config.client_id}
        if not config.client_secret:
            return _fetch(url, form)
        if "client_secret_basic" in self.discovery().token_endpoint_auth_methods_supported:
            pair = f"{quote_plus(config.client_id)}:{quote_plus(config.client_secret)}"
            return _fetch(url, form, f"Basic {base64.b64encode(pair.encode()).decode()}")
        return _fetch(url, {**form, "client_secret": config.client_secret})

    def _scope(self, found: Discovery) -> str:
        """Some providers refuse a scope that they do not know."""
        known = found.scopes_supported or ["openid", "profile", "email"]
        return " ".join(scope for scope in SCOPE.split() if scope == "openid" or scope in known)


def _library() -> Any:
    try:
        import jwt
    except ImportError:
        message = "sign-in by OpenID Connect needs another package on the head"
        raise Refusal(501, f"{message}; install it with: pip install 'shoal[oidc]'") from None
    return jwt


def _fetch(
    url: str, form: dict[str, str] | None = None, authorization: str = ""
) -> tuple[int, dict[str, Any]]:
    """No redirects, no proxies, a bounded answer, within a bounded time."""
    parts = urlsplit(url)
    here = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
    if parts.scheme != "https" and not here:
        raise Refusal(502, f"{url[:200]} is not a safe address for a provider", "issuer")
    headers = {"Accept": "application/json"}
    if form is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    if authorization:
        headers["Authorization"] = authorization
    asked = urlencode(form).encode() if form is not None else None
    try:
        status, data = fetch(url, asked, headers, _connect, TIMEOUT_S, ANSWER_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException) as error:
        raise Refusal(502, f"the provider does not answer at {url[:200]} ({error})") from None
    try:
        body = msgspec.json.decode(data) if len(data) <= ANSWER_BYTES_MAX else None
    except msgspec.DecodeError:
        body = None
    if not isinstance(body, dict):
        raise Refusal(502, f"the provider's answer at {url[:200]} is not JSON ({status})")
    return status, body


def _connect(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), TIMEOUT_S)


def _reason(body: dict[str, Any]) -> str:
    return str(body.get("error_description") or body.get("error") or "no reason given")[:200]

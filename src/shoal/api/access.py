"""Access to the API: scripts use the token, browsers a session that began with it."""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

from shoal.api.forwarded import FORWARDED
from shoal.api.handling import Handler, is_schema
from shoal.api.http import Connection
from shoal.api.limits import PROVEN
from shoal.api.principal import (
    SAFE_METHODS,
    SCOPE,
    THE_OPERATOR,
    Principal,
    Proof,
    Session,
    acting,
    machine,
)
from shoal.api.problems import Refusal
from shoal.api.quotas import ENTRY, Quotas, enter, is_stream
from shoal.api.watcher import Entry, Watcher
from shoal.calls.call import Needs
from shoal.model.hidden import NO_HASH
from shoal.model.identity import OPERATOR, Identity, NodeKey, Token

SESSION_MS = 12 * 3600 * 1000
CODE_MS = 120_000
CODES_MAX = 1_000  # sign-in links not opened yet ...
CODES_EACH_MAX = 4  # ... and those of one token
TRIES_MAX = 10  # wrong tokens or codes ...
TRIES_MS = 60_000  # ... allowed within this time from one address
ADDRESSES_MAX = 1_000
CSRF_HEADER = "x-shoal-csrf"
INVITE_PREFIX = "invite"
TOKEN_PREFIX = "shoal"
API_KEY_PREFIX = "shoalkey"
CONNECTION_RETRY_S = 5  # a connection without a request is closed after this long
WRONG = (
    "the token is missing or wrong; get one from an admin (the operator's: file token in the home)"
)
ONLY_NEIGHBOR = "this token is for a neighboring cluster: it hands over jobs and services"
INVITE_OVER = "this invite was accepted, was removed or has expired; ask for another"
WRONG_KEY = (
    "the join token or key is wrong or was replaced; copy the file join-token of the head's home"
)


async def _at_once() -> None: ...


class Access:
    """`identity` gives the users and tokens as they are stored, once `settled` has returned."""

    def __init__(
        self,
        token: str,
        now_ms: Callable[[], int],
        names: Collection[str] = (),
        identity: Callable[[], Identity] = Identity,
        settled: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        if not token:
            raise ValueError("an empty token would let anyone in")
        self._token = token.encode()
        self._now_ms = now_ms
        self._identity = identity
        self.settled = settled
        self.quotas = Quotas()
        self.watcher = Watcher(self.stands, now_ms)
        # A cookie belongs to a host, not a port: two clusters on one machine must not share one.
        self.cookie = f"shoal-{self._sign('cookie')[:8]}"
        # Our own names. Another name may have been pointed at this host by an attacker (DNS
        # rebinding), so that a browser takes their page for ours.
        self._names = {"localhost", socket.gethostname().lower(), *names}
        self._codes: dict[str, tuple[int, str]] = {}  # -> expiry, token
        self._tries: dict[str, deque[int]] = {}

    def is_foreign(self, connection: Connection) -> bool:
        if connection.scope.get(FORWARDED):
            return False  # the head that it came to has looked
        name = _host_name(connection)
        here = connection.scope.get("server")
        if not name or name in self._names or (here and name == here[0]):
            return False
        if f"*.{name.partition('.')[2]}" in self._names:
            return False
        try:
            return not ipaddress.ip_address(name).is_loopback
        except ValueError:
            return not name.endswith(".localhost")

    async def guard(self, connection: Connection, handler: Handler) -> None:
        needs = handler.call.may if handler.call is not None else Needs.ADMIN
        # A browser holds no key of a node, and a proxy before us may have any name.
        if needs is not Needs.NODE and self.is_foreign(connection):
            name = _host_name(connection)[:64]
            message = f"{name!r} is not a name of this controller; use its address, or localhost"
            raise Refusal(421, message, "host")
        if needs is Needs.OPEN or is_schema(connection.scope["path"]):
            enter(self.quotas, connection, handler, None)
            return  # the list of requests is not secret
        if not self.bears_token(connection):
            await self.settled()
        who, session = self.principal(connection), None
        if who is None:
            session = self.session(connection)
            who = self.of_session(session)
            if who is None:
                enter(self.quotas, connection, handler, None)
                raise Refusal(401, self._wrong(connection, needs))
        self._watch(connection, handler, self._proof(who, session), needs)
        proven(connection, who)
        connection.scope[SCOPE] = who
        enter(self.quotas, connection, handler, who, session.name if session else "")
        if session is not None and connection.scope.get("method") not in SAFE_METHODS:
            self.refuse_forgery(connection, session)
        if who.only and (handler.call is None or not handler.call.neighbor):
            raise Refusal(403, ONLY_NEIGHBOR, "token")
        if not who.may(needs):
            raise Refusal(403, _lacking(who, needs))

    def _wrong(self, connection: Connection, needs: Needs) -> str:
        if needs is not Needs.NODE:
            return WRONG
        given = connection.headers.get("authorization", "").partition(" ")[2]
        key = self._identity().keys.get(given.partition("_")[2].partition("_")[0])
        secret = given.partition("_")[2].partition("_")[2]
        if key is not None and hmac.compare_digest(token_hash(secret), key.hash):
            return "the join token has expired; get another from an admin"
        return WRONG_KEY

    def _watch(self, connection: Connection, handler: Handler, proof: Proof, needs: Needs) -> None:
        entry = connection.scope.get(ENTRY)
        if isinstance(entry, Entry):
            self.watcher.enter(entry, proof, needs, stream=is_stream(connection, handler))

    def _proof(self, who: Principal, session: Session | None) -> Proof:
        if not who.token and not who.key:
            return Proof(who, until_ms=session.until_ms if session else 0, session=session)
        identity = self._identity()
        shown = identity.tokens.get(who.token) or identity.keys[who.key]
        until_ms = session.until_ms if session else shown.until_ms  # no later than its token's
        return Proof(who, shown, identity.users.get(who.user), until_ms, session)

    def stands(self, proof: Proof) -> Principal | None:
        """The sender by now, by what was shown then; None: it is void."""
        who, shown = proof.who, proof.shown
        if proof.session is not None and self._over(proof.session):
            return None
        if shown is None:
            return THE_OPERATOR
        identity = self._identity()
        known = identity.tokens.get(who.token) or identity.keys.get(who.key)
        if known is None or known.hash != shown.hash or 0 < known.until_ms <= self._now_ms():
            return None
        # A change makes other records: most have none, and thousands of links are looked at.
        same = known is shown and identity.users.get(who.user) is proof.user
        return who if same else self._of_token(known)

    def principal(self, connection: Connection) -> Principal | None:
        """The sender, by the token in the request."""
        if self.bears_token(connection):
            return THE_OPERATOR
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        return self.bearer(given) if scheme == "Bearer" else None

    def bearer(self, given: str) -> Principal | None:
        """`shoal_ID_SECRET`, of which only a hash is stored."""
        prefix, _, rest = given.partition("_")
        token_id, _, secret = rest.partition("_")
        identity = self._identity()
        known = identity.tokens.get(token_id) or identity.keys.get(token_id)
        token = known if prefix == TOKEN_PREFIX else None
        right = hmac.compare_digest(token_hash(secret), token.hash if token else NO_HASH)
        return self._of_token(token) if right else None

    def _of_token(self, token: Token | NodeKey | None) -> Principal | None:
        if token is None or 0 < token.until_ms <= self._now_ms():
            return None
        if isinstance(token, NodeKey):
            return machine(token)
        if token.invite:
            return None
        identity = self._identity()
        role = identity.role(token)
        if role is None:
            return None
        return acting(identity, token.user, token.tenant, role, token.id, token.only)

    def of_session(self, session: Session | None) -> Principal | None:
        if session is None:
            return None
        if not session.token:
            return THE_OPERATOR
        return self._of_token(self._identity().tokens.get(session.token))

    def bears_token(self, connection: Connection) -> bool:
        given = connection.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), b"Bearer " + self._token)

    def session(self, connection: Connection) -> Session | None:
        """The session in this request's cookie, if it is ours and still valid."""
        name, _, rest = connection.cookies.get(self.cookie, "").partition(".")
        until, _, rest = rest.partition(".")
        token, _, signature = rest.partition(".")
        signed = self._signature(connection, name, until, token)
        if not hmac.compare_digest(signature.encode(), signed.encode()):
            return None
        session = Session(name, int(until), token)
        return None if self._over(session) else session

    def _over(self, session: Session) -> bool:
        over = session.until_ms <= self._now_ms()
        return over or self._identity().has_ended(session.token, session.name, session.until_ms)

    def refuse_forgery(self, connection: Connection, session: Session) -> None:
        """Another site can make a browser send its cookie, but cannot read our CSRF token."""
        if not same_origin(connection):
            raise Refusal(403, "this request comes from another site; use the page itself")
        given = connection.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.csrf(session).encode()):
            raise Refusal(403, f"the header {CSRF_HEADER} is missing or wrong; reload the page")

    def csrf(self, session: Session) -> str:
        return self._sign("csrf", session.name)

    def sign_in(self, connection: Connection, token: str, code: str) -> tuple[Session, str]:
        """The new session and its cookie, for the token or for the code of a link."""
        self.refuse_foreign(connection)
        who = THE_OPERATOR if hmac.compare_digest(token.encode(), self._token) else None
        who = who or self.bearer(token) or self._redeem(code)
        if who is None or who.key or who.only:
            wrong = WRONG if token else "this link was used or has expired; get another: shoal page"
            raise self.guessed(connection, wrong)
        return self.begin(connection, who)

    def refuse_foreign(self, connection: Connection) -> None:
        if "origin" in connection.headers and not same_origin(connection):
            raise Refusal(403, "this request comes from another site; use the page itself")

    def guessed(self, connection: Connection, message: str) -> Refusal:
        """Only after a failure: one guesser must not lock out others at the same address."""
        address = connection.client.host if connection.client else ""
        self._refuse_guessing(address)
        self._tries.setdefault(address, deque(maxlen=TRIES_MAX)).append(self._now_ms())
        return Refusal(401, message)

    def invite(self, connection: Connection, code: str) -> Token:
        """The invite that this code is of; it may be accepted before this one accepts it."""
        prefix, _, rest = code.strip().partition("_")
        invite_id, _, secret = rest.partition("_")
        token = self._identity().tokens.get(invite_id) if prefix == INVITE_PREFIX else None
        right = hmac.compare_digest(invite_hash(secret), token.hash if token else NO_HASH)
        if token is None or not right or not token.invite or token.until_ms <= self._now_ms():
            raise self.guessed(connection, INVITE_OVER)
        return token

    def begin(self, connection: Connection, who: Principal) -> tuple[Session, str]:
        """A new session and its cookie, for a sender who has shown who they are."""
        token = self._identity().tokens.get(who.token) if who.token else None
        until_ms = self._now_ms() + SESSION_MS
        if token is not None and token.until_ms:
            until_ms = min(until_ms, token.until_ms)
        session, until = Session(secrets.token_hex(16), until_ms, who.token), str(until_ms)
        signature = self._signature(connection, session.name, until, session.token)
        return session, f"{session.name}.{until}.{session.token}.{signature}"

    def _signature(self, connection: Connection, name: str, until: str, token_id: str) -> str:
        """The token's hash is a part of it: another secret ends the sessions, too."""
        token = self._identity().tokens.get(token_id) if token_id else None
        secret = token.hash if token is not None else ""
        host = connection.headers.get("host", "")
        return self._sign("session", name, until, token_id, secret, host)

    def new_code(self, who: Principal) -> tuple[str, int]:
        """A code for a link that signs its sender in once and expires soon."""
        own = [code for code, (_, token) in self._codes.items() if token == who.token]
        for code in own[: len(own) + 1 - CODES_EACH_MAX]:
            del self._codes[code]
        while len(self._codes) >= CODES_MAX:
            del self._codes[next(iter(self._codes))]
        code, until_ms = secrets.token_urlsafe(24), self._now_ms() + CODE_MS
        self._codes[code] = (until_ms, who.token)
        return code, until_ms

    def _redeem(self, code: str) -> Principal | None:
        until_ms, token = self._codes.pop(code, (0, ""))
        if until_ms <= self._now_ms():
            return None
        return self._of_token(self._identity().tokens.get(token)) if token else THE_OPERATOR

    def _refuse_guessing(self, address: str) -> None:
        now_ms = self._now_ms()
        if len(self._tries) > ADDRESSES_MAX:
            self._tries = {a: t for a, t in self._tries.items() if t[-1] > now_ms - TRIES_MS}
        tries = self._tries.get(address)
        if tries and len(tries) >= TRIES_MAX and tries[0] > now_ms - TRIES_MS:
            raise Refusal(429, "too many wrong tokens; try again in a minute", "token")

    def _sign(self, *words: str) -> str:
        return hmac.new(self._token, "\n".join(words).encode(), hashlib.sha256).hexdigest()


def token_hash(secret: str) -> str:
    """Tokens are random and long, so that one round is enough: there is nothing to guess from."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def invite_hash(secret: str) -> str:
    """Another hash than a token's: the code of an invite is never taken for a token."""
    return token_hash(f"{INVITE_PREFIX} {secret}")


def new_invite() -> tuple[str, str, str]:
    """As `new_token`."""
    invite_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    return invite_id, f"{INVITE_PREFIX}_{invite_id}_{secret}", invite_hash(secret)


def new_api_key() -> tuple[str, str, str]:
    """As `new_token`. Longer ids than those of tokens: a caller is one or the other."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return key_id, f"{API_KEY_PREFIX}_{key_id}_{secret}", token_hash(secret)


def new_token(token_id: str = "") -> tuple[str, str, str]:
    """A token's id, the token as its user gets it, and the hash to store. With an id: another
    secret for that token."""
    token_id, secret = token_id or secrets.token_hex(4), secrets.token_urlsafe(32)
    return token_id, f"{TOKEN_PREFIX}_{token_id}_{secret}", token_hash(secret)


def same_origin(connection: Connection) -> bool:
    origin = urlsplit(connection.headers.get("origin", ""))
    return bool(origin.netloc) and origin.netloc == connection.headers.get("host", "")


def _lacking(who: Principal, needs: Needs) -> str:
    if who.key:
        return "this is the key of a node or a join token: it opens nothing but a node's link"
    if needs is Needs.NODE:
        return "this is for nodes alone; show the join token (file join-token in the head's home)"
    return f"this needs more than the role {who.role.value}; ask an admin"


def _host_name(connection: Connection) -> str:
    """The name in the Host header, without the port."""
    return _name_in(connection.headers.get("host", ""))


@functools.lru_cache(maxsize=64)
def _name_in(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return "?"


def proven(connection: Connection, who: Principal) -> None:
    """With too many connections, those that have shown a token are kept, but not too many of one
    tenant."""
    told = connection.scope.get(PROVEN)
    # Nodes are as few as the operator lets in, and must not be locked out by users.
    owner = "" if who.key or (who.user == OPERATOR and not who.token) else who.tenant
    if told is not None and not told(owner):
        message = f"tenant {owner} has too many connections open; close some, or try again in 5 s"
        raise Refusal(429, message, retry_s=CONNECTION_RETRY_S)

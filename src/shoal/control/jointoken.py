"""The cluster's standing join token, as text that other machines are given: a setting, which is a
file in the home of a cluster without a database."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from shoal.model.identity import NodeKey, order_key_id
from shoal.model.report import SetKey

if TYPE_CHECKING:
    from shoal.control.loop import ControlLoop
    from shoal.database.settings import Settings

NAME = "join-token"
NOTE = "the cluster's own"
ORDER_MS = 1_800_000  # how long machines of an order may take to join


def standing(settings: Settings) -> str:
    """The whole text; empty if there is none."""
    return (settings.get(NAME) or b"").decode("ascii", "replace").strip()


def standing_id(settings: Settings) -> str:
    return parts(standing(settings))[0]


def parts(text: str) -> tuple[str, str, str]:
    """The id, the secret, and the fingerprint of the certificate; empty if there is none."""
    secret, _, fingerprint = text.strip().partition(".")
    prefix, _, rest = secret.partition("_")
    key_id, _, hidden = rest.partition("_")
    return (key_id, hidden, fingerprint) if prefix == "shoal" and hidden else ("", "", "")


def write_standing(settings: Settings, secret: str, fingerprint: str) -> str:
    text = f"{secret}.{fingerprint.removeprefix('sha256:')}"
    if text != standing(settings):
        settings.set(NAME, text.encode() + b"\n")
    return text


async def keep_standing(loop: ControlLoop, settings: Settings, fingerprint: str) -> None:
    """The token that is set lets machines join; without one there is a new one."""
    import asyncio  # the command line reads tokens without it

    key_id, secret, _ = parts(await asyncio.to_thread(standing, settings))
    if not key_id:
        key_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    text = f"shoal_{key_id}_{secret}"
    await asyncio.to_thread(write_standing, settings, text, fingerprint)
    hash_ = hashlib.sha256(secret.encode()).hexdigest()
    await loop.settled()
    known = loop.state.identity.keys.get(key_id)
    if known is None or known.hash != hash_:
        key = NodeKey(id=key_id, hash=hash_, note=NOTE)
        await loop.request(SetKey(key, who="the controller"))


async def for_order(loop: ControlLoop, settings: Settings, order_id: str) -> str:
    """A join token for the machines of this order alone, each of them once. It is made of the
    cluster's own, so that an order that is sent again has the same one."""
    import asyncio
    import base64
    import hmac

    from shoal.model.report import Refused
    from shoal.ports import SupplyError

    _, standing_secret, fingerprint = parts(await asyncio.to_thread(standing, settings))
    await loop.settled()
    order = loop.state.orders.get(order_id)
    if order is None:
        raise SupplyError(f"order {order_id} is over")
    what = f"order {order_id} of {order.at_ms}".encode()
    digest = hmac.digest(standing_secret.encode(), what, "sha256")
    secret = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    key_id, hash_ = order_key_id(order_id), hashlib.sha256(secret.encode()).hexdigest()
    known, now_ms = loop.state.identity.keys.get(key_id), loop.clock.now_ms()
    if known is None or known.hash != hash_ or known.until_ms < now_ms + ORDER_MS // 2:
        until_ms, note = now_ms + ORDER_MS, f"order {order_id}"
        key = NodeKey(id=key_id, hash=hash_, until_ms=until_ms, note=note, order=order_id)
        answer = await loop.request(SetKey(key, who="the controller"))
        if isinstance(answer, Refused):
            raise SupplyError(f"its join token {answer.message}")
    return f"shoal_{key_id}_{secret}.{fingerprint}"
